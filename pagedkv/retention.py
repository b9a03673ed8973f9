"""What a request asks to be kept: retentions, breakpoints, and ranges that must not be published.

The first two are soft: they order eviction and never make anything fail. The core takes plain numbers, so
here the wishes are checked and turned into ranges of whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from pagedkv.checks import check_int, check_iterable, check_number, show
from pagedkv.errors import UsageError

DEFAULT_PRIORITY = 35
"""Of a block that nobody asked to keep."""
RETAINED_PRIORITY = 70
"""Of a breakpoint's blocks, and of a retention that names none."""
MAX_PRIORITY = 100
MAX_BREAKPOINTS = 4

END_OF_TIME_S = 0.0
"""The core's word for a retention that lasts for good; no other has this length."""
TICK_S = 1e-9
"""The core's clock counts nanoseconds."""
NO_END = 2**62
"""A position, and a block, behind every prompt."""


class Retention(NamedTuple):
    """A wish to keep the blocks of some tokens longer, or less long, than others.

    Attributes
    ----------
    start, end : int, int or None
        The tokens ``[start, end)``; every block that holds one of them counts. None: no end, so that what is
        appended later counts too.
    priority : int
        0 to 100. Blocks of a lower one are evicted first; who asks for nothing has 35.
    ttl_s : float or None
        Seconds from `open`, or from the call of `retain`, until the wish lapses. None: for good.
    """

    start: int = 0
    end: int | None = None
    priority: int = RETAINED_PRIORITY
    ttl_s: float | None = None


class Breakpoint(NamedTuple):
    """The end of a part of the prompt that is to be found again within some time.

    The whole blocks before it are retained with priority 70, and each `open` that hits them within that time
    starts it anew.

    Attributes
    ----------
    position : int
        1 to the prompt's length: the part is the tokens ``[0, position)``.
    ttl_s : float
        Seconds.
    """

    position: int
    ttl_s: float


RetainedBlocks: TypeAlias = tuple[int, int, int, float, bool]
"""``(start_block, end_block, priority, ttl_s, refreshes)``: blocks ``[start_block, end_block)`` of a prompt,
a time of 0.0 for good, and whether a read starts the time anew."""


def encode_retention(
    num_tokens: int,
    block_size: int,
    retention: Iterable[Retention] | None = (),
    breakpoints: Iterable[Breakpoint] | None = (),
) -> list[RetainedBlocks]:
    """Turn the retentions of a request, and then its breakpoints, into ranges of blocks.

    A breakpoint before the end of the first block gives an empty range.

    Parameters
    ----------
    num_tokens : int
        Of the prompt. Retentions may reach beyond it, breakpoints may not.
    block_size : int
    retention, breakpoints : iterable, optional
        In the order given. None means none.

    Raises
    ------
    UsageError
        For a bad field, and for breakpoints that are too many, or in a wrong order.
    """
    if isinstance(retention, Retention):
        raise UsageError(f"retention: expected a sequence of Retention, got one: {show(retention)}")
    wishes = [
        retained_blocks(each, block_size, f"retention[{i}]")
        for i, each in enumerate(check_iterable("retention", () if retention is None else retention))
    ]
    points = check_breakpoints(num_tokens, breakpoints)
    return wishes + [
        (0, position // block_size, RETAINED_PRIORITY, ttl_s, True) for position, ttl_s in points
    ]


def retained_blocks(retention: Any, block_size: int, what: str = "retention") -> RetainedBlocks:
    """Turn one retention into the range of blocks that hold a token of it.

    Raises
    ------
    UsageError
        For what is no Retention, or has a bad field; `what` begins the message.
    """
    if not isinstance(retention, Retention):
        raise UsageError(f"{what}: expected a Retention, got {show(retention)}")
    start = check_int(f"{what}.start", retention.start, 0, NO_END)
    priority = check_int(f"{what}.priority", retention.priority, 0, MAX_PRIORITY)
    ttl_s = END_OF_TIME_S if retention.ttl_s is None else check_ttl(f"{what}.ttl_s", retention.ttl_s)
    end_block = NO_END
    if retention.end is not None:
        end = check_int(f"{what}.end", retention.end, 0, NO_END)
        if end <= start:
            raise UsageError(f"{what}.end: expected more than the start, {start}, got {end}")
        end_block = (end - 1) // block_size + 1
    return start // block_size, end_block, priority, ttl_s, False


def check_breakpoints(num_tokens: int, breakpoints: Iterable[Breakpoint] | None) -> list[Breakpoint]:
    """`breakpoints` of a prompt, with an int and a float each.

    Raises
    ------
    UsageError
        For a bad field, more than four, positions that don't ascend or times that do.
    """
    if isinstance(breakpoints, Breakpoint):
        raise UsageError(f"breakpoints: expected a sequence of Breakpoint, got one: {show(breakpoints)}")
    given = list(check_iterable("breakpoints", () if breakpoints is None else breakpoints))
    if len(given) > MAX_BREAKPOINTS:
        raise UsageError(f"breakpoints: expected at most {MAX_BREAKPOINTS}, got {len(given)}")
    points: list[Breakpoint] = []
    for i, each in enumerate(given):
        what = f"breakpoints[{i}]"
        if not isinstance(each, Breakpoint):
            raise UsageError(f"{what}: expected a Breakpoint, got {show(each)}")
        position = check_int(f"{what}.position", each.position, 1, num_tokens)
        ttl_s = check_ttl(f"{what}.ttl_s", each.ttl_s)
        if points and position <= points[-1].position:
            before = points[-1].position
            raise UsageError(
                f"{what}.position: expected more than that of the one before, {before}, got {position}"
            )
        if points and ttl_s > points[-1].ttl_s:
            before_s = points[-1].ttl_s
            raise UsageError(
                f"{what}.ttl_s: expected at most that of the one before, {before_s:g}, got {ttl_s:g}"
            )
        points.append(Breakpoint(position, ttl_s))
    return points


def check_ttl(what: str, value: Any) -> float:
    """`value` as seconds, finite and at least one tick of the core's clock, which knows 0 as for good."""
    seconds = check_number(what, value)
    if seconds < TICK_S:
        raise UsageError(f"{what}: expected at least {TICK_S:g} seconds, got {seconds:g}")
    return seconds


def first_unpublished(no_cache: Iterable[tuple[int, int]] | None) -> int | None:
    """Return the smallest position of ranges that must not be published, None when there are none.

    Nothing behind it is published either, since a block is only found through those before it.

    Parameters
    ----------
    no_cache : iterable of (start, end)
        Tokens ``[start, end)`` each, none empty, in any order.

    Raises
    ------
    UsageError
    """
    starts: list[int] = []
    for i, pair in enumerate(check_iterable("no_cache", () if no_cache is None else no_cache)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UsageError(f"no_cache[{i}]: expected a pair of start and end, got {show(pair)}")
        start = check_int(f"no_cache[{i}]: start", pair[0], 0, NO_END)
        end = check_int(f"no_cache[{i}]: end", pair[1], 0, NO_END)
        if end <= start:
            raise UsageError(f"no_cache[{i}]: expected an end behind the start, {start}, got {end}")
        starts.append(start)
    return min(starts, default=None)
