"""A trace: requests in the order of their arrival, each with the tokens of its prompt."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.errors import UsageError

Tokens = npt.NDArray[np.uint32]


class Request(NamedTuple):
    """One request of a trace.

    Attributes
    ----------
    time_s : float
        Its arrival, in seconds from the trace's own zero.
    num_tokens : int
        Tokens of the prompt.
    num_output_tokens : int
        Tokens of the answer; 0 where the trace does not tell.
    cache_salt : str or None
        Who may share with it.
    content : ndarray uint32
        The token ids; or, for a trace that names blocks, the first token of each block, [num_blocks].
    tokens_per_id : int
        Tokens that an element of `content` stands for: 1 for token ids.
    """

    time_s: float
    num_tokens: int
    num_output_tokens: int
    cache_salt: str | None
    content: Tokens
    tokens_per_id: int

    def num_replayed_tokens(self, block_size: int) -> int:
        """Return the tokens that a replay computes: a last block that has a name counts as whole.

        Its name says all that it holds, and in an engine the answer fills it up: it takes a page, and can be
        hit. Of token ids that follow nothing is known, so there it stays partial, and is never hit.
        """
        if self.tokens_per_id == 1:
            return self.num_tokens
        whole = -(-self.num_tokens // block_size) * block_size
        return min(whole, len(self.content) * self.tokens_per_id)

    def replayed_tokens(self, block_size: int) -> Tokens:
        """Return these tokens, uint32; a named block stands for tokens that no other has."""
        if self.tokens_per_id == 1:
            return self.content
        run = np.arange(self.tokens_per_id, dtype=np.uint32)
        return (self.content[:, None] + run).reshape(-1)[: self.num_replayed_tokens(block_size)]


class BlockNames:
    """Gives each named block of a trace its own tokens: equal names get equal tokens, others share none.

    They are taken from 2³² downwards, far from the ids of any vocabulary, so that a trace may mix both.
    """

    def __init__(self) -> None:
        self._first_token: dict[Hashable, int] = {}
        self._end = 2**32

    def first_tokens(self, names: Iterable[Hashable], tokens_per_id: int) -> Tokens:
        """Return the first token of each block.

        Raises
        ------
        UsageError
            There are more blocks than 2³² tokens can tell apart.
        """
        known = self._first_token
        return np.fromiter(
            (known[name] if name in known else self._add(name, tokens_per_id) for name in names), np.uint32
        )

    def fresh(self, tokens_per_id: int) -> int:
        """Return the first token of a block that nothing else names."""
        if self._end < tokens_per_id:
            raise UsageError(f"trace: expected blocks of 2**32 tokens in all, got {len(self._first_token)}")
        self._end -= tokens_per_id
        return self._end

    def _add(self, name: Hashable, tokens_per_id: int) -> int:
        self._first_token[name] = first = self.fresh(tokens_per_id)
        return first


class Problem(NamedTuple):
    """A part of a file that was left out: where it stands, and why."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.why}, in {self.where}"


@dataclass(frozen=True)
class Trace:
    """Requests by their arrival, and what of their files was left out.

    Attributes
    ----------
    name : str
        The files, or the workload.
    requests : list of Request
        By `time_s`; equal times in the order of the files.
    problems : list of Problem
    """

    name: str
    requests: list[Request]
    problems: list[Problem] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def natural_block_size(self) -> int:
        """Tokens of a named block where all requests agree; else 16."""
        sizes = {request.tokens_per_id for request in self.requests}
        size = sizes.pop() if len(sizes) == 1 else 1
        return size if size > 1 else 16

    def num_blocks(self, block_size: int) -> int:
        """Blocks of all prompts, the partial last ones included."""
        return sum(-(-request.num_tokens // block_size) for request in self.requests)


def make_trace(name: str, requests: Iterable[Request], problems: Iterable[Any] = ()) -> Trace:
    """Return the trace of requests that come in any order."""
    return Trace(name, sorted(requests, key=lambda request: request.time_s), list(problems))
