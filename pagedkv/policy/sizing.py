"""How large a pool a trace needs: the blocks at which most of what could be hit is hit, by policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from pagedkv.errors import UsageError
from pagedkv.policy.simulation import BELADY, INFINITE, check_policies, simulate
from pagedkv.policy.trace import Trace

SHARES = (0.9, 0.99)
STEP = 1.02
"""A size that is found is at most so many times the smallest that would do."""


class Need(NamedTuple):
    """The blocks at which a policy hits a share of what a pool without end does.

    Attributes
    ----------
    policy : str
    share : float
    blocks : int or None
        Found by halving, to within 2 %; None when even a pool for all blocks of the trace hits less.
    block_hit_rate : float
        There.
    blocks_saved : int or None
        How many fewer these are than LRU needs for as much.
    """

    policy: str
    share: float
    blocks: int | None
    block_hit_rate: float
    blocks_saved: int | None


def needed_blocks(
    trace: Trace,
    policies: Iterable[str],
    *,
    block_size: int | None = None,
    shares: Iterable[float] = SHARES,
    progress: Callable[[str], None] | None = None,
) -> list[Need]:
    """Return, by policy and share, how many blocks do.

    Requests are replayed one after the other: those that run at a time need their own blocks besides.

    Parameters
    ----------
    trace : Trace
    policies : iterable of str
        Of `BlockPool`, or "belady"; LRU is run in any case.
    block_size : int, optional
    shares : iterable of float
        Above 0, up to 1.
    progress : callable, optional
        Called with a policy's name after each replay.

    Raises
    ------
    UsageError
    """
    size = trace.natural_block_size if block_size is None else block_size
    wanted = sorted(shares)
    if not wanted or not 0 < wanted[0] <= wanted[-1] <= 1:
        raise UsageError(f"shares: expected numbers above 0 and up to 1, got {wanted}")
    names = [name for name in dict.fromkeys(("lru", *check_policies(policies))) if name != INFINITE]
    largest = max(-(-request.num_tokens // size) for request in trace.requests)
    [endless] = simulate(trace, policies=[INFINITE], blocks=[1], block_size=size)
    searches = {}
    for name in names:
        search = _Search(trace, name, size, progress)
        searches[name] = {
            share: search.smallest(share * endless.hit_blocks, largest, endless.blocks + largest)
            for share in wanted
        }
    needs = []
    for name in sorted(names, key=lambda name: (name != "lru", name == BELADY)):
        for share, (blocks, rate) in searches[name].items():
            of_lru = searches["lru"][share][0]
            saved = of_lru - blocks if of_lru is not None and blocks is not None else None
            needs.append(Need(name, share, blocks, rate, saved))
    return needs


class _Search:
    """Hits of one policy by size, each replayed once."""

    def __init__(
        self, trace: Trace, policy: str, block_size: int, progress: Callable[[str], None] | None
    ) -> None:
        self._trace, self._policy, self._block_size = trace, policy, block_size
        self._progress = progress
        self._known: dict[int, tuple[int, float]] = {}

    def smallest(self, hits: float, low: int, high: int) -> tuple[int | None, float]:
        """Return the fewest blocks with so many hits, and their rate, as if more never hit less."""
        if self._at(high)[0] < hits:
            return None, self._at(high)[1]
        for size in sorted(self._known):  # what is known already narrows the search
            if self._known[size][0] >= hits:
                high = min(high, size)
            else:
                low = max(low, size)
        if self._at(low)[0] >= hits:
            return low, self._at(low)[1]
        while high > max(low + 1, int(low * STEP)):
            middle = min(max(round((low * high) ** 0.5), low + 1), high - 1)
            if self._at(middle)[0] >= hits:
                high = middle
            else:
                low = middle
        return high, self._at(high)[1]

    def _at(self, blocks: int) -> tuple[int, float]:
        if blocks not in self._known:
            [result] = simulate(
                self._trace, policies=[self._policy], blocks=[blocks], block_size=self._block_size
            )
            self._known[blocks] = (result.hit_blocks, result.block_hit_rate)
            if self._progress is not None:
                self._progress(self._policy)
        return self._known[blocks]
