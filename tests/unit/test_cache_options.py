"""PagedKVCache hands on what attention and the writers can do; tables of fixed shape; pages of 8 bits."""

from __future__ import annotations

from typing import Any

import attention_oracle
import numpy as np
import pytest
import torch

from pagedkv import (
    BatchShape,
    KVCacheSpec,
    PagedKVCache,
    Sequence,
    SharedPrefixes,
    StateError,
    Step,
    UsageError,
)
from pagedkv import ops as pagedkv_ops

NUM_KV_HEADS, NUM_HEADS, HEAD_DIM = 2, 4, 16
GENERATOR = np.random.default_rng(0)
# K, V and query are functions of the token, so that a prefix found is a prefix computed.
KEYS, VALUES = GENERATOR.normal(size=(2, 50, NUM_KV_HEADS, HEAD_DIM))
QUERIES = GENERATOR.normal(size=(50, NUM_HEADS, HEAD_DIM))


def drawn(numbers: np.ndarray, token_ids: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(numbers).float()[token_ids]


def run(
    cache: PagedKVCache, seqs: list[Sequence], counts: list[int], **options: Any
) -> tuple[torch.Tensor, Any]:
    step = cache.reserve(seqs, counts)
    meta = cache.prepare(step)
    cache.write(0, drawn(KEYS, meta.token_ids), drawn(VALUES, meta.token_ids), meta)
    out = cache.attend(0, drawn(QUERIES, meta.token_ids), meta, **options)
    cache.commit(step)
    return out, meta


def expected(token_ids: list[int], num_queries: int, **options: Any) -> np.ndarray:
    query = QUERIES[token_ids[-num_queries:]]
    return attention_oracle.attend_with_lse(query, KEYS[token_ids], VALUES[token_ids], **options)[0]


OPTIONS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.1},
    "causal": {"causal": False},
    "window": {"window": 5},
    "soft_cap": {"soft_cap": 1.5},
    "alibi_slopes": {"alibi_slopes": torch.rand(NUM_HEADS)},
    "sinks": {"sinks": torch.rand(NUM_HEADS)},
    "mask": {"mask": torch.rand(9, 9) > 0.5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_attend_takes_every_option(name: str) -> None:
    cache = PagedKVCache(KVCacheSpec.uniform(1, NUM_KV_HEADS, HEAD_DIM), 8)
    tokens = list(range(20, 45))
    with cache.open(tokens) as seq:
        run(cache, [seq], [16])
        lse, out = (
            torch.full((9, NUM_HEADS), float("nan")),
            torch.full((9, NUM_HEADS, HEAD_DIM), float("nan")),
        )
        got, _ = run(cache, [seq], [9], **OPTIONS[name], out=out, lse=lse)
    assert got is out
    options = {
        key: value.numpy() if torch.is_tensor(value) else value for key, value in OPTIONS[name].items()
    }
    want = expected(tokens, 9, **options)
    assert not np.allclose(want, expected(tokens, 9), atol=1e-3)  # the option makes a difference
    np.testing.assert_allclose(out.numpy(), want, atol=1e-5)
    assert bool(lse.isfinite().all())


@pytest.mark.parametrize("arrangement", ["block", "layer"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("scales", [None, "token_head", "given"])
def test_pages_of_8_bits_answer_the_same_cold_found_and_copied(
    scales: Any, dtype: str, arrangement: Any
) -> None:
    kept: Any = "token_head" if scales == "token_head" else None
    spec = KVCacheSpec.uniform(1, NUM_KV_HEADS, HEAD_DIM, dtype, scales=kept)
    cache = PagedKVCache(spec, 12, arrangement=arrangement)
    if scales == "given":
        cache.pages.set_scales(0, torch.tensor(0.03), torch.full((NUM_KV_HEADS,), 0.03))
    first = list(range(48))
    with cache.open(first) as seq:
        cold, _ = run(cache, [seq], [48])
    # 37 tokens are found: two blocks, and five tokens of the third, which is copied with its scales.
    other = [*first[:37], 40, 41, 42]
    with cache.open(other) as seq:
        assert seq.num_cached_tokens == 37
        warm, _ = run(cache, [seq], [3])
    fresh = PagedKVCache(spec, 12, arrangement=arrangement)
    if scales == "given":
        fresh.pages.set_scales(0, torch.tensor(0.03), torch.full((NUM_KV_HEADS,), 0.03))
    with fresh.open(other) as seq:
        want, _ = run(fresh, [seq], [40])
    assert torch.equal(warm, want[37:])
    if scales is not None or dtype != "int8":  # which has no numbers between 0 and 1 without a scale
        for out, tokens in ((cold, first), (want, other)):
            exact = expected(tokens, len(tokens))
            error = np.linalg.norm(out.numpy() - exact) / np.linalg.norm(exact)
            assert error < (0.03 if dtype == "int8" else 0.1)


# ------------------------------------------------------------------------------------- shared prefixes


def test_shared_prefixes_are_used_unless_they_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PagedKVCache(KVCacheSpec.uniform(1, NUM_KV_HEADS, HEAD_DIM), 8)
    seen = []

    def spy(*tensors: Any, shared_prefixes: SharedPrefixes | None, **options: Any) -> Any:
        seen.append(shared_prefixes)
        return tensors[0]

    monkeypatch.setattr(pagedkv_ops, "paged_attention", spy)
    with cache.open([1, 2, 3]) as seq:
        _, meta = run(cache, [seq], [3])
        assert seen == [meta.shared_prefixes]
        cache.append(seq, 4)
        run(cache, [seq], [1], share_prefixes=False)
        assert seen[1] is None


# ------------------------------------------------------------------------------------------ fixed shape

SHAPE = BatchShape(num_seqs=4, num_tokens=10, max_blocks=3)


def make(num_blocks: int = 12) -> PagedKVCache:
    return PagedKVCache(KVCacheSpec.uniform(1, NUM_KV_HEADS, HEAD_DIM), num_blocks)


def test_a_step_of_fixed_shape_is_padded_with_what_touches_nothing() -> None:
    cache = make()
    step = cache.reserve([cache.open([5, 6, 7]), cache.open(list(range(18)))], [3, 2])
    plain, meta = cache.prepare(step), cache.prepare(step, shape=SHAPE)
    assert (meta.num_seqs, meta.num_tokens, meta.block_table.shape) == (4, 10, (4, 3))
    assert meta.block_table[:2, :1].tolist() == plain.block_table.tolist()
    assert bool((meta.block_table[:2, 1:] == -1).all() and (meta.block_table[2:] == -1).all())
    assert meta.slot_mapping.tolist() == [*plain.slot_mapping.tolist(), *[-1] * 5]
    assert meta.positions.tolist() == [0, 1, 2, 0, 1, 0, 0, 0, 0, 0]
    assert meta.token_ids.tolist() == [5, 6, 7, 0, 1, 0, 0, 0, 0, 0]
    assert meta.seq_lens.tolist() == [3, 2, 0, 0]
    assert meta.query_start_loc.tolist() == [0, 3, 5, 5, 5]
    assert (meta.max_query_len, meta.max_seq_len) == (3, 3)
    assert meta.last_token_index.tolist() == [2, 4, 4, 4]
    assert meta.shared_prefixes is None
    kv_indptr, kv_indices, kv_last_page_len = meta.csr()
    assert kv_indptr.tolist() == [0, 1, 2, 2, 2]
    assert kv_indices.tolist() == plain.block_table.flatten().tolist()
    assert kv_last_page_len.tolist() == [3, 2, 0, 0]


def test_a_padded_step_gives_the_bits_of_the_plain_one() -> None:
    for shape in (None, SHAPE):
        cache = make()
        cache.pages.blocks.fill_(float("nan"))
        seqs = [cache.open([5, 6, 7]), cache.open(list(range(18)))]
        run(cache, seqs, [1, 16])
        step = cache.reserve(seqs, [2, 2])
        meta = cache.prepare(step, shape=shape)
        cache.write(0, drawn(KEYS, meta.token_ids), drawn(VALUES, meta.token_ids), meta)
        out = cache.attend(0, drawn(QUERIES, meta.token_ids), meta)
        if shape is None:
            want = out
        else:
            assert torch.equal(out[:4], want)
            assert out[4:].abs().max() == 0


def test_steps_of_one_shape_lie_at_one_address() -> None:
    cache = make()
    seq = cache.open(list(range(40)))
    addresses = set()
    for count in (10, 1, 7):
        step = cache.reserve(seq, count)
        meta = cache.prepare(step, shape=SHAPE)
        assert cache.prepare(step, shape=SHAPE).positions.tolist() == meta.positions.tolist()
        names = "block_table", "slot_mapping", "seq_lens", "query_start_loc", "positions", "token_ids"
        addresses.add(tuple(getattr(meta, name).data_ptr() for name in names))
        assert len(set(next(iter(addresses)))) == 6
        cache.commit(step)
    assert len(addresses) == 1


def test_two_open_steps_of_one_shape_are_refused() -> None:
    cache = make()
    first, second = (cache.reserve(cache.open([i, 1]), 2) for i in range(2))
    meta = cache.prepare(first, shape=SHAPE)
    before = meta.block_table.clone()
    with pytest.raises(StateError, match=r"expected the last step of BatchShape.* to have ended"):
        cache.prepare(second, shape=SHAPE)
    assert second.state == "reserved"
    assert torch.equal(meta.block_table, before)
    cache.prepare(second, shape=SHAPE._replace(num_seqs=2))
    cache.abandon(first)
    cache.prepare(second, shape=SHAPE)


@pytest.mark.parametrize(
    ("name", "size", "needed"), [("num_seqs", 1, 2), ("num_tokens", 5, 6), ("max_blocks", 1, 2)]
)
def test_a_step_larger_than_its_shape_is_refused(name: str, size: int, needed: int) -> None:
    cache = make()
    seqs = [cache.open([5, 6, 7]), cache.open(list(range(18)))]
    run(cache, seqs[1:], [15])
    step = cache.reserve(seqs, [3, 3])
    with pytest.raises(UsageError, match=rf"expected shape\.{name} of at least {needed}, got {size}"):
        cache.prepare(step, shape=SHAPE._replace(**{name: size}))
    assert step.state == "reserved"


@pytest.mark.parametrize("shape", [5, (4, 10, 3), BatchShape(0, 1, 1), BatchShape(1, 1.5, 1), "shape"])  # type: ignore[arg-type]
def test_a_shape_that_is_none_is_refused(shape: Any) -> None:
    cache = make()
    step: Step = cache.reserve(cache.open([1]), 1)
    with pytest.raises(UsageError, match="prepare: "):
        cache.prepare(step, shape=shape)
    assert step.state == "reserved"


def test_a_cache_passes_its_policy_on() -> None:
    spec = KVCacheSpec.uniform(1, 1, 8)
    assert PagedKVCache(spec, 4, policy="lfu").pool.policy == "lfu"
