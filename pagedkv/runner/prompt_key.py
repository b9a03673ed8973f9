"""A prompt in a form that is compared and sorted at the speed of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class PromptKey:
    """What decides which cached blocks a prompt can share.

    Attributes
    ----------
    token_ids : ndarray [num_tokens] uint32
        For calls of the pool, which take an array faster than a list.
    scope : (bytes, str)
        Salt and extras: prompts that differ here share nothing.
    ordered : bytes
        The tokens, big-endian: sorted by it, prompts stand in the depth-first order of the tree of their
        blocks, and those that begin alike stand together.
    """

    token_ids: npt.NDArray[np.uint32]
    scope: tuple[bytes, str]
    ordered: bytes

    @classmethod
    def of(cls, token_ids: Sequence[int], salt: str | bytes | None, extras: tuple[Any, ...]) -> PromptKey:
        """Make the key of a checked prompt."""
        tokens = np.asarray(token_ids, dtype=np.uint32)
        salt = b"" if salt is None else salt.encode() if isinstance(salt, str) else salt
        return cls(tokens, (salt, repr(extras) if extras else ""), tokens.astype(">u4").tobytes())

    def begins_like(self, other: PromptKey, num_tokens: int) -> bool:
        """Whether both have `num_tokens` tokens at least, the same ones."""
        end = 4 * num_tokens
        if self.scope != other.scope or end > min(len(self.ordered), len(other.ordered)):
            return False
        return other.ordered.startswith(memoryview(self.ordered)[:end])
