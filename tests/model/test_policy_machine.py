"""With every order of eviction: leaves go first, all or nothing, every page once, equal calls do the same.

Two pools get the same calls. Nothing is compared with an order that was meant, so it holds for those that
learn, too; tests/unit/test_policy_orders.py compares the simple ones with their definitions.
"""

from __future__ import annotations

import unittest
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedkv import BlockPool, OutOfBlocksError
from pagedkv.pool import POLICIES
from pagedkv.sequence import Sequence

HEADS = [[0] * 6, [0, 0, 0, 0, 1, 1], [1] * 5, [2, 2, 0, 0, 0, 0, 1]]
PROMPTS = st.builds(
    lambda head, tail: head + tail, st.sampled_from(HEADS), st.lists(st.integers(0, 1), max_size=9)
)
WHICH = st.integers(0, 2**16)


def seen_of(pool: BlockPool) -> tuple[Any, ...]:
    """What prompts match, what pages hold, and which of them may go."""
    matches = [(match._replace(block_ids=()), match.block_ids.tolist()) for match in map(pool.match, HEADS)]
    digests = [pool.digest_of(page) for page in range(pool.num_blocks)]
    return matches, digests, pool.snapshot().state.tolist()


class Machine(RuleBasedStateMachine):
    POLICY = "lru"

    @initialize(num_blocks=st.integers(8, 16))
    def build(self, num_blocks: int) -> None:
        self.pools = [
            BlockPool(num_blocks, block_size=2, clock="manual", policy=self.POLICY) for _ in range(2)
        ]
        self.held: list[list[Sequence]] = []

    @invariant()
    def are_equal_and_whole(self) -> None:
        if not hasattr(self, "pools"):
            return
        first, second = self.pools
        first.check_integrity()  # leaves before their parents, and every page free, evictable or held
        assert first.stats() == second.stats()
        for a, b in zip(first.snapshot(), second.snapshot(), strict=True):
            np.testing.assert_array_equal(a, b)

    def both(self, call: Any) -> list[Any]:
        """Make the same call on each pool; when it is refused, nothing has changed."""
        done = []
        for n, pool in enumerate(self.pools):
            before = pool.stats()
            try:
                done.append(call(pool, n))
            except OutOfBlocksError as error:
                assert pool.stats() == before
                done.append((error.needed, error.free, error.evictable))
        return done

    def hint(self, call: Any) -> None:
        """A call that changes what goes first, and nothing else."""
        seen = [(pool.stats(), *seen_of(pool)) for pool in self.pools]
        first, second = self.both(call)
        assert first == second
        assert [(pool.stats(), *seen_of(pool)) for pool in self.pools] == seen

    @rule(tokens=PROMPTS, is_kept=st.booleans())
    def serve(self, tokens: list[int], is_kept: bool) -> None:
        seqs = self.both(lambda pool, n: pool.open(tokens))
        self.held.append(seqs)
        steps = self.both(lambda pool, n: pool.reserve(seqs[n], seqs[n].num_uncached_tokens))
        if isinstance(steps[0], tuple):
            assert steps[0] == steps[1]
        else:
            self.both(lambda pool, n: pool.commit(steps[n]))
        if not is_kept or isinstance(steps[0], tuple) or len(self.held) > 3:
            for pair in self.held:
                self.both(lambda pool, n, pair=pair: pool.close(pair[n]))
            self.held.clear()

    @precondition(lambda self: self.held)
    @rule(which=WHICH, verb=st.sampled_from(["close", "preempt", "fork", "last_turn", "expect", "decode"]))
    def go_on(self, which: int, verb: str) -> None:
        pair = self.held[which % len(self.held)]
        if verb == "close":
            self.both(lambda pool, n: pool.close(pair[n]))
            self.held.remove(pair)
        elif verb == "preempt":
            self.both(lambda pool, n: pool.preempt(pair[n]))
        elif verb == "fork":
            self.held.append(self.both(lambda pool, n: pool.fork(pair[n])))
        elif verb == "last_turn":
            self.hint(lambda pool, n: pool.last_turn(pair[n]))
        elif verb == "expect":
            self.hint(lambda pool, n: pool.expect_reuse(pair[n], within_s=1 + which % 7))
        else:
            self.both(lambda pool, n: pool.append(pair[n], [which % 2, 0, 1]))
            steps = self.both(lambda pool, n: pool.reserve(pair[n], pair[n].num_uncached_tokens))
            if not isinstance(steps[0], tuple):
                self.both(lambda pool, n: pool.commit(steps[n]))

    @rule(
        tokens=PROMPTS,
        verb=st.sampled_from(["touch", "waiting", "retain", "lower"]),
        ttl_s=st.none() | st.just(2.0),
    )
    def wish(self, tokens: list[int], verb: str, ttl_s: float | None) -> None:
        if verb == "touch":
            self.both(lambda pool, n: pool.touch(tokens))
        elif verb == "waiting":
            self.hint(lambda pool, n: pool.waiting([tokens, HEADS[0]]).tolist())
        else:
            priority = 70 if verb == "retain" else 10
            self.both(lambda pool, n: pool.retain(tokens, priority=priority, ttl_s=ttl_s))

    @rule(
        count=st.integers(0, 4),
        verb=st.sampled_from(["evict", "allocate", "advance", "advance", "bump", "reset"]),
    )
    def keep_house(self, count: int, verb: str) -> None:
        if verb == "evict":
            assert len(set(self.both(lambda pool, n: pool.evict(count)))) == 1
        elif verb == "allocate":
            pages = self.both(lambda pool, n: pool.allocate(count))
            if not isinstance(pages[0], tuple):
                assert pages[0].tolist() == pages[1].tolist()
                self.both(lambda pool, n: pool.free(pages[n]))
        elif verb == "advance":
            self.both(lambda pool, n: pool.advance(count + 0.5))
        elif verb == "bump":
            self.both(lambda pool, n: pool.bump_generation())
        else:
            self.both(lambda pool, n: pool.reset())

    def teardown(self) -> None:
        if not hasattr(self, "pools"):
            return
        for pair in self.held:
            self.both(lambda pool, n, pair=pair: pool.close(pair[n]))
        self.both(lambda pool, n: pool.evict(pool.num_blocks))
        for pool in self.pools:
            assert pool.stats().num_free_blocks == pool.num_blocks


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_the_invariants_and_does_the_same_again(policy: str) -> None:
    machine = type("Machine", (Machine,), {"POLICY": policy})
    case: type[unittest.TestCase] = machine.TestCase
    case.settings = settings(  # type: ignore[attr-defined]
        max_examples=12, stateful_step_count=40, suppress_health_check=list(HealthCheck)
    )
    case("runTest").debug()
