"""What a search in the tree may give: mistakes of other prefix trees, as promises that this pool keeps."""

from __future__ import annotations

import itertools

import pytest
from pool_driving import NotedKV, compute, num_block_tokens, observe, remember, run

from pagedkv import BlockPool, UsageError


def test_a_block_whose_tokens_may_still_change_is_never_published() -> None:
    """A block that was rewritten at every step entered the tree each time and counted twice (SGLang)."""
    pool = BlockPool(8, block_size=4)
    seq = compute(pool, range(1, 9))
    for i in range(10):
        draft = [9, 10, 90 + i, 80 + i]
        pool.append(seq, draft)
        step = pool.reserve(seq, 4)
        pool.prepare(step)
        pool.commit(step, num_accepted=2 if i % 2 else 0)
        assert seq.num_tokens == (10 if i % 2 else 8)
        assert pool.match([*range(1, 9), *draft]).num_tokens == 8
        seq.truncate(8)
        stats = pool.stats()
        assert (stats.num_committed_blocks, stats.num_nodes, stats.num_free_blocks) == (2, 2, 6)
        pool.check_integrity()
    pool.append(seq, [9, 10, 11, 12])
    run(pool, seq)
    assert num_block_tokens(pool, range(1, 13)) == 12
    assert pool.stats().num_nodes == 3


def test_prompts_shorter_than_a_block_make_no_node() -> None:
    """A key shorter than a page left an empty node in the tree, on which eviction later died (SGLang)."""
    pool = BlockPool(4, block_size=64)
    remember(pool, range(63))
    assert pool.match(range(63)).num_tokens == 0
    assert pool.stats().num_nodes == 0
    remember(pool, range(64))
    assert pool.match(range(64)).num_block_tokens == 64
    before = observe(pool)
    short = pool.match(range(63))
    assert (short.num_block_tokens, short.num_partial_tokens) == (0, 63)
    assert pool.match([]).num_tokens == 0
    assert observe(pool) == before
    assert pool.evict(4) == 1
    assert pool.stats().num_nodes == 0
    assert pool.match(range(64)).num_tokens == 0


def test_no_tokens_are_no_node() -> None:
    pool = BlockPool(4, block_size=64)
    remember(pool, range(64))
    before = observe(pool)
    assert pool.match([]).num_tokens == pool.touch([]) == 0
    assert pool.match_lengths([[], range(64)]).tolist() == [0, 64]
    with pytest.raises(UsageError, match="open: expected at least one token, got none"):
        pool.open([])
    assert observe(pool) == before


def test_a_block_that_matches_in_part_is_never_shared() -> None:
    """Descending into a child that matched only in its first tokens returned all of its pages."""
    pool, kv = BlockPool(8, block_size=4), NotedKV(4)
    for tokens in (list(range(12)), [*range(8), 100, 101, 102, 103]):
        with pool.open(tokens) as seq:
            step = pool.reserve(seq, seq.num_uncached_tokens)
            kv.execute(pool.prepare(step), [kv.causes(tokens)])
            pool.commit(step)
    query = [0, 1, 2, 3, 4, 50, 51, 52, 53]
    found = pool.match(query)
    assert (found.num_block_tokens, found.num_partial_tokens) == (4, 1)
    seq = pool.open(query)
    step = pool.reserve(seq, seq.num_uncached_tokens)
    assert seq.num_cached_tokens == 5
    assert seq.block_ids[0] == found.block_ids[0]
    assert step.copies == [(found.partial_block_id, seq.block_ids[1], 1)]
    kv.execute(pool.prepare(step), [kv.causes(query)])
    assert pool.match([0, 1]).num_block_tokens == 0
    assert pool.match([0, 1]).num_partial_tokens == 2
    assert pool.match([7, 8, 9, 10]).num_tokens == 0


def test_whole_blocks_only_where_partial_runs_are_turned_off() -> None:
    pool = BlockPool(8, block_size=4, token_granular=False)
    remember(pool, range(12))
    assert pool.match([0, 1, 2, 3, 4, 50, 51, 52, 53]).num_tokens == 4
    assert pool.match([0, 1]).num_tokens == 0
    assert pool.open(range(7)).num_cached_tokens == 4


def test_a_run_ends_at_the_first_token_that_differs_among_any_number_of_siblings() -> None:
    """Blocks of three tokens out of {0, 1, 2} below one parent, and queries out of {0, 1, 2, 3}."""
    pool = BlockPool(40, block_size=3)
    present = [block for block in itertools.product(range(3), repeat=3) if sum(block) != 3]
    for block in present:
        remember(pool, [9, 9, 9, *block])
    for query in itertools.product(range(4), repeat=3):
        longest = max(n for block in present for n in range(4) if block[:n] == query[:n])
        found = pool.match([9, 9, 9, *query])
        assert found.num_tokens == 3 + longest
        assert found.num_block_tokens == (6 if query in present else 3)
    assert pool.stats().num_nodes == 1 + len(present)
