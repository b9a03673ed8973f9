"""What is counted: mistakes of other KV caches, as promises that this pool's figures keep."""

from __future__ import annotations

import contextlib
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from pool_driving import compute, num_block_tokens, remember, run

from pagedkv import BlockPool, Breakpoint, OutOfBlocksError, Sequence, Usage

HUNDRED = list(range(100))


def counted(pool: BlockPool) -> tuple[int, int, int]:
    stats = pool.stats()
    return stats.num_prompts, stats.num_prompt_tokens, stats.num_cached_tokens


def warm(pool: BlockPool) -> tuple[int, int, int]:
    """Leave the first 96 of a hundred tokens in the cache."""
    remember(pool, [*HUNDRED[:96], 7777, 7778])
    return counted(pool)


def test_a_prompt_of_several_samples_is_counted_once() -> None:
    """With n = 4 the prompt was counted four times, or cached tokens twice (vLLM)."""
    pool = BlockPool(32)
    assert warm(pool) == (1, 98, 0)
    samples = [pool.open(HUNDRED)]
    samples += [samples[0].fork() for _ in range(3)]
    assert [seq.num_cached_tokens for seq in samples] == [96] * 4
    run(pool, samples[0])
    for i, seq in enumerate(samples):
        seq.append(500 + i)
        run(pool, seq)
        seq.close()
    assert counted(pool) == (2, 198, 96)


def test_a_prompt_that_is_refused_retried_and_preempted_is_counted_once() -> None:
    """Each attempt of the scheduler counted as a new prompt, and its tokens as found again (vLLM)."""
    pool = BlockPool(8)
    warm(pool)
    seq = pool.open(HUNDRED)
    raw = pool.allocate(2)
    for _ in range(10):
        with pytest.raises(OutOfBlocksError):
            pool.reserve(seq, 4)
        assert counted(pool) == (2, 198, 96)
    pool.free(raw)
    for _ in range(10):
        pool.abandon(pool.reserve(seq, 4))
    for _ in range(3):
        run(pool, seq)
        seq.preempt()
    run(pool, seq)
    assert counted(pool) == (2, 198, 96)


def test_looking_is_not_counted() -> None:
    pool = BlockPool(8)
    before = warm(pool)
    for _ in range(5):
        assert num_block_tokens(pool, HUNDRED) == 96
        assert pool.match_lengths([HUNDRED, HUNDRED]).tolist() == [96, 96]
        assert pool.touch(HUNDRED) == 96
    assert counted(pool) == before


def test_what_was_found_but_given_up_is_not_counted_as_found() -> None:
    pool = BlockPool(1, block_size=4)
    remember(pool, [1, 2, 3, 4])
    seq = pool.open([1, 2, 3, 9])
    assert counted(pool) == (2, 8, 3)
    run_all = pool.reserve(seq, 1)  # no page for the copy: its tokens are computed again
    assert run_all.num_new_tokens == [4]
    assert counted(pool) == (2, 8, 0)


def test_without_caching_nothing_counts_as_found() -> None:
    pool = BlockPool(16, prefix_caching=False)
    assert pool.stats().hit_rate == 0.0
    remember(pool, HUNDRED, HUNDRED)
    assert counted(pool) == (2, 200, 0)
    assert pool.stats().hit_rate == 0.0


# ---------------------------------------------------------------------- what a prompt cost


def test_usage_counts_each_token_of_the_prompt_once() -> None:
    """Cached tokens were left out of one style of report, or counted twice in it (vLLM)."""
    pool = BlockPool(32)
    warm(pool)
    seq = pool.open(HUNDRED)
    usage = seq.usage
    assert usage == Usage(input=4, cache_read=96, cache_write_by_ttl={})
    assert usage.openai(min_tokens=0, step_tokens=1) == {
        "prompt_tokens": 100,
        "prompt_tokens_details": {"cached_tokens": 96},
    }
    anthropic = usage.anthropic(min_tokens=0)
    assert anthropic["input_tokens"] == 4
    assert anthropic["cache_read_input_tokens"] == 96
    assert anthropic["cache_creation_input_tokens"] == 0
    # Whatever becomes of the request, and however many samples are drawn, the prompt stays what it cost.
    run(pool, seq)
    for token in range(40):
        seq.append(token)
        run(pool, seq)
    fork = seq.fork()
    seq.preempt()
    run(pool, seq)
    seq.truncate(50)
    assert seq.usage == fork.usage == usage
    seq.close()
    assert seq.usage == usage
    assert counted(pool) == (2, 198, 96)


def test_usage_without_caching_reads_and_writes_nothing() -> None:
    pool = BlockPool(32, prefix_caching=False)
    remember(pool, HUNDRED)
    seq = pool.open(HUNDRED, breakpoints=[Breakpoint(96, 60.0)])
    assert seq.usage == Usage(input=100, cache_read=0, cache_write_by_ttl={})


def test_usage_writes_nothing_that_must_not_be_published() -> None:
    pool = BlockPool(32)
    points = [Breakpoint(32, 3600.0), Breakpoint(96, 60.0)]
    seq = pool.open(HUNDRED, breakpoints=points, no_cache=[(50, 60)])
    assert seq.usage == Usage(input=52, cache_read=0, cache_write_by_ttl={3600.0: 32, 60.0: 16})
    run(pool, seq)
    assert seq.num_committed_tokens == 48
    assert pool.open(HUNDRED, breakpoints=points[:1]).usage == Usage(52, 48, {})


