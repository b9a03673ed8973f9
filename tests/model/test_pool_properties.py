"""What a caller of the pool may rely on, one promise a test."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import hypothesis.strategies as st
import pytest
from hypothesis import event, given
from pool_driving import NotedKV, compute, drain, num_block_tokens, observe, remember, run

from pagedkv import BlockPool, Media, OutOfBlocksError, Sequence, StateError

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=6)


def twins(build: Callable[[], tuple[BlockPool, list[Sequence]]]) -> list[tuple[BlockPool, list[Sequence]]]:
    """The same history twice. The pool is deterministic, so a difference comes from what follows."""
    made = [build(), build()]
    assert observe(made[0][0], *made[0][1]) == observe(made[1][0], *made[1][1])
    return made


def assert_nothing_changed(
    build: Callable[[], tuple[BlockPool, list[Sequence]]],
    refused: Callable[[BlockPool, list[Sequence]], object],
    error: type[Exception],
) -> None:
    """A refused call leaves no trace: not in what can be seen, and not in the order of later evictions."""
    (pool, seqs), (untouched, their_seqs) = twins(build)
    with pytest.raises(error):
        refused(pool, seqs)
    assert observe(pool, *seqs) == observe(untouched, *their_seqs)
    for seq in [*seqs, *their_seqs]:
        if not seq.is_closed:
            seq.close()
    assert drain(pool) == drain(untouched)


@given(history=PROMPTS, waiting=PROMPTS, num_raw=st.integers(0, 3), block_size=st.sampled_from([2, 4]))
def test_failed_reserve_changes_nothing(
    history: list[list[int]], waiting: list[list[int]], num_raw: int, block_size: int
) -> None:
    def build() -> tuple[BlockPool, list[Sequence]]:
        pool = BlockPool(8, block_size=block_size)
        remember(pool, *history)
        pool.allocate(min(num_raw, 8 - pool.stats().num_committed_blocks))
        seqs = [pool.open(tokens) for tokens in waiting]
        for seq in seqs[::2]:
            seq.preempt()
        return pool, seqs

    pool, seqs = build()
    with contextlib.suppress(OutOfBlocksError):
        pool.reserve(seqs, [seq.num_uncached_tokens for seq in seqs])
        return
    event("refused")
    assert_nothing_changed(
        build, lambda p, s: p.reserve(s, [seq.num_uncached_tokens for seq in s]), OutOfBlocksError
    )


def test_failed_reserve_gives_back_what_a_preempted_sequence_matched() -> None:
    def build() -> tuple[BlockPool, list[Sequence]]:
        pool = BlockPool(4, block_size=4)
        remember(pool, [1] * 4, [2] * 4)
        seq = pool.open([1] * 4 + [3] * 12)
        seq.preempt()
        pool.allocate(1)
        return pool, [seq]

    assert_nothing_changed(build, lambda pool, seqs: pool.reserve(seqs, [16]), OutOfBlocksError)


def test_failed_allocate_changes_nothing() -> None:
    def build() -> tuple[BlockPool, list[Sequence]]:
        pool = BlockPool(4, block_size=4)
        remember(pool, [1] * 8, [2] * 4)
        return pool, [pool.open([1] * 9)]

    assert_nothing_changed(build, lambda pool, _: pool.allocate(3), OutOfBlocksError)


def test_match_changes_nothing_not_even_the_order_of_eviction() -> None:
    def build() -> tuple[BlockPool, list[Sequence]]:
        pool = BlockPool(4, block_size=4)
        remember(pool, [1] * 8, [2] * 4)
        return pool, []

    (pool, _), (untouched, _) = twins(build)
    assert num_block_tokens(pool, [1] * 8) == 8
    assert observe(pool) == observe(untouched)
    assert drain(pool) == drain(untouched)


def test_freeing_twice_changes_nothing() -> None:
    pool = BlockPool(4, block_size=4)
    first, second = pool.allocate(2).tolist()
    pool.free([first])
    before = observe(pool)
    for ids in ([first], [second, first], [second, second]):
        with pytest.raises(StateError, match="expected"):
            pool.free(ids)
        assert observe(pool) == before
    pool.free([second])
    assert sorted(pool.allocate(4).tolist()) == [0, 1, 2, 3]


def test_pages_of_a_sequence_cannot_be_freed_by_hand() -> None:
    pool = BlockPool(4, block_size=4)
    with compute(pool, [1] * 6) as seq:
        for block_id in seq.block_ids.tolist():
            before = observe(pool, seq)
            with pytest.raises(StateError):
                pool.free([block_id])
            assert observe(pool, seq) == before


@given(uses=st.lists(st.integers(0, 9), max_size=60), num_blocks=st.integers(1, 6))
def test_victims_are_those_of_a_brute_force_lru(uses: list[int], num_blocks: int) -> None:
    """One-block prompts and a pool that is always full: the textbook cache."""
    pool = BlockPool(num_blocks, block_size=4)
    lru: OrderedDict[int, None] = OrderedDict()
    for use in uses:
        prompt = [use] * 4
        assert num_block_tokens(pool, prompt) == (4 if use in lru else 0)
        remember(pool, prompt)
        lru[use] = None
        lru.move_to_end(use)
        if len(lru) > num_blocks:
            lru.popitem(last=False)
    order = list(lru)
    for i in range(len(order)):
        assert [num_block_tokens(pool, [use] * 4) for use in order] == [0] * i + [4] * (len(order) - i)
        assert pool.evict(1) == 1
    assert pool.evict(1) == 0


@given(prompts=PROMPTS, keep=st.lists(st.booleans(), min_size=6, max_size=6))
def test_a_block_is_never_evicted_before_its_children(prompts: list[list[int]], keep: list[bool]) -> None:
    pool = BlockPool(40, block_size=2)
    seqs = [pool.open(tokens) for tokens in prompts]
    run(pool, *seqs)  # side by side: equal blocks get a page each
    for seq, stays in zip(seqs, keep, strict=False):
        if not stays:
            seq.close()
    for seq, stays in zip(seqs, keep, strict=False):
        if stays:
            seq.close()
    wholes = [tokens[: len(tokens) // 2 * 2] for tokens in prompts]
    depths = [num_block_tokens(pool, tokens) for tokens in wholes]
    assert depths == [len(tokens) for tokens in wholes]
    num_pages = pool.stats().num_evictable_blocks
    for _ in range(num_pages):
        evictable, nodes = pool.stats().num_evictable_blocks, pool.stats().num_nodes
        assert pool.evict(1) == 1
        after = [num_block_tokens(pool, tokens) for tokens in wholes]
        # At most the last block of a path went, or a surplus page, and then no prompt lost anything.
        assert all(0 <= was - now <= 2 for was, now in zip(depths, after, strict=True))
        assert (pool.stats().num_nodes == nodes) is (after == depths)
        assert pool.stats().num_evictable_blocks == evictable - 1
        pool.check_integrity()
        depths = after
    assert pool.stats().num_free_blocks == 40


@given(
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
    num_cached=st.integers(0, 20),
    room=st.integers(0, 2),
)
def test_reuse_never_makes_a_request_fail_that_would_fit_cold(
    prompt: list[int], num_cached: int, room: int
) -> None:
    needed = -(-len(prompt) // 4)
    pool = BlockPool(needed + room, block_size=4)
    history = [*prompt[:num_cached], 2, 2, 2, 2][: 4 * (needed + room)]
    remember(pool, history)
    with pool.open(prompt) as seq:
        run(pool, seq)
        assert seq.num_computed_tokens == len(prompt)
        pool.check_integrity()


def test_the_hit_counter_survives_a_run_that_is_given_up_after_preemption() -> None:
    pool = BlockPool(3, block_size=4)
    seq = pool.open([0] * 8 + [5])
    seq.preempt()
    remember(pool, [0] * 8)
    run(pool, seq)  # finds 8 tokens now, which no prompt was counted for
    seq.truncate(6)
    pool.append(seq, [7, 7])
    pool.allocate(1)
    step = pool.reserve(seq, 2)
    assert step.num_new_tokens == [4]
    assert pool.stats().num_cached_tokens == 0


def test_a_run_that_no_page_can_be_had_for_is_computed_instead() -> None:
    pool = BlockPool(1, block_size=4)
    remember(pool, [1, 2, 3, 4])
    seq = pool.open([1, 2, 3, 9])
    assert seq.num_cached_tokens == 3
    step = pool.reserve(seq, 1)
    assert (step.num_new_tokens, step.copies, seq.num_cached_tokens) == ([4], [], 0)
    pool.commit(step)
    assert num_block_tokens(pool, [1, 2, 3, 9]) == 4


def test_an_abandoned_step_leaves_everything_as_before() -> None:
    pool = BlockPool(8, block_size=4)
    remember(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    seqs = [pool.open([1, 2, 3, 4, 5, 6, 9, 9, 9]), pool.open([7] * 5)]
    before = observe(pool, *seqs)
    step = pool.reserve(seqs, [3, 5])
    assert len(step.copies) == 1
    pool.prepare(step)
    pool.abandon(step)
    assert observe(pool, *seqs) == before
    with pytest.raises(StateError):
        pool.abandon(step)


def test_a_copy_source_is_held_until_the_step_ends() -> None:
    pool = BlockPool(3, block_size=4)
    remember(pool, [1, 2, 3, 4])
    [source] = pool.match([1, 2, 3, 4]).block_ids.tolist()
    seq = pool.open([1, 2, 3, 9])
    step = pool.reserve(seq, 1)
    assert step.copies == [(source, seq.block_ids[0], 3)]
    assert pool.evict(3) == 0
    assert source not in pool.allocate(1).tolist()
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)
    pool.commit(step)
    assert pool.allocate(1).tolist() == [source]


def test_closing_in_an_open_step_keeps_the_pages_and_publishes_nothing() -> None:
    pool = BlockPool(4, block_size=4)
    seq = pool.open([1] * 9)
    step = pool.reserve(seq, 9)
    pool.prepare(step)
    seq.close()
    assert seq.is_closed
    assert pool.stats().num_free_blocks == 1
    with pytest.raises(StateError):
        seq.close()
    pool.commit(step)
    assert pool.stats().num_free_blocks == 4
    assert num_block_tokens(pool, [1] * 8) == 0
    pool.check_integrity()


def test_a_copy_source_is_let_go_before_its_parent() -> None:
    """Also where the sequence was closed meanwhile, and the end of its step releases both."""
    pool = BlockPool(8, block_size=4)
    remember(pool, range(8))
    parent, source = pool.match(range(8)).block_ids.tolist()
    seq = pool.open([*range(6), 9])
    step = pool.reserve(seq, 1)
    assert [copy[0] for copy in step.copies] == [source]
    pool.prepare(step)
    seq.close()
    pool.commit(step)
    assert drain(pool) == [source, parent]


def _with_a_cut_picture() -> tuple[BlockPool, Sequence, NotedKV, Media]:
    """A sequence whose last token stood for a picture, and was replaced by the same token without it."""
    pool, kv, picture = BlockPool(8, block_size=4), NotedKV(4), Media(2, 2, b"d" * 32)
    seq = pool.open([9] * 4, extras=[picture])
    step = pool.reserve(seq, 4)
    kv.execute(pool.prepare(step), [kv.causes([9] * 4, extras=[picture])])
    pool.commit(step)
    seq.truncate(3)
    pool.append(seq, [9, 9])
    return pool, seq, kv, picture


def test_a_block_with_a_cut_item_is_not_published() -> None:
    pool, seq, kv, picture = _with_a_cut_picture()
    step = pool.reserve(seq, 2)
    kv.execute(pool.prepare(step), [kv.causes([9] * 5, extras=[picture], items_end=3)])
    pool.commit(step)
    assert seq.num_committed_tokens == 0
    assert pool.stats().num_nodes == 1  # the block with the whole picture
    assert num_block_tokens(pool, [9] * 4, extras=[picture]) == 4
    assert num_block_tokens(pool, [9] * 4) == 0


def test_truncating_to_the_present_length_changes_nothing() -> None:
    """Not even that the block, once it is full, is published with the item that it begins with."""
    pool, picture = BlockPool(8, block_size=4), Media(0, 1, b"d" * 32)
    seq = compute(pool, [9], extras=[picture])
    before = observe(pool, seq)
    seq.truncate(1)
    assert observe(pool, seq) == before
    pool.append(seq, [9, 9, 9])
    run(pool, seq)
    assert num_block_tokens(pool, [9] * 4, extras=[picture]) == 4


def test_a_preempted_sequence_does_not_get_back_an_item_that_was_cut() -> None:
    pool, seq, kv, picture = _with_a_cut_picture()
    seq.preempt()
    step = pool.reserve(seq, 5)
    kv.execute(pool.prepare(step), [kv.causes([9] * 5, extras=[picture], items_end=3)])


def test_reset_is_refused_while_a_page_is_referenced() -> None:
    pool = BlockPool(4, block_size=4)
    seq = compute(pool, [1] * 4)
    assert pool.reset() is False
    assert num_block_tokens(pool, [1] * 4) == 4
    seq.close()
    raw = pool.allocate(1)
    assert pool.reset() is False
    pool.free(raw)
    assert pool.reset() is True
    assert num_block_tokens(pool, [1] * 4) == 0
    assert pool.stats().num_free_blocks == 4


def test_without_prefix_caching_nothing_is_found_and_nothing_is_published() -> None:
    pool = BlockPool(4, block_size=4, prefix_caching=False)
    with compute(pool, [1] * 9) as seq:
        assert seq.num_committed_tokens == 0
        assert pool.match([1] * 9).num_tokens == 0
        assert pool.open([1] * 4).num_cached_tokens == 0
    assert pool.stats().num_free_blocks == 4


def test_forgotten_sequences_and_steps_give_their_pages_back() -> None:
    pool = BlockPool(4, block_size=4)
    seq = pool.open([1] * 5)
    step = pool.reserve(seq, 5)
    assert pool.stats().num_free_blocks == 2
    del seq, step
    gc.collect()
    assert pool.stats().num_free_blocks == 4
    pool.check_integrity()


def test_threads_share_a_pool() -> None:
    """Eight threads open, compute, grow, preempt and close over the same few prompts."""
    pool = BlockPool(48, block_size=4)
    all_started = threading.Barrier(8)

    def work(index: int) -> int:
        rng, num_computed = random.Random(index), 0
        all_started.wait()
        for _ in range(150):
            prompt = [rng.randrange(2)] * rng.randrange(1, 9) + [rng.randrange(3)] * rng.randrange(1, 6)
            with (
                contextlib.suppress(OutOfBlocksError),
                pool.open(prompt, cache_salt=rng.choice([None, "a"])) as seq,
            ):
                run(pool, seq)
                pool.append(seq, [rng.randrange(3)] * rng.randrange(1, 4))
                if rng.randrange(4) == 0:
                    seq.preempt()
                step = pool.reserve(seq, seq.num_uncached_tokens)
                tables = pool.prepare(step)
                assert len(set(tables.block_table[0].tolist())) == tables.block_table.shape[1]
                if rng.randrange(4) == 0:
                    pool.abandon(step)
                else:
                    pool.commit(step)
                    num_computed += seq.num_computed_tokens
        return num_computed

    with ThreadPoolExecutor(8) as threads:
        results = [threads.submit(work, i) for i in range(8)]
        while wait(results, timeout=0.001).not_done:
            pool.check_integrity()
            stats = pool.stats()
            parts = stats.num_free_blocks + stats.num_writable_blocks
            assert parts + stats.num_committed_blocks + stats.num_evictable_blocks == 48
    assert min(result.result() for result in results) > 0
    pool.check_integrity()
    assert pool.stats().num_free_blocks + pool.stats().num_evictable_blocks == 48
    assert pool.reset()
    assert pool.stats().num_free_blocks == 48
