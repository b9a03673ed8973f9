"""Why a prompt was not found as a whole, in fields and in a sentence."""

from __future__ import annotations

from typing import NamedTuple

REASONS = ("hit", "short_tail", "window", "differs", "evicted", "generation", "other_salt", "unknown")
"""The values of `Explanation.reason`."""

_EVICTED_BY = {
    "capacity": "to make room",
    "request": "because a caller asked for it",
    "quota": "because its tenant was over quota",
    "reset": "by a reset",
}


class Explanation(NamedTuple):
    """What the index holds of a prompt and, at the first token that is missing, why; as `str`, a sentence.

    Attributes
    ----------
    num_cached_tokens : int
        Tokens of the prompt that are there: those of whole blocks and of a run inside the next one.
    num_block_tokens : int
        Those of whole blocks alone.
    reason : str
        ``"hit"``: all is there. ``"short_tail"``: all whole blocks are, and what is missing is shorter than a
        block. ``"window"``: the index knows more of it, but not the pages of a window in front of where that
        ends. ``"differs"``: a block stands there that begins alike. ``"evicted"``: the block was there.
        ``"generation"``: it was there before `bump_generation`. ``"other_salt"``: another salt, adapter or
        extra of one's own has it; said only with ``across_tenants=True``. ``"unknown"``: it never was there,
        or is gone for longer than the history reaches.
    position : int
        The first token that is not there.
    expected_token : int or None
        With "differs": the token that the cached block has at `position`; None when that is the same one, so
        that an item there differs, such as an image, or single tokens are not reused.
    evicted_at_s : float or None
        With "evicted": when, in seconds since the pool was made.
    evicted_by : str or None
        With "evicted": ``"capacity"``, ``"request"``, ``"quota"`` or ``"reset"``.
    """

    num_cached_tokens: int
    num_block_tokens: int
    reason: str
    position: int
    expected_token: int | None = None
    evicted_at_s: float | None = None
    evicted_by: str | None = None

    def __str__(self) -> str:
        count, position = self.num_cached_tokens, self.position
        found = f"{count or 'no'} token{'' if count == 1 else 's'} cached"
        block = f"{found}: the block of token {position}"
        match self.reason:
            case "hit":
                return f"{found}: the whole prompt."
            case "short_tail":
                return f"{found}: all whole blocks; what follows from token {position} on fills none."
            case "window":
                return f"{found}: more is known, but not the pages of a window in front of where it ends."
            case "differs":
                if self.expected_token is None:
                    return f"{block} differs from a cached one, later on or in its extras."
                there = f"a cached block, which has token id {self.expected_token} there"
                return f"{found}: at token {position} the prompt differs from {there}."
            case "evicted":
                assert self.evicted_by is not None, "it goes with the reason"
                when = f"{self.evicted_at_s:.3f} s after the pool was made"
                return f"{block} was evicted {_EVICTED_BY[self.evicted_by]}, {when}."
            case "generation":
                return f"{block} is of an older generation, and no longer valid."
            case "other_salt":
                return f"{block} is cached under another salt, adapter or extra."
            case _:
                return f"{block} was never cached, or evicted longer ago than the history reaches."
