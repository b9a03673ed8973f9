"""Decoding token by token."""

from __future__ import annotations

import copy
from collections.abc import Callable

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns tokens into text as they come; the pieces joined equal the whole decoded, if that is UTF-8.

    A token may hold part of a character, so text is kept back until its bytes are complete. And some
    decoders treat the first token of a text differently (they drop its leading space), so each piece is
    decoded together with the tokens before it and only the difference is new. Of a run of byte tokens that
    is no UTF-8, decoders with byte fallback replace all; what was complete before the fault has been shown.

    Parameters
    ----------
    decode : callable
        From a list of token ids to text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # _tokens = the piece that was shown last (the context) + what isn't shown yet
        self._tokens: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def put(self, token_id: int) -> str:
        """Take one token and return the text that is now certain, which may be empty."""
        self._tokens.append(token_id)
        text = self._decode(self._tokens)
        if text.endswith(REPLACEMENT) or len(text) <= len(self._context_text):
            return ""  # a character whose bytes are incomplete, or a token without text
        return self._show(text)

    def flush(self) -> str:
        """Return what was kept back; incomplete bytes become U+FFFD."""
        return self._show(self._decode(self._tokens))

    def fork(self) -> TextStream:
        """Return a decoder of the same tokens, to go on by itself."""
        forked = copy.copy(self)
        forked._tokens = self._tokens[:]
        return forked

    def _show(self, text: str) -> str:
        new = text[len(self._context_text) :]
        self._tokens = self._tokens[self._num_context :]
        self._num_context = len(self._tokens)
        self._context_text = self._decode(self._tokens)
        return new
