"""Drafts for speculative decoding by prompt look-up: what followed the last words the last time."""

from __future__ import annotations

from collections.abc import Sequence

NGRAM_SIZES = (3, 2)  # the longest first; after a single token too much else may follow


class PromptLookup:
    """Finds the latest earlier place where a text had its present last tokens, and how it went on there.

    Keeps an index that grows with the text, so that a look-up costs the same however long that is.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        # Where each n-gram ended last, and where before: the last one is the text's own end.
        self._ends: dict[tuple[int, ...], tuple[int, int | None]] = {}

    def draft(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return up to `num_tokens` tokens that may follow `token_ids`, which begin as at the last call."""
        for token_id in token_ids[len(self._tokens) :]:
            self._tokens.append(token_id)
            end = len(self._tokens)
            for size in NGRAM_SIZES:
                if end >= size:
                    ngram = tuple(self._tokens[-size:])
                    last = self._ends.get(ngram)
                    self._ends[ngram] = (end, None if last is None else last[0])
        for size in NGRAM_SIZES:
            _, before = self._ends.get(tuple(self._tokens[-size:]), (0, None))
            if before is not None:
                followed = self._tokens[before:]  # to the end; a text that repeats itself goes on repeating
                return [followed[i % len(followed)] for i in range(num_tokens)]
        return []
