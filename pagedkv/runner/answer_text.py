"""An answer's text as its tokens come, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.runner.detokenizer import TextStream
from pagedkv.runner.stop_strings import StopStrings


class AnswerText:
    """Takes tokens and gives the text that is certain.

    Parameters
    ----------
    stream : TextStream or None
        None without a tokenizer: there is no text then.
    stops : sequence of str
    """

    def __init__(self, stream: TextStream | None, stops: Sequence[str]) -> None:
        self._stream = stream
        self._stops = StopStrings(stops)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that the text ends before; None while there is none."""
        return self._stops.matched

    def put(self, token_id: int) -> str:
        """Take a token and return the text that may now be shown, which may be empty."""
        return self._stops.put("" if self._stream is None else self._stream.put(token_id))

    def flush(self) -> str:
        """Return the text that was kept back for what might have followed."""
        rest = "" if self._stream is None else self._stream.flush()
        return self._stops.put(rest) + self._stops.flush()

    def fork(self) -> AnswerText:
        """Return the text so far, to go on by itself."""
        forked = AnswerText(None if self._stream is None else self._stream.fork(), ())
        forked._stops = self._stops.fork()
        return forked
