"""Where two prompts differ, and what they have in common behind it: by runs of tokens that both have once.

Patience diff (B. Cohen): windows of tokens that both have once are anchors; the longest chain of them that
is in order in both is extended in both directions.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]
Windows = npt.NDArray[np.uint64]
WINDOW = 8
"""Fewer tokens in common are chance."""


class Gap(NamedTuple):
    """Old tokens [old_begin, old_end) in place of new ones [begin, end); then `common` tokens alike."""

    old_begin: int
    old_end: int
    begin: int
    end: int
    common: int


def windows_of(tokens: Tokens) -> Windows:
    """Return a hash of each `WINDOW` consecutive tokens, [max(0, num_tokens − 7)] uint64."""
    count = len(tokens) - WINDOW + 1
    if count < 1:
        return np.empty(0, np.uint64)
    mixed = (tokens.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    hashes = np.zeros(count, np.uint64)
    for place in range(WINDOW):
        hashes = hashes * np.uint64(0xD1342543DE82EF95) + mixed[place : place + count]
    return hashes ^ (hashes >> np.uint64(32))


def find_gaps(old: Tokens, new: Tokens) -> list[Gap]:
    """Return the differences from the first on; none for equal prompts."""
    head = common_length(old, new)
    if head == len(old) == len(new):
        return []
    most = min(len(old), len(new)) - head
    tail = common_length(old[::-1], new[::-1], most)
    tail = tail if tail >= WINDOW else 0
    old_end, end = len(old) - tail, len(new) - tail
    runs = [*_runs(old[head:old_end], new[head:end], head), (old_end, end, tail)]
    gaps: list[Gap] = []
    old_at = at = head
    for old_begin, begin, length in runs:
        if old_begin == old_at and begin == at and gaps:
            gaps[-1] = gaps[-1]._replace(common=gaps[-1].common + length)
        else:
            gaps.append(Gap(old_at, old_begin, at, begin, length))
        old_at, at = old_begin + length, begin + length
    return gaps


def common_length(a: Tokens, b: Tokens, most: int | None = None) -> int:
    """Return how many leading tokens are equal, at most `most`."""
    length = min(len(a), len(b)) if most is None else most
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length


def _runs(old: Tokens, new: Tokens, offset: int) -> list[tuple[int, int, int]]:
    """Return runs in common as (begin in old, begin in new, length), in order in both, none overlapping."""
    old_at, at = _anchors(windows_of(old), windows_of(new))
    runs: list[tuple[int, int, int]] = []
    old_free = free = 0
    for a, b in zip(old_at, at, strict=True):
        if a < old_free or b < free:
            continue
        back = 0
        while a - back > old_free and b - back > free and old[a - back - 1] == new[b - back - 1]:
            back += 1
        length = back + common_length(old[a:], new[b:])
        runs.append((a - back + offset, b - back + offset, length))
        old_free, free = a - back + length, b - back + length
    return runs


def _anchors(old: Windows, new: Windows) -> tuple[list[int], list[int]]:
    """Return where windows are that both have once, as many as are in the same order in both."""
    old_once, old_place = _once(old)
    new_once, new_place = _once(new)
    _, i, j = np.intersect1d(old_once, new_once, assume_unique=True, return_indices=True)
    old_at, at = old_place[i], new_place[j]
    order = np.argsort(at)
    old_at, at = old_at[order], at[order]
    # Longest increasing subsequence: the last place of the best chain of each length, and links back.
    ends: list[int] = []
    end_of: list[int] = []
    before = [-1] * len(at)
    for number, place in enumerate(old_at.tolist()):
        length = bisect_left(ends, place)
        before[number] = end_of[length - 1] if length else -1
        ends[length:] = [place, *ends[length + 1 :]]
        end_of[length:] = [number, *end_of[length + 1 :]]
    chain = []
    number = end_of[-1] if end_of else -1
    while number >= 0:
        chain.append(number)
        number = before[number]
    chain.reverse()
    return old_at[chain].tolist(), at[chain].tolist()


def _once(windows: Windows) -> tuple[Windows, npt.NDArray[np.int64]]:
    values, places, counts = np.unique(windows, return_index=True, return_counts=True)
    return values[counts == 1], places[counts == 1].astype(np.int64)
