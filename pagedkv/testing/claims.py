"""What the oracle's requests claim for their blocks: how much each is worth keeping, and until when."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from math import inf
from typing import NamedTuple

from pagedkv.retention import Breakpoint, Retention

DEFAULT = 35


class Claim(NamedTuple):
    """A block's priority, when it ends, and how long a hit makes it last anew (0: a hit does not)."""

    priority: int = DEFAULT
    until: float = inf
    ttl: float = 0.0


def combine(one: Claim, other: Claim) -> Claim:
    """Return what two claims on one block come to."""
    sides = {(claim.priority > DEFAULT) - (claim.priority < DEFAULT) for claim in (one, other)}
    if len(sides) == 1 and sides != {0}:
        later = max(one.until, other.until), max(one.ttl, other.ttl)
        return Claim(max(one.priority, other.priority), *later)
    return max(one, other, key=lambda claim: claim.priority)


class Wishes:
    """What one request claims for each of its blocks, counted from when it was opened."""

    def __init__(
        self,
        block_size: int,
        retention: Iterable[Retention] = (),
        breakpoints: Iterable[Breakpoint] = (),
        since: float = 0.0,
    ) -> None:
        self.block_size, self.since = block_size, since
        self.retention, self.breakpoints = list(retention), list(breakpoints)

    def claim(self, block: int) -> Claim | None:
        """Return the claim on a block, if there is one."""
        start, end = block * self.block_size, (block + 1) * self.block_size
        claims = [
            Claim(priority, inf if ttl_s is None or priority == DEFAULT else self.since + ttl_s)
            for first, last, priority, ttl_s in self.retention
            if first < end and (last is None or start < last)
        ]
        claims += [
            Claim(70, self.since + ttl_s, ttl_s) for position, ttl_s in self.breakpoints if end <= position
        ]
        return reduce(combine, claims) if claims else None

    def write_ttl(self, position: int) -> float | None:
        """Return the longest time of a breakpoint whose whole blocks hold the token."""
        size = self.block_size
        return max((ttl_s for end, ttl_s in self.breakpoints if position < end // size * size), default=None)
