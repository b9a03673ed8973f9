"""What a fork shares, who copies when, and that no order of use mixes up two samples' KV."""

from __future__ import annotations

import contextlib
import gc
import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given
from pool_driving import NotedKV, compute, num_block_tokens, observe, run

from pagedkv import BlockPool, OutOfBlocksError, Sequence, StateError


def run_noted(pool: BlockPool, kv: NotedKV, *seqs: Sequence) -> list[tuple[int, int, int]]:
    """Compute all tokens of the sequences, check what they read, and return the copies."""
    step = pool.reserve(list(seqs), [seq.num_uncached_tokens for seq in seqs])
    kv.execute(pool.prepare(step), [kv.causes(seq.token_ids.tolist()) for seq in seqs])
    copies = step.copies
    pool.commit(step)
    pool.check_integrity()
    return copies


def assert_nothing_is_held(pool: BlockPool) -> None:
    pool.check_integrity()
    stats = pool.stats()
    assert stats.num_free_blocks + stats.num_evictable_blocks == stats.num_blocks


def test_a_fork_shares_every_page_and_takes_none() -> None:
    pool = BlockPool(4, block_size=4)
    seq = compute(pool, range(10))
    before = pool.stats()
    fork = seq.fork()
    assert pool.stats() == before
    assert fork.block_ids.tolist() == seq.block_ids.tolist()
    assert fork.token_ids.tolist() == seq.token_ids.tolist()
    assert fork.num_computed_tokens == seq.num_computed_tokens == 10
    assert fork.block_hashes == seq.block_hashes
    pool.check_integrity()


def test_a_fork_is_not_counted_as_a_prompt() -> None:
    pool = BlockPool(8, block_size=4)
    compute(pool, range(10)).close()
    seq = pool.open(range(10))
    before = pool.stats()
    fork = seq.fork()
    run(pool, fork)
    after = pool.stats()
    for counter in ("num_prompts", "num_prompt_tokens", "num_cached_tokens"):
        assert getattr(after, counter) == getattr(before, counter)


@pytest.mark.parametrize("first", [0, 1], ids=["the original writes first", "the fork writes first"])
def test_the_first_writer_into_a_shared_tail_gets_a_copy_and_the_other_does_not(first: int) -> None:
    pool, kv = BlockPool(8, block_size=4), NotedKV(4)
    seq = pool.open(range(6))
    run_noted(pool, kv, seq)
    shared = seq.block_ids.tolist()
    pair = [seq, seq.fork()]
    pair[first].append(100)
    pair[1 - first].append(200)
    [(source, destination, num_tokens)] = run_noted(pool, kv, pair[first])
    assert (source, num_tokens) == (shared[1], 2)
    assert pair[first].block_ids.tolist() == [shared[0], destination]
    assert run_noted(pool, kv, pair[1 - first]) == []
    assert pair[1 - first].block_ids.tolist() == shared


def test_no_copy_is_made_where_the_shared_pages_are_full() -> None:
    pool, kv = BlockPool(8, block_size=4), NotedKV(4)
    seq = pool.open(range(8))
    run_noted(pool, kv, seq)
    fork = seq.fork()
    seq.append(100)
    fork.append(200)
    assert run_noted(pool, kv, seq, fork) == []
    assert seq.block_ids[:2].tolist() == fork.block_ids[:2].tolist()


def test_a_fork_left_alone_with_the_tail_writes_it_in_place() -> None:
    pool, kv = BlockPool(2, block_size=4), NotedKV(4)
    seq = pool.open(range(6))
    run_noted(pool, kv, seq)
    fork = seq.fork()
    seq.close()
    fork.append(100)
    assert run_noted(pool, kv, fork) == []


def test_both_writing_in_one_step_read_their_own_tokens() -> None:
    pool, kv = BlockPool(8, block_size=4), NotedKV(4)
    seq = pool.open(range(6))
    run_noted(pool, kv, seq)
    fork = seq.fork()
    seq.append([100, 101, 102])
    fork.append([200, 201, 202])
    run_noted(pool, kv, seq, fork)
    assert not set(seq.block_ids[1:].tolist()) & set(fork.block_ids[1:].tolist())


