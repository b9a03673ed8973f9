"""What is counted: mistakes of other KV caches, as promises that this pool's figures keep."""

from __future__ import annotations

import contextlib

import hypothesis.strategies as st
import pytest
from hypothesis import given
from pool_driving import compute, num_block_tokens, remember, run

from pagedkv import BlockPool, OutOfBlocksError, Sequence

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
