"""Checks of a caller's arguments; every failure is a UsageError in the one grammar."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from math import inf, isfinite
from numbers import Real
from operator import index
from typing import Any, cast

import numpy as np

from pagedkv.errors import UsageError


def check_bytes(what: str, value: Any, shortest: int, longest: int, *, text: bool = False) -> bytes:
    """`value` as bytes, `shortest` to `longest` of them; with `text` a str counts as its UTF-8 bytes."""
    if text and isinstance(value, str):
        try:
            value = value.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{what}: expected text that UTF-8 can express, got {show(value)}") from None
    if not isinstance(value, bytes):
        raise UsageError(f"{what}: expected {'str or bytes' if text else 'bytes'}, got {show(value)}")
    if not shortest <= len(value) <= longest:
        length = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
        raise UsageError(f"{what}: expected {length} bytes, got {len(value)}")
    return value


def check_int(what: str, value: Any, low: int, high: int, where: str = "") -> int:
    """`value` as int, between `low` and `high`; `where` ends the message. A bool is no integer."""
    try:
        if isinstance(value, bool):  # numpy's has no __index__
            raise TypeError
        number = index(value)
    except TypeError:
        raise UsageError(f"{what}: expected an integer, got {show(value)}{where}") from None
    if not low <= number <= high:
        got = number if number.bit_length() <= 128 else f"one of {number.bit_length()} bits"
        raise UsageError(f"{what}: expected an integer from {low} to {high}, got {got}{where}")
    return number


def check_number(what: str, value: Any) -> float:
    """`value` as a float, finite and at least 0. A bool is no number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{what}: expected a number, got {show(value)}")
    try:
        number = float(value)
    except OverflowError:  # an integer of a thousand bits
        number = inf
    if not (isfinite(number) and number >= 0):
        raise UsageError(f"{what}: expected a finite number of at least 0, got {number:g}")
    return number


def check_bool(what: str, value: Any) -> bool:
    """`value` as bool; nothing else is taken for one, since "no" would count as True."""
    if not isinstance(value, bool | np.bool_):
        raise UsageError(f"{what}: expected True or False, got {show(value)}")
    return bool(value)


def check_iterable(what: str, value: Any) -> Iterable[Any]:
    """`value`, which may be iterated over; not text, bytes or a mapping, whose elements nobody means."""
    if not isinstance(value, str | bytes | bytearray | Mapping):
        try:
            iter(value)
        except TypeError:  # also of what only looks iterable, as an array without dimensions does
            pass
        else:
            return cast("Iterable[Any]", value)
    raise UsageError(f"{what}: expected a sequence, got {show(value)}")


def check_ordered(what: str, value: Any) -> Iterable[Any]:
    """`value`, which may be iterated over in an order that means something."""
    if isinstance(value, Set):
        raise UsageError(f"{what}: expected a sequence in order, got {show(value)}")
    return check_iterable(what, value)


def one_for_each(what: str, values: Any, num_prompts: int) -> list[Any]:
    """`values` as a list of one for each prompt; None stands for none at all."""
    if values is None:
        return [None] * num_prompts
    listed = list(check_ordered(what, values))
    if len(listed) != num_prompts:
        raise UsageError(f"{what}: expected one for each of {num_prompts} prompts, got {len(listed)}")
    return listed


def show(value: Any) -> str:
    """`value` and its type, short enough for a message."""
    shown = repr(value)
    return f"{shown if len(shown) <= 40 else shown[:37] + '...'} ({type(value).__name__})"