def test_blocks_filled_by_both_alike_are_found_by_a_third() -> None:
    pool, kv = BlockPool(8, block_size=4), NotedKV(4)
    seq = pool.open(range(6))
    run_noted(pool, kv, seq)
    fork = seq.fork()
    for one in (seq, fork):
        one.append([6, 7])
        run_noted(pool, kv, one)
    assert num_block_tokens(pool, range(8)) == 8
    seq.close()
    fork.close()
    third = pool.open(range(9))
    assert third.num_cached_tokens == 8
    run_noted(pool, kv, third)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_every_order_of_closing_leaves_all_pages_free_or_evictable(order: tuple[int, ...]) -> None:
    pool, kv = BlockPool(12, block_size=4), NotedKV(4)
    seq = pool.open(range(6))
    run_noted(pool, kv, seq)
    family = [seq, seq.fork()]
    family += [family[1].fork(), family[0].fork()]
    family[1].append([100, 101, 102])
    run_noted(pool, kv, family[1])
    for i in order:
        pages = family[i].block_ids.tolist()
        family[i].close()
        pool.check_integrity()
        assert all(pool.digest_of(p) is not None for p in pages[:1])
        for other in family:
            if not other.is_closed:
                assert other.token_ids.tolist()[:6] == list(range(6))
                assert other.num_computed_tokens >= 6
    assert_nothing_is_held(pool)
    assert num_block_tokens(pool, range(6)) == 4


def test_a_fork_of_a_fork_outlives_both() -> None:
    pool, kv = BlockPool(4, block_size=4), NotedKV(4)
    seq = pool.open(range(6))
    run_noted(pool, kv, seq)
    fork = seq.fork()
    grandchild = fork.fork()
    seq.close()
    fork.close()
    grandchild.append([6, 7, 8])
    assert run_noted(pool, kv, grandchild) == []
    assert grandchild.num_committed_tokens == 8
    grandchild.close()
    assert_nothing_is_held(pool)


def test_a_fork_that_is_garbage_collected_gives_its_references_back() -> None:
    pool = BlockPool(4, block_size=4)
    seq = compute(pool, range(6))
    fork = seq.fork()
    del fork
    gc.collect()
    seq.close()
    assert_nothing_is_held(pool)


def test_a_fork_of_a_borrowed_tail_copies_it_too() -> None:
    pool, kv = BlockPool(8, block_size=4), NotedKV(4)
    first = pool.open(range(8))
    run_noted(pool, kv, first)
    first.close()
    seq = pool.open([0, 1, 2, 3, 4, 5, 99])
    assert seq.num_cached_tokens == 6
    fork = seq.fork()
    for one in (seq, fork):
        assert [n for _, _, n in run_noted(pool, kv, one)] == [2]
    assert num_block_tokens(pool, range(8)) == 8


def test_a_fork_of_a_preempted_sequence_matches_again_on_its_own() -> None:
    pool, kv = BlockPool(8, block_size=4), NotedKV(4)
    seq = pool.open(range(10))
    run_noted(pool, kv, seq)
    seq.preempt()
    fork = seq.fork()
    assert fork.is_preempted
    assert fork.block_ids.tolist() == []
    run_noted(pool, kv, fork)
    assert fork.num_cached_tokens == 8
    assert seq.is_preempted
    run_noted(pool, kv, seq)
    seq.close()
    fork.close()
    assert_nothing_is_held(pool)


def test_preempting_one_leaves_the_other_as_it_was() -> None:
    pool, kv = BlockPool(8, block_size=4), NotedKV(4)
    seq = pool.open(range(6))
    run_noted(pool, kv, seq)
    fork = seq.fork()
    seq.preempt()
    assert not fork.is_preempted
    fork.append(6)
    assert run_noted(pool, kv, fork) == []


