"""Ending an answer at a text that may arrive in pieces."""

from __future__ import annotations

import copy
from collections.abc import Sequence


class StopStrings:
    """Lets text through until one of `stops` appears; never shows a part of a stop that completes later.

    The stop that is complete first wins, whatever the pieces: the result equals feeding single characters.

    Attributes
    ----------
    matched : str or None
        The stop that ended the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._kept = ""  # the longest end of the text so far that a stop begins with
        self.matched: str | None = None

    def put(self, text: str) -> str:
        """Take more text and return what may be shown; nothing once a stop has matched."""
        if self.matched is not None:
            return ""
        text = self._kept + text
        hits = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if hits:
            _, start, self.matched = min(hits)
            self._kept = ""
            return text[:start]
        split = len(text) - self._num_kept(text)
        self._kept = text[split:]
        return text[:split]

    def flush(self) -> str:
        """Return what was kept back: the text ends here, so no stop can complete."""
        kept, self._kept = self._kept, ""
        return kept

    def fork(self) -> StopStrings:
        """Return the same after the same text, to go on by itself."""
        return copy.copy(self)

    def _num_kept(self, text: str) -> int:
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
