"""Where a block ends and where a prompt does: mistakes by one, as promises that this pool keeps."""

from __future__ import annotations

import numpy as np
import pytest
from pool_driving import NotedKV, compute, num_block_tokens, observe, remember, run

from pagedkv import BlockPool, OutOfBlocksError, UsageError, hash_blocks

# ---------------------------------------------------------------------- full hits


def test_a_prompt_that_is_cached_whole_leaves_one_token_to_compute() -> None:
    """Whole blocks, all cached, left nothing to run; the first repair broke the chain of names (vLLM)."""
    pool = BlockPool(16)
    kv = NotedKV(16)
    tokens = list(range(32))
    for _ in range(2):
        seq = pool.open(tokens)
        step = pool.reserve(seq, seq.num_uncached_tokens)
        tables = pool.prepare(step)
        kv.execute(tables, [kv.causes(tokens)])
        pool.commit(step)
        if seq.num_cached_tokens:
            break
        seq.close()
    assert (seq.num_cached_tokens, tables.positions.tolist(), tables.slot_mapping.tolist()) == (
        31,
        [31],
        [-1],
    )
    assert tables.seq_lens.tolist() == [32]
    assert step.copies == []
    for token in range(100, 116):
        pool.append(seq, token)
        step = pool.reserve(seq, 1)
        kv.execute(pool.prepare(step), [kv.causes(seq.token_ids.tolist())])
        pool.commit(step)
    whole = tokens + list(range(100, 116))
    assert num_block_tokens(pool, whole) == 48
    assert [pool.digest_of(block_id) for block_id in seq.block_ids.tolist()] == hash_blocks(whole)


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(1, 0), (15, 0), (16, 15), (17, 16), (33, 32)])
def test_a_prompt_sent_twice_never_makes_an_empty_step(num_tokens: int, num_cached: int) -> None:
    pool = BlockPool(16)
    tokens = list(range(num_tokens))
    assert compute(pool, tokens).num_cached_tokens == 0
    again = pool.open(tokens)
    assert again.num_cached_tokens == num_cached
    assert again.num_uncached_tokens == num_tokens - num_cached
    tables = run(pool, again)
    assert np.diff(tables.query_start_loc).tolist() == [num_tokens - num_cached]
    assert again.num_computed_tokens == num_tokens


def test_a_full_hit_needs_no_page_even_where_the_pool_is_full_to_the_last() -> None:
    """To compute the last token again, a page was asked for that could not be had (vLLM)."""
    pool = BlockPool(2)
    first = compute(pool, range(32))
    second = pool.open(range(32))
    tables = run(pool, second)
    assert tables.slot_mapping.tolist() == [-1]
    assert second.block_ids.tolist() == first.block_ids.tolist()
    second.append(32)
    before = observe(pool, first, second)
    with pytest.raises(OutOfBlocksError):
        pool.reserve(second, 1)
    assert observe(pool, first, second) == before


def test_a_request_that_needs_every_position_can_give_up_its_hit() -> None:
    """Log-probabilities of a warm prompt came back for its uncached tail alone (vLLM)."""
    pool, tokens = BlockPool(16), list(range(57))
    remember(pool, tokens)
    seq = pool.open(tokens)
    assert seq.num_cached_tokens == 48
    seq.truncate(0)
    seq.append(tokens)
    tables = run(pool, seq)
    assert tables.positions.tolist() == list(range(57))
    assert (tables.slot_mapping >= 0).all()  # all of it is written, in pages of its own
    assert (seq.num_cached_tokens, seq.num_committed_tokens) == (0, 48)
    seq.close()
    assert pool.open(tokens).num_cached_tokens == 48


# ---------------------------------------------------------------------- growth


