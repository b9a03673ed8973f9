"""Canonical CBOR (RFC 8949, section 4.2.1) of the few types that a digest is made of."""

from __future__ import annotations

from typing import TypeAlias, Union

# A union in quotes: the type is recursive.
CBORValue: TypeAlias = Union[int, bytes, str, "tuple[CBORValue, ...]", None]

UNSIGNED, NEGATIVE, BYTES, TEXT, ARRAY = range(5)


def dumps(value: CBORValue) -> bytes:
    """Encode `value`; equal values give equal bytes."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(UNSIGNED, value) if value >= 0 else _head(NEGATIVE, -1 - value)
    if isinstance(value, bytes):
        return _head(BYTES, len(value)) + value
    if isinstance(value, str):
        utf8 = value.encode()
        return _head(TEXT, len(utf8)) + utf8
    return _head(ARRAY, len(value)) + b"".join(map(dumps, value))


def _head(major_type: int, number: int) -> bytes:
    """Write a major type and its number in the shortest of the five forms."""
    if number < 24:
        return bytes([major_type << 5 | number])
    size_log2 = next(n for n in range(4) if number < 1 << (8 << n))
    return bytes([major_type << 5 | 24 + size_log2]) + number.to_bytes(1 << size_log2, "big")
