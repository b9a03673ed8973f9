"""Wrong retentions, breakpoints, quotas, fences, questions and times: refused, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pool_driving import drain, observe, run
from pool_refusals import SALTS, SIZES, TOKENS, Case, World, assert_refused

from pagedkv import BlockPool, Breakpoint, Media, PagedKVError, Retention, StateError, UsageError

NUMBERS: list[tuple[str, Any]] = [
    ("nan", float("nan")),
    ("inf", float("inf")),
    ("-inf", -float("inf")),
    ("negative", -1.0),
    ("a str", "1"),
    ("a bool", True),
    ("a complex", 1j),
    ("numpy's nan", np.float32("nan")),
    ("an array", np.array([1.0])),
    ("a list", [1.0]),
]
TTLS = [*NUMBERS, ("0", 0), ("0.0", 0.0), ("below any clock's tick", 1e-300)]
PRIORITIES = [*SIZES, ("-1", -1), ("101", 101), ("nan", float("nan"))]
NO_LISTS: list[tuple[str, Any]] = [
    ("a number", 7),
    ("zero", 0),
    ("False", False),
    ("a str", "abc"),
    ("an empty str", ""),
    ("bytes", b"ab"),
    ("a mapping", {1: 2}),
    ("an array without dimensions", np.array(1)),
    ("an array of numbers", np.array([1, 2])),
    ("a list of None", [None]),
    ("a list of numbers", [1, 2]),
    ("a list of str", ["ab"]),
    ("a generator of numbers", range(2)),
]
RETENTIONS: list[tuple[str, Any]] = [
    *NO_LISTS,
    ("one, not in a list", Retention()),
    ("a plain tuple", [(0, None, 70, None)]),
    ("an end before its start", [Retention(3, 1)]),
    ("an empty range", [Retention(3, 3)]),
    ("a negative start", [Retention(-1)]),
    ("a fractional end", [Retention(0, 1.5)]),  # type: ignore[arg-type]
    *((f"a priority of {name}", [Retention(priority=p)]) for name, p in PRIORITIES if p is not None),
    *((f"a second with a ttl of {name}", [Retention(), Retention(ttl_s=t)]) for name, t in TTLS),
]
BREAKPOINTS: list[tuple[str, Any]] = [
    *NO_LISTS,
    ("one, not in a list", Breakpoint(4, 60.0)),
    ("a plain tuple", [(4, 60.0)]),
    ("position 0", [Breakpoint(0, 60.0)]),
    ("a position beyond the prompt", [Breakpoint(10, 60.0)]),
    ("positions that descend", [Breakpoint(5, 60.0), Breakpoint(4, 60.0)]),
    ("one position twice", [Breakpoint(4, 60.0), Breakpoint(4, 60.0)]),
    ("times that ascend", [Breakpoint(4, 60.0), Breakpoint(5, 61.0)]),
    ("five of them", [Breakpoint(i, 60.0) for i in range(1, 6)]),
    *((f"a ttl of {name}", [Breakpoint(4, t)]) for name, t in TTLS),
    *((f"a position of {name}", [Breakpoint(n, 60.0)]) for name, n in SIZES),
]
RANGES: list[tuple[str, Any]] = [
    *NO_LISTS,
    ("one, not in a list", (1, 2)),
    ("an empty range", [(2, 2)]),
    ("an end before its start", [(2, 1)]),
    ("a negative start", [(-1, 2)]),
    ("three numbers", [(1, 2, 3)]),
    *((f"an end of {name}", [(1, 2), (0, n)]) for name, n in SIZES if name != "2**64"),
]

CASES: list[Case] = [
    *[
        (f"open: retention: {name}", UsageError, lambda w, x=x: w.pool.open([7] * 9, retention=x))
        for name, x in RETENTIONS
    ],
    *[
        (f"open: breakpoints: {name}", UsageError, lambda w, x=x: w.pool.open([7] * 9, breakpoints=x))
        for name, x in BREAKPOINTS
    ],
    *[
        (f"open: no_cache: {name}", UsageError, lambda w, x=x: w.pool.open([7] * 9, no_cache=x))
        for name, x in RANGES
    ],
    *[(f"retain: {name}", UsageError, lambda w, t=tokens: w.pool.retain(t)) for name, tokens in TOKENS],
    *[(f"explain: {name}", UsageError, lambda w, t=tokens: w.pool.explain(t)) for name, tokens in TOKENS],
    *[(f"touch: {name}", UsageError, lambda w, t=tokens: w.pool.touch(t)) for name, tokens in TOKENS],
    *[
        (f"retain: a priority of {name}", UsageError, lambda w, p=p: w.pool.retain([7] * 8, priority=p))
        for name, p in PRIORITIES
    ],
    *[
        (f"retain: a ttl of {name}", UsageError, lambda w, t=t: w.pool.retain([7] * 8, ttl_s=t))
        for name, t in TTLS
    ],
    *[
        (f"retain: a start of {name}", UsageError, lambda w, n=n: w.pool.retain([7] * 8, start=n))
        for name, n in SIZES
    ],
    *[
        (f"retain: an end of {name}", UsageError, lambda w, n=n: w.pool.retain([7] * 8, end=n))
        for name, n in SIZES
        if n is not None
    ],
    ("retain: an end before the start", UsageError, lambda w: w.pool.retain([7] * 8, start=4, end=3)),
    ("retain: an empty range", UsageError, lambda w: w.pool.retain([7] * 8, start=0, end=0)),
    *[
        (f"{verb}: a salt that is {name}", UsageError, lambda w, v=verb, s=s: _salted(w, v, s))
        for verb in ("retain", "touch", "explain", "set_quota", "tenant_usage")
        for name, s in SALTS
    ],
    ("set_quota: no salt", UsageError, lambda w: w.pool.set_quota(None, 3)),
    ("tenant_usage: no salt", UsageError, lambda w: w.pool.tenant_usage(None)),
    ("set_quota: -1", UsageError, lambda w: w.pool.set_quota("red", -1)),
    *[
        (f"set_quota: {name}", UsageError, lambda w, n=n: w.pool.set_quota("red", n))
        for name, n in [*SIZES, ("nan", float("nan"))]
        if n is not None
    ],
    ("clock: neither", UsageError, lambda w: BlockPool(4, clock="wall")),
    ("clock: None", UsageError, lambda w: BlockPool(4, clock=None)),
    ("clock: an array", UsageError, lambda w: BlockPool(4, clock=np.array(["manual", "monotonic"]))),
    *[(f"advance: {name}", UsageError, lambda w, s=s: w.pool.advance(s)) for name, s in NUMBERS],
    ("advance: None", UsageError, lambda w: w.pool.advance(None)),
    ("advance: beyond the clock", UsageError, lambda w: w.pool.advance(1e12)),
    ("advance: far beyond the clock", UsageError, lambda w: w.pool.advance(1e300)),
    ("advance: a clock that goes by itself", StateError, lambda w: w.foreign.advance(1.0)),
    *[
        (f"explain: across_tenants: {name}", UsageError, lambda w, x=x: w.pool.explain([1], across_tenants=x))
        for name, x in [("a str", "no"), ("1", 1), ("None", None), ("an array", np.array([True, False]))]
    ],
    # fences
    ("fence: a closed sequence", StateError, lambda w: w.pool.fence(w.closed)),
    ("fence: a closed sequence in second place", StateError, lambda w: w.pool.fence([w.seq, w.closed])),
    ("fence: of another pool", UsageError, lambda w: w.pool.fence([w.seq, w.foreign_seq])),
    ("fence: sequences in no order", UsageError, lambda w: w.pool.fence({w.seq, w.other})),
    *[(f"fence: {name}", UsageError, lambda w, x=x: w.pool.fence(x)) for name, x in NO_LISTS],
    ("release: a fence that was released", StateError, lambda w: w.pool.release(w.released)),
    ("release: a fence that was released, by itself", StateError, lambda w: w.released.release()),
    ("release: of another pool", UsageError, lambda w: w.pool.release(w.foreign_fence)),
    ("release: no fence", UsageError, lambda w: w.pool.release(w.step)),
    ("release: None", UsageError, lambda w: w.pool.release(None)),
    # look-up
    *[(f"lookup: {name}", UsageError, lambda w, x=x: w.pool.lookup(x)) for name, x in NO_LISTS],
    ("lookup: digests in no order", UsageError, lambda w: w.pool.lookup({bytes(32)})),
    ("lookup: one digest, not in a list", UsageError, lambda w: w.pool.lookup(bytes(32))),
    ("lookup: a short digest", UsageError, lambda w: w.pool.lookup([bytes(32), bytes(31)])),
    ("lookup: text", UsageError, lambda w: w.pool.lookup(["0" * 32])),
]


def _salted(world: World, verb: str, salt: Any) -> object:
    if verb == "set_quota":
        return world.pool.set_quota(salt, 3)
    if verb == "tenant_usage":
        return world.pool.tenant_usage(salt)
    return getattr(world.pool, verb)([1, 2, 3], cache_salt=salt)


@pytest.mark.parametrize(("name", "error", "call"), CASES, ids=[name for name, _, _ in CASES])
def test_a_refused_wish_says_why_and_changes_nothing(
    name: str, error: type[PagedKVError], call: Callable[[World], Any]
) -> None:
    assert_refused(error, call)


def test_wishes_may_come_from_generators_and_none_means_none() -> None:
    def opened(wrap: Callable[[list[Any]], Any]) -> tuple[Any, ...]:
        pool = BlockPool(8, block_size=4, clock="manual")
        seq = pool.open(
            wrap(list(range(12))),
            extras=wrap([Media(1, 2, b"d" * 32)]),
            retention=wrap([Retention(0, 4, 90)]),
            breakpoints=wrap([Breakpoint(8, 60.0)]),
            no_cache=wrap([(9, 10)]),
        )
        run(pool, seq)
        fence = pool.fence(wrap([seq]))
        assert pool.lookup(wrap(seq.block_hashes)).tolist() == seq.block_ids[:2].tolist()
        seen = observe(pool, seq)
        fence.release()
        seq.close()
        return seen, drain(pool)

    once = opened(list)
    for wrap in (tuple, iter, lambda wishes: (wish for wish in wishes)):
        assert opened(wrap) == once
    pool = BlockPool(8, block_size=4)
    plain = pool.open(range(12), extras=None, retention=None, breakpoints=None, no_cache=None)
    run(pool, plain)
    assert (plain.num_committed_tokens, plain.usage.cache_write_by_ttl) == (12, {})
    for nothing in ((), [], iter(())):
        assert (
            pool.open(range(12), retention=nothing, breakpoints=nothing, no_cache=nothing).usage.cache_read
            == 11
        )


@pytest.mark.parametrize("number", [np.int64, np.uint8, np.int16, int])
def test_numbers_of_numpy_will_do(number: Callable[[int], Any]) -> None:
    pool = BlockPool(number(8), block_size=number(4), clock="manual")
    seq = pool.open(
        range(9),
        retention=[Retention(number(0), number(4), number(90), np.float32(60.0))],
        breakpoints=[Breakpoint(number(8), number(60))],
        no_cache=[(number(8), number(9))],
    )
    run(pool, seq)
    assert seq.usage == (1, 0, {60.0: 8})
    assert (
        pool.retain(range(8), priority=number(95), start=number(4), end=number(8), ttl_s=np.float64(1.5)) == 4
    )
    pool.set_quota("red", number(3))
    assert pool.tenant_usage("red").quota == 3
    pool.advance(np.float32(0.5))
    assert pool.now_s == 0.5
    assert pool.snapshot().priority[seq.block_ids].tolist() == [95, 95, 35]


def test_a_closed_sequence_answers_what_it_can_and_holds_nothing() -> None:
    pool = BlockPool(8, block_size=4)
    seq = pool.open(range(9), breakpoints=[Breakpoint(8, 60.0)])
    run(pool, seq)
    seq.close()
    assert seq.num_releasable_blocks == 0
    assert seq.usage == (1, 0, {60.0: 8})
    assert seq.is_closed
    assert len(seq.block_hashes) == 2
