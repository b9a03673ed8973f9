"""The simple policies evict what their papers say; `hazard` is no worse than LRU where nothing can be learnt.

Prompts are single blocks here, so that no tree hides the order. The orders are written down a second time,
in lists.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_driving import remember

from pagedkv import BlockPool
from pagedkv.policy import Request, Trace, make_trace, make_workload, simulate

SIZE = 2


class Order:
    """What a cache of `room` items holds, one item after the other."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: list[int] = []  # the one used longest ago first

    def use(self, item: int) -> None:
        if item in self.held:
            self.hit(item)
            self.held.remove(item)
        else:
            if len(self.held) == self.room:
                victim = self.victim()
                self.held.remove(victim)
                self.evicted(victim)
            self.miss(item)
        self.held.append(item)

    def hit(self, item: int) -> None: ...

    def miss(self, item: int) -> None: ...

    def evicted(self, item: int) -> None: ...

    def victim(self) -> int:
        return self.held[0]


class Lfu(Order):
    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.count: dict[int, int] = {}

    def hit(self, item: int) -> None:
        self.count[item] += 1

    def miss(self, item: int) -> None:
        self.count[item] = 0

    def victim(self) -> int:
        return min(self.held, key=lambda item: self.count[item])  # the first of equals


class Gdsf(Lfu):
    """All cost the same at the beginning of a prompt: an age and the uses."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.age = 0
        self.value: dict[int, int] = {}

    def hit(self, item: int) -> None:
        super().hit(item)
        self.value[item] = self.age + 1 + self.count[item]

    def miss(self, item: int) -> None:
        super().miss(item)
        self.value[item] = self.age + 1

    def victim(self) -> int:
        return min(self.held, key=lambda item: self.value[item])

    def evicted(self, item: int) -> None:
        self.age = self.value[item]


class Slru(Order):
    """Two lists, each the longest unused first; what is too much in the second comes back to the first."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.probation: list[int] = []
        self.protected: list[int] = []

    def hit(self, item: int) -> None:
        (self.probation if item in self.probation else self.protected).remove(item)
        self.protected.append(item)

    def miss(self, item: int) -> None:
        self.probation.append(item)

    def victim(self) -> int:
        while len(self.protected) > self.room * 4 // 5:
            self.probation.append(self.protected.pop(0))
        return (self.probation or self.protected)[0]

    def evicted(self, item: int) -> None:
        (self.probation if item in self.probation else self.protected).remove(item)


