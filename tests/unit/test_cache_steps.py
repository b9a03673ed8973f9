"""A step of PagedKVCache: its copies, its metadata, its end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool_driving import observe
from toy_cache import MODEL, OTHER, PROMPT, checked_cache, make_cache, remember
from toy_model import HEAD_DIM, NUM_HEADS

from pagedkv import (
    AttentionMetadata,
    BlockPool,
    OutOfBlocksError,
    PagedKVCache,
    StateError,
    StepTables,
)


@pytest.fixture
def cache() -> Iterator[PagedKVCache]:
    yield from checked_cache()


def test_copies_have_run_before_anything_is_read(cache: PagedKVCache) -> None:
    remember(cache, PROMPT[:48])
    with cache.open([*PROMPT[:41], 5]) as seq:
        source = int(seq.block_ids[2])
        step = cache.reserve(seq, 1)
        [(from_block, to_block, num_tokens)] = step.copies
        assert (from_block, num_tokens) == (source, 9)
        assert bool(cache.pages.blocks[to_block].isnan().all())
        meta = cache.prepare(step)
        assert torch.equal(cache.pages.blocks[to_block, :, :, :9], cache.pages.blocks[source, :, :, :9])
        assert meta.block_table[0].tolist()[2] == to_block
        MODEL.check(MODEL.forward(cache, meta), meta, [seq])
        cache.commit(step)


def test_preparing_again_does_not_undo_what_was_written(cache: PagedKVCache) -> None:
    remember(cache, PROMPT[:48])
    with cache.open([*PROMPT[:41], 5, 6]) as seq:
        step = cache.reserve(seq, 2)
        MODEL.forward(cache, cache.prepare(step))
        meta = cache.prepare(step)
        query = torch.ones(2, NUM_HEADS, HEAD_DIM)
        want = cache.attend(0, query, meta)
        assert torch.equal(cache.attend(0, query, cache.prepare(step)), want)
        cache.commit(step)
        cache.append(seq, 7)
        MODEL.step(cache, seq)


def test_a_source_is_kept_until_its_copy_has_run() -> None:
    cache = make_cache(6)
    remember(cache, PROMPT[:16])
    borrower = cache.open([*PROMPT[:9], 5])
    step = cache.reserve(borrower, 1)
    # Everything else that can be had is taken and written before the copy runs.
    for block_id in cache.pool.allocate(4):
        cache.pages.blocks[int(block_id)] = float("nan")
    with pytest.raises(OutOfBlocksError):
        cache.pool.allocate(1)
    meta = cache.prepare(step)
    MODEL.check(MODEL.forward(cache, meta), meta, [borrower])
    cache.commit(step)
    cache.check_integrity()


def test_metadata_stays_valid_until_its_step_ends(cache: PagedKVCache) -> None:
    slow, fast = cache.open(PROMPT[:40]), cache.open(OTHER[:20])
    step = cache.reserve(slow, 40)
    meta = cache.prepare(step)
    before = {name: value.clone() for name, value in vars(meta).items() if isinstance(value, torch.Tensor)}
    assert len(before) == 6
    for _ in range(4):  # steps of others come and go meanwhile
        MODEL.step(cache, fast)
        cache.append(fast, 1)
    for name, value in before.items():
        assert torch.equal(getattr(meta, name), value), name
    MODEL.check(MODEL.forward(cache, meta), meta, [slow])
    cache.commit(step)


def test_metadata_says_what_the_step_computes(cache: PagedKVCache) -> None:
    remember(cache, PROMPT[:32])
    seqs = [cache.open(PROMPT[:20]), cache.open(PROMPT[:32]), cache.open([4, 5, 6])]
    MODEL.step(cache, seqs[2])
    cache.append(seqs[2], [8, 9])
    step = cache.reserve(seqs, [1, 1, 2])
    meta = cache.prepare(step)
    assert (meta.num_seqs, meta.num_tokens, meta.max_query_len, meta.max_seq_len) == (3, 4, 2, 32)
    assert meta.block_size == 16
    assert meta.positions.tolist() == [19, 31, 3, 4]
    assert meta.token_ids.tolist() == [PROMPT[19], PROMPT[31], 8, 9]
    assert meta.seq_lens.tolist() == [20, 32, 5]
    assert meta.query_start_loc.tolist() == [0, 1, 2, 4]
    assert meta.last_token_index.tolist() == [0, 1, 3]
    assert meta.last_token_index.dtype == torch.int64
    tables = [seq.block_ids.tolist() for seq in seqs]
    assert meta.block_table.tolist() == [tables[0], tables[1], [*tables[2], -1]]
    page = tables[2][0] * 16
    assert meta.slot_mapping.tolist() == [-1 if i == 1 else s for i, s in enumerate(slots(meta, tables))]
    assert meta.slot_mapping.tolist()[2:] == [page + 3, page + 4]
    cache.abandon(step)


def slots(meta: AttentionMetadata, tables: list[list[int]]) -> list[int]:
    """Slot of each row, from its position and its sequence's table."""
    starts = meta.query_start_loc.tolist()
    rows = [i for i in range(meta.num_seqs) for _ in range(starts[i], starts[i + 1])]
    return [
        tables[i][position // 16] * 16 + position % 16
        for i, position in zip(rows, meta.positions.tolist(), strict=True)
    ]


def test_committing_a_step_that_was_never_prepared_is_refused(cache: PagedKVCache) -> None:
    seq = cache.open(PROMPT[:20])
    step = cache.reserve(seq, 20)
    before = observe(cache.pool, seq)
    with pytest.raises(StateError, match="commit: expected a prepared step, got one that is only reserved"):
        cache.commit(step)
    assert observe(cache.pool, seq) == before
    meta = cache.prepare(step)
    MODEL.check(MODEL.forward(cache, meta), meta, [seq])
    cache.commit(step)
    assert cache.match(PROMPT[:20]).num_block_tokens == 16


@pytest.mark.parametrize("end", ["commit", "abandon"])
def test_a_step_ends_once(cache: PagedKVCache, end: str) -> None:
    seq = cache.open(PROMPT[:20])
    step = cache.reserve(seq, 20)
    MODEL.forward(cache, cache.prepare(step))
    getattr(cache, end)(step)
    before = observe(cache.pool, seq)
    for verb in (cache.commit, cache.abandon, cache.prepare):
        with pytest.raises(StateError, match="expected an open step, got one that has ended"):
            verb(step)
    assert observe(cache.pool, seq) == before


# ------------------------------------------------------------------------------------------------ csr


def metadata(block_table: list[list[int]], seq_lens: list[int], block_size: int = 16) -> AttentionMetadata:
    starts = np.arange(len(seq_lens) + 1, dtype=np.int32)
    rows = np.zeros(len(seq_lens), np.int64)
    table = np.array(block_table, np.int32)
    lengths, no_groups = np.array(seq_lens, np.int32), np.zeros((0, 4), np.int32)
    tables = StepTables(table, rows, lengths, starts, rows, rows, [], no_groups, no_groups[0:0, 0])
    pool = BlockPool(1, block_size=block_size)
    return AttentionMetadata.from_tables(tables, pool.reserve(pool.open([0]), 1), torch.device("cpu"))


def test_csr_lists_the_pages_of_each_sequence() -> None:
    meta = metadata([[5, 3, 9], [1, -1, -1], [2, 5, -1], [7, -1, -1]], [33, 16, 31, 1])
    kv_indptr, kv_indices, kv_last_page_len = meta.csr()
    assert kv_indptr.tolist() == [0, 3, 4, 6, 7]
    assert kv_indices.tolist() == [5, 3, 9, 1, 2, 5, 7]
    assert kv_last_page_len.tolist() == [1, 16, 15, 1]


def test_a_last_page_is_full_at_a_multiple_of_the_block_size_and_empty_only_where_there_is_none() -> None:
    """A remainder of 0 was taken for an empty last page, so a whole block of KV went unread (nano-vllm)."""
    table = [[-1, -1], [0, -1], [1, -1], [2, 3], [4, 5]]
    kv_indptr, _, kv_last_page_len = metadata(table, [0, 1, 4, 5, 8], block_size=4).csr()
    assert kv_last_page_len.tolist() == [0, 1, 4, 1, 4]
    assert kv_last_page_len.dtype == torch.int32
    assert kv_indptr.tolist() == [0, 0, 1, 2, 4, 6]


@given(
    seq_lens=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 3, 16]),
    width=st.integers(0, 2),
)
def test_csr_is_the_block_table_without_its_padding(seq_lens: list[int], block_size: int, width: int) -> None:
    pages = iter(range(1000))
    tables = [[next(pages) for _ in range(-(-length // block_size))] for length in seq_lens]
    columns = max(map(len, tables)) + width
    # Also what lies behind the length but is no padding is left out.
    padded = [table + [next(pages) if width == 2 else -1] * (columns - len(table)) for table in tables]
    kv_indptr, kv_indices, kv_last_page_len = metadata(padded, seq_lens, block_size).csr()
    assert {kv_indptr.dtype, kv_indices.dtype, kv_last_page_len.dtype} == {torch.int32}
    assert kv_indices.tolist() == [page for table in tables for page in table]
    for i, (length, table) in enumerate(zip(seq_lens, tables, strict=True)):
        assert kv_indices[kv_indptr[i] : kv_indptr[i + 1]].tolist() == table
        assert (len(table) - 1) * block_size + int(kv_last_page_len[i]) == length
        assert 1 <= int(kv_last_page_len[i]) <= block_size
