"""Why two texts differ at a place: times, ids, numbers, blanks, the order of keys, and what is left."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any, NamedTuple

CAUSES = {
    "timestamp": "put times at the end of the prompt, or round them to the day",
    "id": "put ids behind what all requests share, or leave them out",
    "number": "put counters and other numbers that change behind what all requests share",
    "JSON key order": "write JSON with sorted keys, always by the same code",
    "whitespace": "build the prompt by one template, so that blanks and line ends are the same",
    "letter case or Unicode form": "normalise the text before it goes into the prompt",
    "reordered text": "keep documents, tools and examples in one order",
    "dynamic text ahead of static": "put what changes from request to request behind what does not",
}
"""What loses reuse, and what to do about it."""

_MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_PATTERNS = {
    "timestamp": re.compile(
        r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}"
        r"(?:[T ,]+\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?)?(?: ?[AP]M)?(?:Z|[+-]\d\d:?\d\d)?"
        r"|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}(?:[ ,]+\d{1,2}:\d{2}(?::\d{2})?)?"
        rf"|(?:\w+day,? )?(?:\d{{1,2}}(?:st|[nr]d|th)? )?"
        rf"(?:{_MONTHS})[a-z]*\.? \d{{1,4}}(?:st|[nr]d|th)?(?:,? \d{{4}})?"
        r"(?:[T ,]+(?:at )?\d{1,2}:\d{2}(?::\d{2})?)?(?: ?[AP]M)?"
        r"|\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?: ?[AP]M)?|\b1[4-9]\d{8}(?:\d{3}|\.\d+)?\b"
    ),
    "id": re.compile(
        r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
        r"|\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{8,}\b"
        r"|\b[A-Za-z]{1,12}[_-](?=\w*\d)[A-Za-z0-9]{4,}\b|\b(?=\w*\d)(?=\w*[A-Za-z])\w{10,}\b|\b\d{6,}\b"
    ),
    "number": re.compile(r"\d+(?:[.,]\d+)*"),
}
_BRACE = re.compile(r"[{\[]")
_MOST_BRACES = 24


class Span(NamedTuple):
    """A text and the part [begin, end) of it that differs."""

    text: str
    begin: int
    end: int

    @property
    def part(self) -> str:
        """What differs."""
        return self.text[self.begin : self.end]


class Difference(NamedTuple):
    """Why texts differ, what they have there, and where in the new text what is to be changed begins.

    `old` and `new` are widened to a whole time, id or number; `place` is the begin of `new` or of the JSON.
    """

    cause: str
    old: Span
    new: Span
    place: int


def find_cause(old: Span, new: Span, *, is_moved: bool) -> Difference:
    """Say why two texts differ.

    Parameters
    ----------
    old, new : Span
    is_moved : bool
        What is new here stands elsewhere in the old text.
    """
    if "".join(old.part.split()) == "".join(new.part.split()):
        return Difference("whitespace", old, new, new.begin)
    begin = _other_key_order(old, new)
    if begin is not None:
        return Difference("JSON key order", old, new, begin)
    for cause, pattern in _PATTERNS.items():
        wide_old, wide_new = _widen(old, pattern), _widen(new, pattern)
        if wide_old is not None and wide_new is not None:
            return Difference(cause, wide_old, wide_new, wide_new.begin)
    if _folded(old.part) == _folded(new.part):
        cause = "letter case or Unicode form"
    else:
        cause = "reordered text" if is_moved else "dynamic text ahead of static"
    return Difference(cause, old, new, new.begin)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _widen(span: Span, pattern: re.Pattern[str]) -> Span | None:
    """Return the pattern's match that covers the part, but for blanks and marks; None if there is none."""
    low = max(0, span.begin - 60)
    for match in pattern.finditer(span.text, low, span.end + 60):
        begin, end = match.span()
        touches = begin <= span.begin < end or span.begin <= begin < span.end
        rest = span.text[span.begin : begin] + span.text[end : span.end]
        if touches and not any(letter.isalnum() for letter in rest):
            return Span(span.text, min(begin, span.begin), max(end, span.end))
    return None


def _other_key_order(old: Span, new: Span) -> int | None:
    """Return where the JSON value begins whose keys come in another order; None if it is not that."""
    a, _ = _enclosing_value(old)
    b, begin = _enclosing_value(new)
    return begin if _key_order_differs(a, b) else None


def _key_order_differs(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        if set(a) != set(b):
            return False
        return list(a) != list(b) or any(_key_order_differs(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return any(map(_key_order_differs, a, b))
    return False


def _enclosing_value(span: Span) -> tuple[Any, int]:
    """Return the outermost JSON value around the part, as far as it is looked for, and its begin."""
    text, decoder = span.text, json.JSONDecoder()
    found: tuple[Any, int] = (None, 0)
    line = text.rfind("\n", 0, span.begin) + 1
    starts = [match.start() for match in _BRACE.finditer(text, line, span.begin + 1)][:1]
    at = span.begin + 1
    while len(starts) < _MOST_BRACES and (at := max(text.rfind("{", 0, at), text.rfind("[", 0, at))) >= 0:
        starts.append(at)
    # Compact JSON begins on the line, and then with its first brace; else the nearest braces tell.
    for number, start in enumerate(starts):
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if end > span.begin:
            found = (value, start)
            if number == 0:
                break
    return found