@pytest.mark.parametrize(
    ("start", "end", "takes_a_page"), [(0, 1, True), (3, 4, False), (4, 5, True), (7, 8, False), (8, 9, True)]
)
@pytest.mark.parametrize("is_full", [False, True])
def test_growth_takes_a_page_exactly_when_a_block_begins(
    start: int, end: int, takes_a_page: bool, is_full: bool
) -> None:
    """A remainder one off preempted requests that needed no page, or overran the free list (nano-vllm)."""
    pool = BlockPool(4, block_size=4)
    seq = pool.open(list(range(end)))
    if start:
        pool.commit(pool.reserve(seq, start))
    num_pages = len(seq.block_ids)
    assert num_pages == -(-start // 4)
    if is_full:
        pool.allocate(pool.stats().num_free_blocks)
    before = observe(pool, seq)
    if is_full and takes_a_page:
        with pytest.raises(OutOfBlocksError) as refusal:
            pool.reserve(seq, 1)
        assert (refusal.value.needed, refusal.value.free, refusal.value.evictable) == (1, 0, 0)
        assert observe(pool, seq) == before
    else:
        pool.commit(pool.reserve(seq, 1))
        assert len(seq.block_ids) == num_pages + takes_a_page
        assert seq.num_computed_tokens == end


def test_a_prompt_of_exactly_one_block_takes_one_page() -> None:
    pool = BlockPool(1)
    assert len(compute(pool, range(16)).block_ids) == 1


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_a_prompt_that_fills_the_pool_exactly_fits_and_one_token_more_does_not(num_blocks: int) -> None:
    """Admission was one off: a prompt that fits was refused, or one that does not was let in (nano-vllm)."""
    pool = BlockPool(num_blocks)
    too_long = pool.open(range(16 * num_blocks + 1))
    before = observe(pool, too_long)
    with pytest.raises(OutOfBlocksError) as refusal:
        pool.reserve(too_long, too_long.num_tokens)
    assert (refusal.value.needed, refusal.value.free) == (num_blocks + 1, num_blocks)
    assert observe(pool, too_long) == before
    too_long.close()
    with compute(pool, range(16 * num_blocks)) as seq:
        assert seq.num_computed_tokens == seq.num_reserved_tokens == 16 * num_blocks
    assert num_block_tokens(pool, range(16 * num_blocks + 1)) == 16 * num_blocks


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 8, 16])
def test_a_prompt_in_chunks_of_any_size_takes_and_publishes_the_same(chunk: int) -> None:
    pool, tokens = BlockPool(8, block_size=4), list(range(16))
    seq, kv = pool.open(tokens), NotedKV(4)
    while seq.num_uncached_tokens:
        step = pool.reserve(seq, min(chunk, seq.num_uncached_tokens))
        assert len(seq.block_ids) == -(-(seq.num_computed_tokens + step.num_new_tokens[0]) // 4)
        kv.execute(pool.prepare(step), [kv.causes(tokens)])
        pool.commit(step)
        assert seq.num_committed_tokens == num_block_tokens(pool, tokens) == seq.num_computed_tokens // 4 * 4
    assert seq.num_reserved_tokens == 16
    assert seq.block_hashes == hash_blocks(tokens, block_size=4)


# ---------------------------------------------------------------------- truncate


def test_truncate_keeps_exactly_what_it_was_told_to() -> None:
    """Cutting to nothing kept everything; cutting more than there was left a stale token (transformers)."""
    pool = BlockPool(4, block_size=4)
    seq = compute(pool, [1, 2, 3])
    with pytest.raises(UsageError, match="expected"):
        seq.truncate(4)
    with pytest.raises(UsageError, match="expected"):
        seq.truncate(-2)
    before = observe(pool, seq)
    seq.truncate(3)
    assert observe(pool, seq) == before
    seq.truncate(0)
    assert (seq.num_tokens, seq.num_computed_tokens, len(seq.block_ids)) == (0, 0, 0)
    assert pool.stats().num_free_blocks == 4


def test_truncate_releases_pages_and_keeps_published_blocks_matchable() -> None:
    pool = BlockPool(8, block_size=4)
    tokens = list(range(9))
    seq = compute(pool, tokens)
    held = []
    for num_tokens in (8, 5, 4, 0):
        seq.truncate(num_tokens)
        held.append(len(seq.block_ids))
    assert held == [2, 2, 1, 0]
    assert num_block_tokens(pool, tokens) == 8
    pool.append(seq, 99)
    run(pool, seq)
    assert len(seq.block_ids) == 1
    assert not set(seq.block_ids.tolist()) & set(pool.match(tokens).block_ids.tolist())
    assert seq.token_ids.tolist() == [99]


def test_writing_behind_a_cut_spares_the_published_page() -> None:
    pool, kv = BlockPool(8, block_size=4), NotedKV(4)
    tokens = list(range(8))
    seq = pool.open(tokens)
    step = pool.reserve(seq, 8)
    kv.execute(pool.prepare(step), [kv.causes(tokens)])
    pool.commit(step)
    published = seq.block_ids.tolist()
    seq.truncate(6)
    pool.append(seq, [60, 70])
    step = pool.reserve(seq, 2)
    assert step.copies == [(published[1], seq.block_ids[1], 2)]
    kv.execute(pool.prepare(step), [kv.causes([*range(6), 60, 70])])
    pool.commit(step)
    assert pool.match(tokens).block_ids.tolist() == published
    assert num_block_tokens(pool, [*range(6), 60, 70]) == 8


@pytest.mark.parametrize("num_kept", range(13))
def test_a_cut_anywhere_leaves_what_is_before_it_and_publishes_only_what_follows(num_kept: int) -> None:
    """A cut off by one left a stale token, which then had a name in the cache (transformers, mlx-lm)."""
    pool, kv = BlockPool(16, block_size=4), NotedKV(4)
    tokens = list(range(12))
    seq = pool.open(tokens)
    step = pool.reserve(seq, 12)
    kv.execute(pool.prepare(step), [kv.causes(tokens)])
    pool.commit(step)
    seq.truncate(num_kept)
    assert (seq.num_tokens, len(seq.block_ids)) == (num_kept, -(-num_kept // 4))
    grown = [*tokens[:num_kept], *range(100, 113 - num_kept)]
    seq.append(grown[num_kept:])
    step = pool.reserve(seq, seq.num_uncached_tokens)
    kv.execute(pool.prepare(step), [kv.causes(grown)])
    pool.commit(step)
    assert num_block_tokens(pool, tokens) == 12  # as before the cut
    assert num_block_tokens(pool, grown) == len(grown) // 4 * 4
    assert seq.block_hashes == hash_blocks(grown, block_size=4)
    seq.close()
    assert pool.stats().num_free_blocks + pool.stats().num_evictable_blocks == 16