@given(
    num_cached=st.integers(0, 40),
    num_tokens=st.integers(1, 40),
    positions=st.lists(st.integers(1, 40), max_size=4, unique=True),
    granular=st.booleans(),
)
def test_usage_always_sums_to_the_prompt(
    num_cached: int, num_tokens: int, positions: list[int], granular: bool
) -> None:
    pool = BlockPool(64, block_size=4, token_granular=granular)
    if num_cached:
        remember(pool, range(num_cached))
    points = [Breakpoint(p, 100.0 - i) for i, p in enumerate(sorted(positions)) if p <= num_tokens]
    seq = pool.open(range(num_tokens), breakpoints=points)
    usage = seq.usage
    assert usage.num_tokens == num_tokens
    assert usage.cache_read == seq.num_cached_tokens
    expected: Counter[float] = Counter()
    for position in range(pool.match(range(num_tokens)).num_tokens, num_tokens):
        covering = [point.ttl_s for point in points if position < point.position // 4 * 4]
        if covering:
            expected[max(covering)] += 1
    assert usage.cache_write_by_ttl == expected


# ---------------------------------------------------------------------- evictions


def test_evictions_are_counted_by_what_they_were_for() -> None:
    pool = BlockPool(4, block_size=4)
    pool.set_quota("poor", 1)
    remember(pool, range(4), cache_salt="poor")
    remember(pool, range(50, 54), cache_salt="poor")  # pushes out the first
    remember(pool, range(8), range(90, 94))
    pool.allocate(2)
    pool.evict(1)
    left = pool.stats().num_evictable_blocks
    pool.free([page for page in range(4) if pool.digest_of(page) is None and pool.snapshot().num_refs[page]])
    assert pool.reset()
    stats = pool.stats()
    assert stats.num_evicted_by == {"capacity": 2, "request": 1, "quota": 1, "reset": left}
    assert stats.num_evicted_blocks == 4 + left
    assert stats.hits_by_source == {"device": 0}
    assert sum(stats.residency_histogram) == 4 + left


def test_times_are_counted_in_buckets_of_powers_of_two() -> None:
    pool = BlockPool(4, block_size=4, clock="manual")
    remember(pool, range(4))
    for gap_ms, bucket in ((0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4), (1000, 10)):
        before = pool.stats().reuse_gap_histogram
        pool.advance(gap_ms / 1000)
        remember(pool, range(4))
        assert np.flatnonzero(np.subtract(pool.stats().reuse_gap_histogram, before)).tolist() == [bucket], (
            gap_ms
        )
    pool.evict(1)
    assert np.flatnonzero(pool.stats().residency_histogram).tolist() == [11]  # 1.025 s


# ---------------------------------------------------------------------- any history


VERBS = ("open", "open", "compute", "compute", "reject", "abandon", "preempt", "fork", "truncate", "close")


@given(
    operations=st.lists(
        st.tuples(
            st.sampled_from(VERBS),
            st.integers(0, 5),
            st.lists(st.integers(0, 1), min_size=1, max_size=10),
        ),
        min_size=4,
        max_size=30,
    ),
    num_blocks=st.integers(2, 8),
)
def test_never_are_more_tokens_found_than_were_asked_for(
    operations: list[tuple[str, int, list[int]]], num_blocks: int
) -> None:
    """Hit rates above one, for tokens were found more often than asked for."""
    pool = BlockPool(num_blocks, block_size=2)
    seqs: list[Sequence] = []
    opened: list[int] = []
    for verb, number, tokens in operations:
        seq = seqs[number % len(seqs)] if seqs else None
        if verb == "open":
            seqs.append(pool.open(tokens))
            opened.append(len(tokens))
        elif seq is None:
            continue
        elif verb == "fork":
            seqs.append(seq.fork())
        elif verb == "preempt":
            seq.preempt()
        elif verb == "truncate":
            seq.truncate(seq.num_tokens * number // 5)
        elif verb == "close":
            seqs.remove(seq)
            seq.close()
        elif seq.num_uncached_tokens > 0:
            with contextlib.suppress(OutOfBlocksError):
                step = pool.reserve(seq, 1 + number % seq.num_uncached_tokens)
                if verb == "abandon":
                    pool.abandon(step)
                else:
                    pool.commit(step, step.num_new_tokens[0] // 2 if verb == "reject" else None)
        num_prompts, num_prompt_tokens, num_cached_tokens = counted(pool)
        assert (num_prompts, num_prompt_tokens) == (len(opened), sum(opened))
        assert 0 <= num_cached_tokens <= num_prompt_tokens - num_prompts  # each leaves one to compute
        assert 0 <= pool.stats().hit_rate < 1
        assert pool.stats().hits_by_source == {"device": num_cached_tokens}
        stats = pool.stats()
        by_state = stats.num_free_blocks + stats.num_writable_blocks
        assert by_state + stats.num_committed_blocks + stats.num_evictable_blocks == num_blocks


def test_the_pages_of_each_state_are_counted_as_they_move_on() -> None:
    pool = BlockPool(8, block_size=4)
    moments = []

    def note() -> None:
        s = pool.stats()
        states = (s.num_free_blocks, s.num_writable_blocks, s.num_committed_blocks, s.num_evictable_blocks)
        moments.append(states)

    seq = pool.open(range(10))
    note()
    step = pool.reserve(seq, 10)
    note()
    pool.commit(step)
    note()
    with compute(pool, range(8)):
        seq.close()
        note()
    note()
    pool.evict(1)
    note()
    assert moments == [(8, 0, 0, 0), (5, 3, 0, 0), (5, 1, 2, 0), (6, 0, 2, 0), (6, 0, 0, 2), (7, 0, 0, 1)]
