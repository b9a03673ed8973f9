"""The entries of a trace file: JSON objects, and where each stands."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pagedkv.errors import UsageError
from pagedkv.policy.trace import Problem

GZIP_MAGIC = b"\x1f\x8b"


class Entry(NamedTuple):
    """A JSON object of a file; `where` names the file and the line, or the element of its list."""

    where: str
    value: dict[str, Any]


def read_entries(path: Path) -> Iterator[Entry | Problem]:
    """Yield what a file holds: an object a line, or one JSON list, or one object; what gzip made is unpacked.

    A text stands for an object with that ``prompt``.

    Raises
    ------
    UsageError
        The file can't be read.
    """
    try:
        data = path.read_bytes()
        if data.startswith(GZIP_MAGIC):
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: expected a readable file, got {error}") from error
    whole = _as_one(data)
    if whole is None:
        yield from _by_lines(path, data)
    elif isinstance(whole, list):
        for number, value in enumerate(whole, 1):
            yield _check(f"{path}, element {number}", value)
    else:
        yield Entry(str(path), whole)


def _as_one(data: bytes) -> list[Any] | dict[str, Any] | None:
    """Return the file's one value, when it is not one of several lines."""
    first, _, rest = data.strip().partition(b"\n")
    if not first.startswith((b"[", b"{")):
        return None
    try:
        json.loads(first)
        if rest:  # the first line is complete, and more follow
            return None
    except (ValueError, RecursionError):
        pass
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list | dict) else None


def _by_lines(path: Path, data: bytes) -> Iterator[Entry | Problem]:
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield Problem(where, f"expected a JSON object, got {error}")
        else:
            yield _check(where, value)


def _check(where: str, value: Any) -> Entry | Problem:
    if isinstance(value, dict):
        return Entry(where, value)
    if isinstance(value, str):
        return Entry(where, {"prompt": value})
    return Problem(where, f"expected a JSON object, got {type(value).__name__}")
