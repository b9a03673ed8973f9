"""Prompts for a pool of a few pages: few patterns, so that hits, runs and duplicates are frequent."""

from __future__ import annotations

from functools import cache
from itertools import chain, product
from typing import Any

import hypothesis.strategies as st

from pagedkv import Adapter, Breakpoint, Embeddings, Extra, Media, Retention

Prompt = tuple[list[int], dict[str, Any]]  # token ids, keyword arguments of open and match

SCOPES: list[dict[str, Any]] = [
    {"cache_salt": "tenant"},
    {"cache_salt": b"other"},
    {"extras": [Adapter("sql", b"r1")]},
    {"extras": [Adapter("sql", b"r2")]},
    {"extras": [Extra(200, b"mine")]},
]
# A digest names a content, and a content has one length: the same digest never comes with two lengths.
ITEMS: list[Media | Embeddings] = [
    *[Media(start, length, bytes([length]) * 32) for start in (0, 1, 5) for length in (1, 3)],
    *[Embeddings(positions, b"e" * 32) for positions in ([1], [2, 5])],
]
VARIANTS: list[tuple[dict[str, Any], list[Any]]] = [
    *[({}, [])] * 20,
    *[(scope, []) for scope in SCOPES],
    *[({}, [item]) for item in ITEMS],
    *[(SCOPES[0], [ITEMS[0]]), ({}, [ITEMS[1], ITEMS[2]]), ({**SCOPES[0], **SCOPES[2]}, [])],
]


@st.composite
def prompts(draw: st.DrawFn, block_size: int, tenants: bool = False) -> Prompt:
    """Of `tenants`, or of anybody."""
    tokens = draw(st.sampled_from(token_lists(block_size)))
    scope, items = draw(st.sampled_from(VARIANTS)) if not tenants else (draw(st.sampled_from(SCOPES[:2])), [])
    late = {"salt_from": draw(salt_positions(block_size))} if "cache_salt" in scope else {}
    extras = [*scope.get("extras", []), *items]
    return list(tokens), fitting({**scope, **late, "extras": extras}, len(tokens))


PRIORITIES = st.sampled_from([70, 70, 50, 20, 35])  # few, so that equal ones meet
TIMES_S = st.sampled_from([2.0, 8.0, 1.0, 30.0])


@st.composite
def ranges(draw: st.DrawFn, num_tokens: int) -> tuple[int, int | None]:
    start = draw(st.just(0) | st.integers(0, num_tokens - 1))
    return start, draw(st.none() | st.integers(start + 1, num_tokens + 5))


@st.composite
def retentions(draw: st.DrawFn, num_tokens: int, min_size: int = 0) -> list[Retention]:
    """Of mostly one priority for several parts and times."""
    most = draw(PRIORITIES)
    return [
        Retention(*draw(ranges(num_tokens)), draw(st.just(most) | PRIORITIES), draw(st.none() | TIMES_S))
        for _ in range(draw(st.integers(min_size, 3)))
    ]


@st.composite
def wishes(draw: st.DrawFn, num_tokens: int) -> dict[str, Any]:
    """What else `open` takes."""
    positions = sorted(draw(st.sets(st.integers(1, num_tokens), max_size=4)))
    times_s = sorted((draw(TIMES_S) for _ in positions), reverse=True)
    hidden = draw(st.lists(ranges(num_tokens), max_size=draw(st.sampled_from([0, 0, 1, 2]))))
    return {
        "retention": draw(retentions(num_tokens)),
        "breakpoints": [Breakpoint(*point) for point in zip(positions, times_s, strict=True)],
        "no_cache": [(start, start + 1 if end is None else end) for start, end in hidden],
        "reuse": draw(st.sampled_from([True, True, False])),
    }


def salt_positions(block_size: int) -> st.SearchStrategy[int | None]:
    """Where a salt enters: mostly at once, else in one of the next blocks, perhaps behind the prompt."""
    return st.sampled_from([None, None, *range(0, 3 * block_size, max(1, block_size // 2))])


@cache
def token_lists(block_size: int) -> list[list[int]]:
    """Up to four blocks, the shortest first."""
    half = block_size // 2
    patterns = [[0] * block_size, [0] * half + [1] * (block_size - half), [1] * block_size]
    wholes = [list(chain(*blocks)) for n in range(4) for blocks in product(patterns, repeat=n)]
    tails = [pattern[:n] for pattern in patterns for n in range(block_size)] + [[2], [0, 2]]
    lists = [whole + tail for whole in wholes for tail in tails if whole or tail]
    return sorted({tuple(x): x for x in lists}.values(), key=len)


def fitting(keywords: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Without the items that reach beyond so many tokens."""
    ends = [
        x.start + x.length
        if isinstance(x, Media)
        else x.positions[-1] + 1
        if isinstance(x, Embeddings)
        else 0
        for x in keywords["extras"]
    ]
    extras = [x for x, end in zip(keywords["extras"], ends, strict=True) if end <= num_tokens]
    return {**keywords, "extras": extras}