def test_truncating_one_leaves_the_others_tokens_and_pages() -> None:
    pool, kv = BlockPool(8, block_size=4), NotedKV(4)
    seq = pool.open(range(11))
    run_noted(pool, kv, seq)
    fork = seq.fork()
    fork.truncate(5)
    fork.append([50, 51])
    run_noted(pool, kv, fork)
    seq.append(11)
    assert run_noted(pool, kv, seq) == []
    assert seq.token_ids.tolist() == list(range(12))


def test_an_abandoned_first_write_leaves_the_tail_shared() -> None:
    pool, kv = BlockPool(8, block_size=4), NotedKV(4)
    seq = pool.open(range(6))
    run_noted(pool, kv, seq)
    fork = seq.fork()
    fork.append(100)
    before = observe(pool, seq, fork)
    pool.abandon(pool.reserve(fork, 1))
    assert observe(pool, seq, fork) == before
    seq.append(200)
    assert len(run_noted(pool, kv, seq)) == 1
    assert run_noted(pool, kv, fork) == []


def test_a_closed_sequence_cannot_be_forked() -> None:
    pool = BlockPool(4, block_size=4)
    seq = compute(pool, range(6))
    seq.close()
    before = observe(pool)
    with pytest.raises(StateError, match="fork: expected an open sequence"):
        seq.fork()
    assert observe(pool) == before


def test_a_sequence_in_a_step_cannot_be_forked() -> None:
    pool = BlockPool(4, block_size=4)
    seq = pool.open(range(6))
    step = pool.reserve(seq, 6)
    before = observe(pool, seq)
    with pytest.raises(StateError, match="fork: expected a sequence outside a step"):
        seq.fork()
    assert observe(pool, seq) == before
    pool.commit(step)
    assert seq.fork().num_computed_tokens == 6


VERBS = ("fork", "append", "run", "run two", "truncate", "preempt", "close", "abandon", "reject")
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(VERBS), st.integers(0, 7), st.integers(0, 9)), min_size=5, max_size=30
)


@given(operations=OPERATIONS, num_blocks=st.integers(4, 12))
def test_no_history_of_forks_lets_a_sequence_read_another_ones_kv(
    operations: list[tuple[str, int, int]], num_blocks: int
) -> None:
    pool, kv = BlockPool(num_blocks, block_size=4), NotedKV(4)
    seqs = [pool.open([0, 1, 0, 1, 0, 1])]
    for verb, which, number in operations:
        if not seqs:
            seqs.append(pool.open([0, 1, 0, 1, 1]))
        seq = seqs[which % len(seqs)]
        if verb == "fork" and len(seqs) < 6:
            seqs.append(seq.fork())
        elif verb == "append" and seq.num_tokens < 20:
            seq.append([number % 2] * (1 + number // 2))
        elif verb == "truncate":
            seq.truncate(max(1, seq.num_tokens - number))
        elif verb == "preempt":
            seq.preempt()
        elif verb == "close":
            seqs.remove(seq)
            seq.close()
        elif verb in ("run", "run two", "abandon", "reject"):
            chosen = [seq, *(s for s in seqs if s is not seq)][: 2 if verb == "run two" else 1]
            chosen = [s for s in chosen if s.num_uncached_tokens > 0]
            with contextlib.suppress(OutOfBlocksError):
                if verb.startswith("run") and chosen:
                    run_noted(pool, kv, *chosen)
                elif chosen:
                    step = pool.reserve(chosen, [s.num_uncached_tokens for s in chosen])
                    kv.execute(pool.prepare(step), [kv.causes(s.token_ids.tolist()) for s in chosen])
                    if verb == "abandon":
                        pool.abandon(step)
                    elif seq.num_tokens > step.num_new_tokens[0]:
                        pool.commit(step, number % (step.num_new_tokens[0] + 1))
                    else:
                        pool.commit(step)
        pool.check_integrity()
    for seq in seqs:
        seq.close()
    assert_nothing_is_held(pool)