class S3Fifo(Order):
    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.small: list[int] = []
        self.main: list[int] = []
        self.hits: dict[int, int] = {}
        self.ghosts: deque[int | None] = deque(
            maxlen=room * 9 // 10
        )  # the latest, but for those that came back

    def hit(self, item: int) -> None:
        self.hits[item] = min(self.hits[item] + 1, 3)

    def miss(self, item: int) -> None:
        was_evicted = item in self.ghosts
        if was_evicted:
            self.ghosts[self.ghosts.index(item)] = None
        (self.main if was_evicted else self.small).append(item)
        self.hits[item] = 0

    def victim(self) -> int:
        while True:
            if self.small and (len(self.small) > self.room // 10 or not self.main):
                item = self.small[0]
                if self.hits[item] <= 1:
                    return item
                self.main.append(self.small.pop(0))
                self.hits[item] = 0
            else:
                item = self.main[0]
                if self.hits[item] == 0:
                    return item
                self.main.append(self.main.pop(0))
                self.hits[item] -= 1

    def evicted(self, item: int) -> None:
        if item in self.small:
            self.small.remove(item)
            self.ghosts.append(item)
        else:
            self.main.remove(item)


class Sieve(Order):
    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.queue: list[int] = []  # the oldest first
        self.visited: set[int] = set()
        self.hand = 0

    def hit(self, item: int) -> None:
        self.visited.add(item)

    def miss(self, item: int) -> None:
        self.queue.append(item)

    def victim(self) -> int:
        while True:
            if self.hand == len(self.queue):
                self.hand = 0
            item = self.queue[self.hand]
            if item not in self.visited:
                return item
            self.visited.discard(item)
            self.hand += 1

    def evicted(self, item: int) -> None:
        self.queue.remove(item)  # the hand now points at the next younger one


ORDERS: dict[str, type[Order]] = {
    "lru": Order,
    "priority": Order,
    "tlru": Order,  # turns this short are quick without any block
    "lfu": Lfu,
    "gdsf": Gdsf,
    "slru": Slru,
    "s3fifo": S3Fifo,
    "sieve": Sieve,
}


@pytest.mark.parametrize("policy", ORDERS)
@settings(max_examples=25)
@given(st.integers(1, 24), st.integers(0, 2**32), st.integers(2, 40), st.floats(0, 1.5))
def test_a_policy_holds_what_its_definition_holds(
    policy: str, room: int, seed: int, items: int, skew: float
) -> None:
    rng = np.random.default_rng(seed)
    weights = np.arange(1, items + 1) ** -skew
    pool, meant = BlockPool(room, block_size=SIZE, policy=policy), ORDERS[policy](room)
    for item in rng.choice(items, 150, p=weights / weights.sum()).tolist():
        remember(pool, [item] * SIZE)
        meant.use(item)
        there = pool.match_lengths([[other] * SIZE for other in range(items)])
        assert np.flatnonzero(there).tolist() == sorted(meant.held)


@settings(max_examples=25)
@given(st.integers(1, 24), st.integers(0, 2**32), st.integers(1, 60))
def test_hazard_holds_what_lru_holds_until_something_comes_back(room: int, seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    pools = [BlockPool(room, block_size=SIZE, clock="manual", policy=policy) for policy in ("lru", "hazard")]
    prompts = [[item] * int(rng.integers(1, room * SIZE + 1)) for item in range(count)]
    waits_s = rng.exponential(5, count) + 0.001
    for prompt, wait_s in zip(prompts, waits_s.tolist(), strict=True):
        for pool in pools:
            pool.advance(wait_s)
            remember(pool, prompt)
        lengths = [pool.match_lengths(prompts).tolist() for pool in pools]
        assert lengths[0] == lengths[1]


def weighted_hits(trace: Trace, blocks: int, equal_cost_tokens: int, weigh_by: int) -> float:
    """Hits of `hazard`, a block at a depth counted as 1 + its tokens' part of `weigh_by`."""
    [result] = simulate(trace, policies=["hazard"], blocks=[blocks], equal_cost_tokens=equal_cost_tokens)
    hits = result.hits_by_request.astype(np.float64)
    return float((hits + hits * (hits - 1) / 2 * result.block_size / weigh_by).sum())


@pytest.mark.parametrize("workload", ["multi-turn", "agents"])
def test_hazard_saves_more_work_where_it_weighs_it(workload: str) -> None:
    trace = make_workload(workload, num_requests=1500)
    assert weighted_hits(trace, 2000, 2048, 2048) > weighted_hits(trace, 2000, 0, 2048)


# ------------------------------------------------------------------ sequences against what is learnt


def cyclic(i: int, rng: random.Random) -> int:
    return i % 70


def all_new(i: int, rng: random.Random) -> int:
    return i


def phases(i: int, rng: random.Random) -> int:
    """Hot prompts that change altogether, between prompts of no further use."""
    return rng.randrange(20) + 1000 * (i // 1500) if rng.random() < 0.6 else 10**6 + i


def alternating(i: int, rng: random.Random) -> int:
    return rng.randrange(40) + 1000 * (i // 300 % 2)


def the_oldest_comes_back(i: int, rng: random.Random) -> int:
    """What was taught to come back soon comes back late, and the other way round."""
    back = 5 if i // 1000 % 2 else 45
    return i + 100 if i % 2 else i + 100 - back - (i - back) % 2 + 1


@pytest.mark.parametrize("drawn", [cyclic, all_new, phases, alternating, the_oldest_comes_back])
def test_hazard_is_nowhere_a_point_below_lru(drawn: Callable[[int, random.Random], int]) -> None:
    rng = random.Random(3)
    prompts = [np.arange(4, dtype=np.uint32) + 4 * drawn(i, rng) for i in range(8000)]
    trace = make_trace("drawn", (Request(0.3 * n, 4, 0, None, p, 1) for n, p in enumerate(prompts)))
    lru, hazard = simulate(trace, policies=["lru", "hazard"], blocks=[120], block_size=2)
    assert hazard.block_hit_rate >= lru.block_hit_rate - 0.01
