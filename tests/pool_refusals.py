"""Two pools with something of everything, and calls that must be refused without a trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from pool_driving import compute, drain, observe, remember

from pagedkv import BlockPool, Fence, PagedKVError, Sequence, Step

GRAMMAR = r"expected .+, got .+"


@dataclass
class World:
    """A pool with something of everything."""

    pool: BlockPool
    seq: Sequence  # 9 tokens, all computed, and one to compute
    other: Sequence  # 5 tokens to compute
    closed: Sequence
    busy: Sequence  # in the open step
    step: Step
    committed: Step
    foreign: BlockPool
    foreign_seq: Sequence
    foreign_step: Step
    raw: list[int]
    fence: Fence  # of seq and busy
    released: Fence
    foreign_fence: Fence

    @property
    def sequences(self) -> list[Sequence]:
        return [self.seq, self.other, self.busy, self.foreign_seq]


def make_world() -> World:
    pool, foreign = BlockPool(16, block_size=4, clock="manual"), BlockPool(4, block_size=4)
    remember(pool, [7] * 8)
    remember(pool, [8] * 8, cache_salt="red")
    pool.set_quota("red", 3)
    pool.retain([7] * 4, priority=80, ttl_s=60.0)
    pool.advance(1.0)
    seq = compute(pool, range(9))
    pool.append(seq, 9)
    closed = pool.open([1, 2, 3])
    committed = pool.reserve(closed, 3)
    pool.prepare(committed)
    pool.commit(committed)
    closed.close()
    busy = pool.open([3] * 6)
    released = pool.fence(seq)
    released.release()
    foreign_seq, raw = foreign.open([1, 2, 3]), pool.allocate(1).tolist()
    return World(
        pool=pool,
        seq=seq,
        other=pool.open([5] * 5),
        closed=closed,
        busy=busy,
        step=pool.reserve(busy, 6),
        committed=committed,
        foreign=foreign,
        foreign_seq=foreign_seq,
        foreign_step=foreign.reserve(foreign_seq, 3),
        raw=raw,
        fence=pool.fence([seq, busy]),
        released=released,
        foreign_fence=foreign.fence(foreign_seq),
    )


Case = tuple[str, type[PagedKVError], Callable[[World], Any]]

TOKENS: list[tuple[str, Any]] = [
    ("negative", [1, -1]),
    ("2**32", [1, 2**32]),
    ("2**63", [2**63]),
    ("2**64", [2**64]),
    ("negative int64 array", np.array([1, -1])),
    ("too large int64 array", np.array([2**32])),
    ("a float", [1.0]),
    ("a float array", np.array([1.0, 2.0])),
    ("a bool", [True]),
    ("a bool array", np.array([True])),
    ("a str", "abc"),
    ("a list of str", ["1"]),
    ("None", None),
    ("a list of None", [None]),
    ("two dimensions", np.array([[1, 2], [3, 4]])),
    ("an object array", np.array([1, "2"], dtype=object)),
]
SALTS: list[tuple[str, Any]] = [
    ("empty", ""),
    ("empty bytes", b""),
    ("too long", "a" * 129),
    ("too long in UTF-8", "é" * 65),
    ("a number", 7),
    ("a dict", {"a": 1}),
    ("a lone surrogate", "\ud800"),
]
SIZES: list[tuple[str, Any]] = [
    ("1.0", 1.0),
    ("a str", "1"),
    ("None", None),
    ("a bool", True),
    ("2**64", 2**64),
]


def drained(world: World) -> list[int]:
    """Close everything and evict it all: shows the order that `observe` can't see."""
    world.pool.abandon(world.step)
    world.fence.release()
    for seq in (world.other, world.busy, world.seq):
        seq.close()
    return drain(world.pool)


def assert_refused(error: type[PagedKVError], call: Callable[[World], Any]) -> None:
    """The call raises just this, in the grammar of messages, and leaves both pools as they were."""
    world, untouched = make_world(), make_world()
    with pytest.raises(PagedKVError, match=GRAMMAR) as refusal:
        call(world)
    assert type(refusal.value) is error
    for a, b in ((world.pool, untouched.pool), (world.foreign, untouched.foreign)):
        assert observe(a) == observe(b)
    assert observe(world.pool, *world.sequences) == observe(untouched.pool, *untouched.sequences)
    assert (world.step.state, world.foreign_step.state) == (
        untouched.step.state,
        untouched.foreign_step.state,
    )
    assert drained(world) == drained(untouched)
