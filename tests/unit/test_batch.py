"""What a step's tables are as tensors: what rows share, and for how long they stay what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from prefix_oracle import check_prefixes

from pagedkv import AttentionMetadata, KVCacheSpec, PagedKVCache, Sequence, UsageError

SPEC = KVCacheSpec.uniform(1, 1, 16)


@pytest.fixture
def cache() -> PagedKVCache:
    return PagedKVCache(SPEC, 200)


def decode(cache: PagedKVCache, seqs: list[Sequence]) -> AttentionMetadata:
    """Compute what each has to compute; the step stays open."""
    for seq in seqs:
        if seq.num_uncached_tokens == 0:
            seq.append(1)
    return cache.prepare(cache.reserve(seqs, [seq.num_uncached_tokens for seq in seqs]))


def sharing(cache: PagedKVCache) -> list[Sequence]:
    """Three sequences that begin with the same 512 tokens, and one of its own."""
    cache.commit(decode(cache, [cache.open([1] * 513)]).step)
    return [cache.open([1] * 512 + [i, i]) for i in (2, 3, 4)] + [cache.open([5] * 20)]


def test_metadata_tell_what_rows_share(cache: PagedKVCache) -> None:
    meta = decode(cache, sharing(cache))
    assert meta.shared_prefixes is not None
    groups, rows = meta.shared_prefixes
    [[begin, end, first, last]] = groups.tolist()
    assert sorted(rows[begin:end].tolist()) == [0, 1, 2]
    assert (first, last) == (0, 32)
    assert check_prefixes(cache.pool.prepare(meta.step), 16, 32) == 2 * 32


def test_metadata_keep_what_rows_share_while_later_steps_share_other_pages(cache: PagedKVCache) -> None:
    seqs = sharing(cache)
    meta = decode(cache, seqs[:3])
    cache.commit(meta.step)
    assert meta.shared_prefixes is not None
    before = [tensor.tolist() for tensor in (meta.block_table, *meta.shared_prefixes)]
    for batch in (seqs[1:], seqs[:2], seqs[2:]):
        later = decode(cache, batch)
        cache.commit(later.step)
        assert [tensor.tolist() for tensor in (meta.block_table, *meta.shared_prefixes)] == before


@pytest.mark.parametrize("options", [{"share_prefixes": False}, {}])
def test_attention_does_not_depend_on_what_is_shared(options: dict[str, bool]) -> None:
    cache = PagedKVCache(SPEC, 200, **options)
    torch.manual_seed(0)
    cache.pages.blocks.normal_()
    meta = decode(cache, sharing(cache))
    assert (meta.shared_prefixes is None) is (options == {"share_prefixes": False})
    query = torch.randn(meta.num_tokens, 2, 16)
    shared, alone = (cache.attend(0, query, meta, share_prefixes=is_on) for is_on in (True, False))
    assert torch.equal(shared, alone)


def test_nothing_shared_is_none(cache: PagedKVCache) -> None:
    assert decode(cache, [cache.open([1] * 600), cache.open([2] * 600)]).shared_prefixes is None


def test_a_cache_refuses_share_prefixes_that_is_no_bool() -> None:
    with pytest.raises(UsageError, match="share_prefixes: expected"):
        PagedKVCache(SPEC, 4, share_prefixes="no")  # type: ignore[arg-type]


def tensors(meta: AttentionMetadata) -> dict[str, torch.Tensor]:
    names = ("block_table", "slot_mapping", "seq_lens", "query_start_loc", "positions", "token_ids")
    return {name: getattr(meta, name) for name in names}


def test_a_step_that_is_prepared_again_has_the_same_tables(cache: PagedKVCache) -> None:
    meta = decode(cache, sharing(cache))
    assert meta.shared_prefixes is not None
    before = [t.clone() for t in (*tensors(meta).values(), *meta.shared_prefixes)]
    for _ in range(5):
        again = cache.prepare(meta.step)
        assert again.shared_prefixes is not None
        for tensor, same in zip((*tensors(again).values(), *again.shared_prefixes), before, strict=True):
            assert torch.equal(tensor, same)


def test_the_tables_of_a_step_outlive_the_preparing_of_the_next_two(cache: PagedKVCache) -> None:
    """An engine launches a step, and prepares the next while it runs."""
    seqs = sharing(cache)
    cache.commit(decode(cache, seqs).step)
    held: list[tuple[dict[str, torch.Tensor], dict[str, np.ndarray[Any, Any]]]] = []
    for number in range(8):
        meta = decode(cache, seqs[number % 2 :])
        held = [*held[-2:], (tensors(meta), {name: t.numpy().copy() for name, t in tensors(meta).items()})]
        cache.commit(meta.step)
        del meta
        for kept, then in held:
            assert all(np.array_equal(kept[name], then[name]) for name in kept)
