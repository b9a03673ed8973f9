"""Mistakes that other KV caches made, each as a promise that this pool keeps.

Where something must miss, the same data must hit as well: a pool that never hits keeps every secret.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pool_driving import NotedKV, compute, digests, drain, num_block_tokens, observe, remember, run

from pagedkv import BlockPool, KVCacheSpec, OutOfBlocksError, SpecError, StateError, UsageError, hash_blocks

ZERO_TO_47 = list(range(48))


# ---------------------------------------------------------------------- what a page is named


def test_a_page_taken_for_new_tokens_is_no_longer_found_under_the_old_ones() -> None:
    """A page got a new owner while the index still led to it, and served the new owner's KV (nano-vllm)."""
    pool = BlockPool(2, block_size=4)
    x, y, z = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]
    remember(pool, x)
    assert num_block_tokens(pool, x) == 4
    seqs = [pool.open(y), pool.open(z)]
    step = pool.reserve(seqs, [4, 4])
    assert num_block_tokens(pool, x) == 0  # taken, though not written yet
    pool.prepare(step)
    pool.commit(step)
    for seq in seqs:
        seq.close()
    assert [num_block_tokens(pool, tokens) for tokens in (x, y, z)] == [0, 4, 4]
    assert set(digests(pool)) == {hash_blocks(y, block_size=4)[0], hash_blocks(z, block_size=4)[0]}


def test_a_block_is_found_only_after_its_kv_was_written() -> None:
    """Pages entered the index when they were taken; whoever hit them meanwhile read garbage (TGI, vLLM)."""
    pool = BlockPool(8)
    tokens = list(range(32))
    first, same_moment = pool.open(tokens), pool.open(tokens)
    aborted = pool.reserve(first, 32)
    assert num_block_tokens(pool, tokens) == 0
    step = pool.reserve(same_moment, 32)
    assert step.num_new_tokens == [32]  # it plans all of them itself
    pool.abandon(aborted)
    first.close()
    assert num_block_tokens(pool, tokens) == 0
    pool.prepare(step)
    pool.commit(step)
    found = pool.match(tokens)
    assert found.num_block_tokens == 32
    assert found.block_ids.tolist() == same_moment.block_ids.tolist()


def test_two_sequences_of_one_step_do_not_read_each_others_unwritten_pages() -> None:
    """The same, with the two requests in one batch."""
    pool, kv = BlockPool(8, block_size=4), NotedKV(4)
    seqs = [pool.open([1] * 8), pool.open([1] * 8)]
    step = pool.reserve(seqs, [8, 8])
    assert not set(seqs[0].block_ids.tolist()) & set(seqs[1].block_ids.tolist())
    kv.execute(pool.prepare(step), [kv.causes([1] * 8)] * 2)
    pool.commit(step)


@pytest.mark.parametrize("survivor", [0, 1])
def test_evicting_one_copy_of_a_block_leaves_the_other_findable(survivor: int) -> None:
    """A block computed twice had one entry for two pages; evicting one page erased both (kvcached)."""
    pool = BlockPool(4)
    tokens = list(range(16))
    seqs = [pool.open(tokens), pool.open(tokens)]
    run(pool, *seqs)
    pages = [int(seq.block_ids[0]) for seq in seqs]
    assert pages[0] != pages[1]
    assert pool.digest_of(pages[0]) == pool.digest_of(pages[1]) == hash_blocks(tokens)[0]
    assert pool.stats().num_nodes == 1
    seqs[1 - survivor].close()
    seqs[survivor].close()
    assert pool.evict(1) == 1
    assert pool.match(tokens).block_ids.tolist() == [pages[survivor]]
    assert pool.evict(1) == 1
    assert num_block_tokens(pool, tokens) == 0
    assert pool.stats().num_free_blocks == 4


def test_evicting_a_surplus_copy_leaves_the_page_in_use_findable() -> None:
    pool = BlockPool(4)
    tokens = list(range(16))
    held, surplus = pool.open(tokens), pool.open(tokens)
    run(pool, held, surplus)
    surplus.close()
    assert pool.evict(4) == 1
    assert pool.match(tokens).block_ids.tolist() == held.block_ids.tolist()


# ---------------------------------------------------------------------- references


def test_a_page_listed_twice_in_one_release_is_not_freed_twice() -> None:
    """One release that named a page twice put it on the free list twice, and two owners got it (vLLM)."""
    pool = BlockPool(10)
    pages = pool.allocate(10).tolist()
    before = observe(pool)
    with pytest.raises(StateError):
        pool.free([pages[9], pages[9]])
    assert observe(pool) == before
    pool.free([pages[9]])
    pool.free(pages[:9])
    assert sorted(pool.allocate(10).tolist()) == list(range(10))
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)


