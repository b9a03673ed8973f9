"""What the engine knows of the future changes the order of eviction, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pool_driving import drain, remember

from pagedkv import BlockPool, StateError, UsageError
from pagedkv.pool import POLICIES
from pagedkv.sequence import Sequence

SYSTEM, ONE, TWO, THREE = [9] * 4, [1] * 4, [2] * 4, [3] * 4


def run(pool: BlockPool, tokens: list[int]) -> Sequence:
    seq = pool.open(tokens)
    pool.commit(pool.reserve(seq, seq.num_uncached_tokens))
    return seq


@pytest.mark.parametrize("policy", POLICIES)
def test_the_last_turn_of_a_conversation_goes_first_but_not_what_others_share(policy: str) -> None:
    pool = BlockPool(12, block_size=2, policy=policy)
    remember(pool, SYSTEM + ONE)
    seq = run(pool, SYSTEM + TWO)
    pool.last_turn(seq)
    seq.close()
    pool.check_integrity()
    assert pool.evict(2) == 2
    assert pool.match_lengths([SYSTEM + TWO, SYSTEM + ONE]).tolist() == [4, 8]


@pytest.mark.parametrize("policy", POLICIES)
def test_whoever_comes_back_after_the_last_turn_makes_it_like_others(policy: str) -> None:
    pool = BlockPool(12, block_size=2, policy=policy)
    for tokens in (ONE, TWO):
        seq = run(pool, tokens)
        pool.last_turn(seq)
        seq.close()
    pool.touch(ONE)
    seq = run(pool, TWO + THREE)  # another one begins with it
    seq.close()
    remember(pool, SYSTEM)
    last = run(pool, [4] * 4)
    pool.last_turn(last)
    last.close()
    pool.check_integrity()
    assert pool.evict(2) == 2
    assert pool.match_lengths([ONE, TWO, SYSTEM, [4] * 4]).tolist() == [4, 4, 4, 0]


def test_expecting_more_takes_back_the_last_turn() -> None:
    pool = BlockPool(8, block_size=2)
    first, second = run(pool, ONE), run(pool, TWO)
    pool.last_turn(second)
    pool.expect_reuse(second, within_s=5)
    first.close()
    second.close()
    assert pool.evict(2) == 2
    assert pool.match_lengths([ONE, TWO]).tolist() == [0, 4]


def test_what_a_retention_or_another_request_holds_is_not_given_up_with_the_last_turn() -> None:
    pool = BlockPool(12, block_size=2)
    pool.retain(ONE)
    seq = run(pool, ONE)
    pool.retain(ONE, priority=35)
    other = run(pool, TWO)
    twin = pool.open([*TWO, 5])
    for each in (seq, other):
        pool.last_turn(each)
        each.close()
    remember(pool, THREE)
    twin.close()
    pool.check_integrity()
    assert pool.evict(2) == 2
    assert pool.match_lengths([TWO, THREE]).tolist() == [4, 4]


def test_what_is_expected_soon_goes_after_what_is_not() -> None:
    def left(within_s: float | None, wait_s: float) -> list[int]:
        pool = BlockPool(200, block_size=2, policy="hazard", clock="manual")
        for token in range(100, 900):  # from which it learns that nobody comes back
            remember(pool, [token] * 4)
            pool.advance(0.1)
        seq = run(pool, ONE)
        if within_s is not None:
            pool.expect_reuse(seq, within_s=within_s)
        seq.close()
        pool.advance(wait_s)
        remember(pool, TWO, THREE)
        pool.advance(wait_s)
        remember(pool, *([token] * 4 for token in range(1000, 1098)))
        pool.check_integrity()
        return pool.match_lengths([ONE, TWO, THREE]).tolist()

    assert left(within_s=20, wait_s=1)[0] == 4
    assert left(within_s=None, wait_s=1)[0] == 0


def test_what_waits_goes_last_until_it_waits_no_more() -> None:
    pool = BlockPool(12, block_size=2, policy="hazard", clock="manual")
    remember(pool, ONE, TWO, THREE)
    assert pool.waiting([ONE]).tolist() == [4]
    pool.advance(100)
    remember(pool, TWO, THREE, TWO, THREE)
    assert pool.evict(4) == 4
    assert pool.match_lengths([ONE, TWO, THREE]).tolist() == [4, 0, 0]
    remember(pool, TWO, THREE, TWO, THREE)
    assert pool.waiting([]).tolist() == []
    pool.check_integrity()
    assert pool.evict(2) == 2
    assert pool.match_lengths([ONE])[0] == 0


def test_with_lru_waiting_is_a_use_that_counts_as_no_request() -> None:
    pool = BlockPool(12, block_size=2)
    remember(pool, ONE, TWO, THREE)
    before = pool.stats()
    assert pool.waiting([TWO, [*ONE, 7], [8, 8]]).tolist() == [4, 4, 0]
    assert pool.stats() == before
    assert pool.evict(4) == 4
    assert pool.match_lengths([ONE, TWO, THREE]).tolist() == [0, 4, 0]  # the next one goes last


def test_wrong_hints_are_refused_and_change_nothing() -> None:
    pool, other = BlockPool(8, block_size=2), BlockPool(8)
    seq = run(pool, ONE)
    bad: Any
    for bad in (0, -1, float("nan"), float("inf"), "5", None, True):
        with pytest.raises(UsageError, match="within_s: expected"):
            pool.expect_reuse(seq, within_s=bad)
    for verb in (pool.last_turn, lambda s: pool.expect_reuse(s, within_s=1)):
        for bad in (None, 3, ONE):
            with pytest.raises(UsageError, match="expected a Sequence, got"):
                verb(bad)
        with pytest.raises(UsageError, match="expected a sequence of this pool"):
            verb(other.open([1]))
        closed = pool.open([1, 1])
        closed.close()
        with pytest.raises(StateError, match="expected an open sequence, got a closed one"):
            verb(closed)
    for bad in (5, {1: 2}, [[-1]], ["text"]):
        with pytest.raises(UsageError):
            pool.waiting(bad)
    with pytest.raises(UsageError, match="cache_salts: expected"):
        pool.waiting([ONE], cache_salts=["a", "b"])
    seq.close()
    assert len(drain(pool)) == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_hints_among_all_other_calls_keep_leaves_first(policy: str) -> None:
    rng = random.Random(5)
    pool = BlockPool(20, block_size=2, clock="manual", policy=policy)
    heads = [[rng.randrange(2) for _ in range(4)] for _ in range(3)]
    held: list[Sequence] = []
    for i in range(400):
        pool.advance(rng.random())
        tokens = rng.choice(heads) + [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        seq = pool.open(tokens)
        if pool.stats().num_evictable_blocks + pool.stats().num_free_blocks < 8:
            while held:
                held.pop().close()
        pool.commit(pool.reserve(seq, seq.num_uncached_tokens))
        held.append(seq)
        if rng.random() < 0.3:
            pool.last_turn(rng.choice(held))
        if rng.random() < 0.3:
            pool.expect_reuse(rng.choice(held), within_s=rng.choice([0.001, 1, 1e9]))
        if rng.random() < 0.3:
            pool.waiting([rng.choice(heads) for _ in range(rng.randrange(3))])
        if rng.random() < 0.2:
            pool.retain(rng.choice(heads), priority=rng.choice([0, 35, 60]), ttl_s=rng.choice([None, 2]))
        if rng.random() < 0.1:
            pool.bump_generation()
        if rng.random() < 0.6:
            held.pop(rng.randrange(len(held))).close()
        if i % 5 == 0:
            pool.check_integrity()
    for seq in held:
        seq.close()
    assert len(drain(pool)) <= 20
    assert pool.stats().num_free_blocks == 20


def test_a_block_with_a_page_of_its_own_elsewhere_is_not_given_up() -> None:
    pool = BlockPool(12, block_size=2)
    first, second = pool.open(ONE), pool.open(ONE)  # side by side: two pages for each block
    pool.commit(pool.reserve([first, second], [4, 4]))
    first.close()
    pool.last_turn(second)
    second.close()
    pool.check_integrity()
    assert len(drain(pool)) == 4
