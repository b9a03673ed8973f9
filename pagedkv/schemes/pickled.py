"""The bytes that CPython's pickle writes at protocol 5, for the few types that a digest is made of.

Written here, not asked of `pickle`: a digest must not change with the Python version, and pickle's output
also depends on which equal strings happen to be one object. Here a `Constant` is one object wherever it
stands, all other strings are objects of their own. Nothing is ever unpickled.
"""

from __future__ import annotations

import struct
from typing import TypeAlias, Union

from pagedkv.errors import UsageError

PickledValue: TypeAlias = Union[int, bytes, str, "tuple[PickledValue, ...]", None]

# Opcodes, by pickletools' names.
PROTO_5, FRAME, STOP, NONE, MARK, MEMOIZE = b"\x80\x05", b"\x95", b".", b"N", b"(", b"\x94"
BININT1, BININT2, BININT, LONG1 = b"K", b"M", b"J", b"\x8a"
SHORT_BINBYTES, SHORT_BINUNICODE, BINUNICODE, BINGET, LONG_BINGET = b"C", b"\x8c", b"X", b"h", b"j"
TUPLES = [b")", b"\x85", b"\x86", b"\x87"]  # by length
TUPLE = b"t"

# From this size on pickle begins another frame.
FRAME_SIZE_BYTES = 64 * 1024


class Constant(str):
    """A string that is the same object each time: it is written once and then referred to."""

    __slots__ = ()


def dumps(value: PickledValue) -> bytes:
    """Pickle `value`.

    Raises
    ------
    UsageError
        It would take more than one frame.
    """
    writer = _Writer()
    writer.save(value)
    body = b"".join(writer.parts) + STOP
    if len(body) >= FRAME_SIZE_BYTES:
        raise UsageError(f"block: expected under {FRAME_SIZE_BYTES} bytes when pickled, got {len(body)}")
    return PROTO_5 + FRAME + struct.pack("<Q", len(body)) + body


class _Writer:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._memo_size = 0
        self._places: dict[str, int] = {}  # of the constants written, in the memo

    def save(self, value: PickledValue) -> None:
        if value is None:
            self.parts.append(NONE)
        elif isinstance(value, int):
            self.parts.append(_pickle_int(value))
        elif isinstance(value, bytes):
            self.parts += [SHORT_BINBYTES, bytes([len(value)]), value]
            self._memoize()
        elif isinstance(value, str):
            self._save_text(value)
        else:
            opcode = TUPLES[len(value)] if len(value) <= 3 else TUPLE
            if opcode == TUPLE:
                self.parts.append(MARK)
            for element in value:
                if type(element) is int:  # nearly all are tokens
                    self.parts.append(_pickle_int(element))
                else:
                    self.save(element)
            self.parts.append(opcode)
            if value:
                self._memoize()

    def _save_text(self, text: str) -> None:
        is_constant = isinstance(text, Constant)
        if is_constant and text in self._places:
            place = self._places[text]
            short = place < 256
            self.parts.append(BINGET + bytes([place]) if short else LONG_BINGET + struct.pack("<I", place))
            return
        if is_constant:
            self._places[text] = self._memo_size
        utf8 = text.encode()
        short = len(utf8) < 256
        head = SHORT_BINUNICODE + bytes([len(utf8)]) if short else BINUNICODE + struct.pack("<I", len(utf8))
        self.parts += [head, utf8]
        self._memoize()

    def _memoize(self) -> None:
        self.parts.append(MEMOIZE)
        self._memo_size += 1


def _pickle_int(number: int) -> bytes:
    if 0 <= number < 1 << 8:
        return BININT1 + bytes([number])
    if 0 <= number < 1 << 16:
        return BININT2 + struct.pack("<H", number)
    if -(1 << 31) <= number < 1 << 31:
        return BININT + struct.pack("<i", number)
    size = number.bit_length() // 8 + 1  # with room for the sign
    return LONG1 + bytes([size]) + number.to_bytes(size, "little", signed=True)