def test_a_page_of_two_sequences_is_evictable_only_after_both_let_go() -> None:
    """References were counted by entries rather than owners, so one close took the page from the other."""
    pool = BlockPool(4, block_size=4)
    first = compute(pool, [1] * 5)
    second = compute(pool, [1] * 4 + [2])
    assert first.block_ids[0] == second.block_ids[0]
    for seq, evictable in ((first, 0), (second, 1)):
        seq.close()
        assert pool.stats().num_evictable_blocks == evictable
    assert pool.stats().num_free_blocks == 3


# ---------------------------------------------------------------------- which page goes next


def test_a_path_is_evicted_from_its_end() -> None:
    """Parents went before their children, which nobody could find any more though they filled the pool."""
    pool = BlockPool(3, block_size=4)
    tokens = list(range(12))
    with compute(pool, tokens) as seq:
        pages = seq.block_ids.tolist()
    assert pool.allocate(1).tolist() == [pages[2]]
    assert num_block_tokens(pool, tokens) == 8
    assert pool.allocate(1).tolist() == [pages[1]]
    assert num_block_tokens(pool, tokens) == 4


def _close_each(pool: BlockPool) -> None:
    for tokens in (list(range(12)), list(range(50, 58))):
        compute(pool, tokens).close()


def _close_while_a_step_is_open(pool: BlockPool) -> None:
    seqs = [compute(pool, tokens) for tokens in (list(range(12)), list(range(50, 58)))]
    pool.append(seqs, [[1], [1]])
    step = pool.reserve(seqs, [1, 1])
    for seq in reversed(seqs):
        seq.close()
    pool.abandon(step)


def _preempt(pool: BlockPool) -> None:
    seqs = [compute(pool, tokens) for tokens in (list(range(12)), list(range(50, 58)))]
    for seq in seqs:
        seq.preempt()
        seq.close()


@pytest.mark.parametrize("release", [_close_each, _close_while_a_step_is_open, _preempt])
def test_every_way_to_release_pages_gives_the_same_order(release: Callable[[BlockPool], None]) -> None:
    """The path that waits for a running step released pages in another order than the direct one (vLLM)."""
    pool = BlockPool(8, block_size=4)
    release(pool)
    a = hash_blocks(range(12), block_size=4)
    b = hash_blocks(range(50, 58), block_size=4)
    names = digests(pool)
    assert [names[block_id] for block_id in drain(pool)] == [a[2], a[1], a[0], b[1], b[0]]


def test_pages_that_cannot_be_hit_never_push_out_pages_that_can() -> None:
    """Released pages that were only partly filled queued up behind cached ones, and aged these out (vLLM)."""
    pool = BlockPool(4, block_size=4)
    tokens = list(range(8))
    remember(pool, tokens)
    for i in range(100):
        remember(pool, [100 + i, 200])
    assert num_block_tokens(pool, tokens) == 8
    assert pool.stats().num_evicted_blocks == 0


# ---------------------------------------------------------------------- full hits and block boundaries


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


# ---------------------------------------------------------------------- the tree


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


# ---------------------------------------------------------------------- salts


def test_a_salt_keeps_tenants_apart_and_each_hits_its_own() -> None:
    """One tenant could tell from a hit what another had asked (vLLM)."""
    pool = BlockPool(16)
    remember(pool, ZERO_TO_47, cache_salt="s1")
    assert num_block_tokens(pool, ZERO_TO_47, cache_salt="s1") == 48
    assert pool.match(ZERO_TO_47, cache_salt="s2").num_tokens == 0
    assert pool.match(ZERO_TO_47).num_tokens == 0
    remember(pool, ZERO_TO_47)
    assert num_block_tokens(pool, ZERO_TO_47) == 48
    assert pool.match(ZERO_TO_47, cache_salt="s2").num_tokens == 0
    assert pool.open(ZERO_TO_47, cache_salt="s2").num_cached_tokens == 0
    assert len(set(digests(pool)) - {None}) == 6


# ---------------------------------------------------------------------- sizes


@pytest.mark.parametrize("block_size", [0, -16, 16.5, True, "16", None, 2**16])
def test_an_impossible_block_size_is_refused_when_the_pool_is_made(block_size: object) -> None:
    """A page size of 0 was accepted, and divided by later (vLLM, lmdeploy)."""
    with pytest.raises(UsageError, match=r"block_size: expected .*, got"):
        BlockPool(4, block_size=block_size)
    with pytest.raises(SpecError, match=r"block_size: expected .*, got"):
        KVCacheSpec.uniform(2, 2, 8, block_size=block_size)


@pytest.mark.parametrize("block_size", [1, 3, 16, 48, 2**16 - 1])
def test_the_reported_block_size_is_the_one_in_use(block_size: int) -> None:
    pool = BlockPool(2, block_size=block_size)
    assert pool.block_size == block_size
    with compute(pool, range(block_size)) as seq:
        assert seq.num_reserved_tokens == seq.num_committed_tokens == block_size
    assert KVCacheSpec.uniform(2, 2, 8, block_size=block_size).block_size == block_size
