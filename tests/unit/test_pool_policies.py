"""Any policy may be asked for by name, and with none of them a block goes before those that follow it."""

from __future__ import annotations

import random

import pytest
from pool_driving import drain, remember

from pagedkv import BlockPool, UsageError
from pagedkv.pool import POLICIES


def test_the_default_is_lru() -> None:
    assert BlockPool(4).policy == POLICIES[0] == "lru"


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    for bad in ("mru", "", "LRU", None, 1, ["lru"]):
        with pytest.raises(UsageError, match=r"policy: expected one of lru, priority, .*sieve.*, got"):
            BlockPool(4, policy=bad)  # type: ignore[arg-type]


def test_tokens_of_equal_cost_are_a_number_or_left_to_the_policy() -> None:
    assert BlockPool(4).equal_cost_tokens is None
    assert BlockPool(4, policy="hazard", equal_cost_tokens=0).equal_cost_tokens == 0
    for bad in (-1, 2**32, 1.5, "many"):
        with pytest.raises(UsageError, match="equal_cost_tokens: expected"):
            BlockPool(4, policy="hazard", equal_cost_tokens=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("equal_cost_tokens", "is_deep_kept"), [(0, False), (2, True), (2**20, False)])
def test_what_costs_more_to_compute_again_is_kept_where_costs_count(
    equal_cost_tokens: int, is_deep_kept: bool
) -> None:
    pool = BlockPool(6, block_size=2, policy="gdsf", equal_cost_tokens=equal_cost_tokens)
    deep, short = [1] * 8, [2, 2]
    remember(pool, deep, short, short)  # found once more, at a quarter of the cost
    assert pool.evict(1) == 1
    assert pool.match_lengths([deep, short]).tolist() == ([8, 0] if is_deep_kept else [6, 2])


@pytest.mark.parametrize("policy", POLICIES)
def test_leaves_go_first_and_the_order_that_is_shown_is_the_order_of_eviction(policy: str) -> None:
    rng = random.Random(1)
    pool = BlockPool(24, block_size=2, clock="manual", policy=policy)
    heads = [[rng.randrange(3) for _ in range(4)] for _ in range(4)]
    for i in range(300):
        pool.advance(rng.random())
        remember(pool, rng.choice(heads) + [rng.randrange(2) for _ in range(rng.randrange(1, 12))])
        if i % 10 == 0:
            pool.check_integrity()  # leaves before their parents, and every evictable page once
            ranks = pool.snapshot().eviction_rank
            [first] = [block_id for block_id, rank in enumerate(ranks) if rank == 0]
            assert pool.evict(1) == 1
            assert pool.digest_of(first) is None
    pool.evict(24)
    assert pool.stats().num_free_blocks == 24


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_honours_priorities(policy: str) -> None:
    pool = BlockPool(8, block_size=2, policy=policy)
    kept, other = [1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2]
    remember(pool, kept)
    pool.retain(kept, priority=80)
    remember(pool, other)
    remember(pool, other)  # found: worth more by any measure but the priority
    assert pool.evict(3) == 3
    assert pool.match_lengths([kept, other]).tolist() == [6, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_nothing_can_find_any_more_goes_first(policy: str) -> None:
    pool = BlockPool(8, block_size=2, policy=policy)
    for _ in range(3):
        remember(pool, [1, 1, 1, 1, 1, 1])
    pool.bump_generation()
    remember(pool, [2, 2, 2, 2])
    assert pool.evict(3) == 3
    assert pool.match([2, 2, 2, 2]).num_tokens == 4


def order_of_three(policy: str) -> list[int]:
    """In which order three prompts of one block go: 1 was found twice, then 2 once, 3 never."""
    pool = BlockPool(3, block_size=2, policy=policy)
    remember(pool, *([token, token] for token in (1, 2, 3, 1, 1, 2)))
    page_of = {int(pool.match([token, token]).block_ids[0]): token for token in (1, 2, 3)}
    return [page_of[page] for page in drain(pool)]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [3, 1, 2]),
        ("lfu", [3, 2, 1]),
        ("slru", [3, 1, 2]),
        ("sieve", [3, 1, 2]),
        ("gdsf", [3, 2, 1]),
    ],
)
def test_policies_differ_as_their_names_say(policy: str, order: list[int]) -> None:
    assert order_of_three(policy) == order
