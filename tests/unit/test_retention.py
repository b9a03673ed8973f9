"""What a request asks to be kept, as ranges of blocks; and one message for each thing that can be wrong."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.errors import UsageError
from pagedkv.retention import (
    NO_END,
    Breakpoint,
    Retention,
    encode_retention,
    first_unpublished,
    retained_blocks,
)


def test_nothing_asked_is_nothing_to_do() -> None:
    assert encode_retention(100, 16) == []
    assert encode_retention(100, 16, None, None) == []
    assert encode_retention(100, 16, [], iter(())) == []
    assert first_unpublished(None) is first_unpublished([]) is None


def test_a_retention_covers_every_block_that_holds_one_of_its_tokens() -> None:
    assert retained_blocks(Retention(15, 17), 16) == (0, 2, 70, 0.0, False)
    assert retained_blocks(Retention(16, 32, 10, 2.5), 16) == (1, 2, 10, 2.5, False)
    assert retained_blocks(Retention(31, 32, 0), 16) == (1, 2, 0, 0.0, False)


def test_by_default_all_is_retained_for_good() -> None:
    assert retained_blocks(Retention(), 16) == (0, NO_END, 70, 0.0, False)


def test_breakpoints_cover_whole_blocks_only_and_are_refreshed() -> None:
    points = [Breakpoint(15, 3600), Breakpoint(33, 300.5)]
    assert encode_retention(33, 16, (), points) == [(0, 0, 70, 3600.0, True), (0, 2, 70, 300.5, True)]


def test_retentions_come_first_each_kind_in_its_order() -> None:
    rows = encode_retention(64, 16, [Retention(0, 1), Retention(0, 1, 9)], [Breakpoint(64, 1)])
    assert [(row[2], row[4]) for row in rows] == [(70, False), (9, False), (70, True)]


def test_a_retention_may_reach_beyond_the_prompt() -> None:
    assert encode_retention(10, 16, [Retention(100, 200)]) == [(6, 13, 70, 0.0, False)]


def test_numbers_of_any_kind_become_plain_ones() -> None:
    odd: Any = Retention(np.int64(1), np.int32(2), np.uint8(3), np.float32(0.5))
    row = retained_blocks(odd, 16)
    assert row == (0, 1, 3, 0.5, False)
    assert [type(each) for each in row] == [int, int, int, float, bool]
    fraction: Any = Breakpoint(np.int32(1), Fraction(1, 2))
    assert type(encode_retention(1, 1, (), [fraction])[0][3]) is float


@given(st.integers(0, 10**6), st.integers(1, 10**5), st.integers(1, 600))
def test_a_block_is_covered_exactly_when_a_token_of_it_is(start: int, length: int, block_size: int) -> None:
    first, end, *_ = retained_blocks(Retention(start, start + length), block_size)
    assert first * block_size <= start < (first + 1) * block_size
    assert (end - 1) * block_size < start + length <= end * block_size


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 1000)), max_size=6))
def test_publication_ends_at_the_first_of_all_ranges(pairs: list[tuple[int, int]]) -> None:
    ranges = [(start, start + length) for start, length in pairs]
    assert first_unpublished(ranges) == min((start for start, _ in ranges), default=None)


NO_INT: Any = "5"
RETENTION_ERRORS: list[tuple[Any, str]] = [
    ([(0, 16)], "retention[0]: expected a Retention, got (0, 16) (tuple)"),
    (Retention(), "retention: expected a sequence of Retention, got one: Retention("),
    (0, "retention: expected a sequence, got 0 (int)"),
    (7, "retention: expected a sequence, got 7 (int)"),
    ([Retention(-1)], "retention[0].start: expected an integer from 0 to 4611686018427387904, got -1"),
    ([Retention(), Retention(NO_INT)], "retention[1].start: expected an integer, got '5' (str)"),
    ([Retention(8, 8)], "retention[0].end: expected more than the start, 8, got 8"),
    ([Retention(8, -1)], "retention[0].end: expected an integer from 0 to"),
    ([Retention(priority=101)], "retention[0].priority: expected an integer from 0 to 100, got 101"),
    ([Retention(priority=-1)], "retention[0].priority: expected an integer from 0 to 100, got -1"),
    ([Retention(priority=True)], "retention[0].priority: expected an integer, got True (bool)"),
    ([Retention(priority=None)], "retention[0].priority: expected an integer, got None"),  # type: ignore[arg-type]
    ([Retention(ttl_s=0)], "retention[0].ttl_s: expected at least 1e-09 seconds, got 0"),
    ([Retention(ttl_s=-2.5)], "retention[0].ttl_s: expected a finite number of at least 0, got -2.5"),
    ([Retention(ttl_s=float("nan"))], "retention[0].ttl_s: expected a finite number of at least 0, got nan"),
    ([Retention(ttl_s=float("inf"))], "retention[0].ttl_s: expected a finite number of at least 0, got inf"),
    ([Retention(ttl_s=10**400)], "retention[0].ttl_s: expected a finite number of at least 0, got inf"),
    ([Retention(ttl_s="5m")], "retention[0].ttl_s: expected a number, got '5m' (str)"),  # type: ignore[arg-type]
    ([Retention(ttl_s=True)], "retention[0].ttl_s: expected a number, got True (bool)"),
]


@pytest.mark.parametrize(("retention", "message"), RETENTION_ERRORS)
def test_a_bad_retention_is_named_by_index_and_field(retention: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        encode_retention(64, 16, retention)
    assert str(error.value).startswith(message)


BREAKPOINT_ERRORS: list[tuple[Any, str]] = [
    ([Breakpoint(i + 1, 1) for i in range(5)], "breakpoints: expected at most 4, got 5"),
    ([(16, 300)], "breakpoints[0]: expected a Breakpoint, got (16, 300) (tuple)"),
    ([Breakpoint(0, 300)], "breakpoints[0].position: expected an integer from 1 to 64, got 0"),
    ([Breakpoint(65, 300)], "breakpoints[0].position: expected an integer from 1 to 64, got 65"),
    (
        [Breakpoint(32, 300), Breakpoint(32, 300)],
        "breakpoints[1].position: expected more than that of the one before, 32, got 32",
    ),
    (
        [Breakpoint(16, 300), Breakpoint(32, 3600)],
        "breakpoints[1].ttl_s: expected at most that of the one before, 300, got 3600",
    ),
    ([Breakpoint(16, 0)], "breakpoints[0].ttl_s: expected at least 1e-09 seconds, got 0"),
    ([Breakpoint(16, None)], "breakpoints[0].ttl_s: expected a number, got None"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("breakpoints", "message"), BREAKPOINT_ERRORS)
def test_a_bad_breakpoint_is_named_by_index_and_field(breakpoints: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        encode_retention(64, 16, (), breakpoints)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (5, "no_cache: expected a sequence, got 5 (int)"),
        ([5], "no_cache[0]: expected a pair of start and end, got 5 (int)"),
        ([(1, 2), (3,)], "no_cache[1]: expected a pair of start and end, got (3,) (tuple)"),
        ([(-1, 2)], "no_cache[0]: start: expected an integer from 0"),
        ([(1, None)], "no_cache[0]: end: expected an integer, got None"),
        ([(4, 4)], "no_cache[0]: expected an end behind the start, 4, got 4"),
    ],
)
def test_a_bad_range_is_named_by_index(ranges: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        first_unpublished(ranges)
    assert str(error.value).startswith(message)
