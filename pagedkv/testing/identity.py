"""The nouns of the oracle in `pagedkv.testing.model`: pages, requests, and what decides the KV of a page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pagedkv.extras import Adapter, Embeddings, Extra, Media

Identity = tuple[Any, ...]  # (scope, (token, items that begin here), (token, ...), ...); () for none


@dataclass(eq=False)
class ModelPage:
    """A page in use: WRITABLE until it has an identity, then COMMITTED while held, then EVICTABLE."""

    identity: Identity = ()
    holders: list[object] = field(default_factory=list)  # one entry a reference


class Match(NamedTuple):
    """Pages of the whole blocks found; source and length of the run inside the next block."""

    pages: list[ModelPage]
    source: ModelPage | None
    num_partial_tokens: int


class ModelSequence:
    """One request; ``pages[i]`` holds tokens [i * block_size, (i + 1) * block_size)."""

    def __init__(self, block_size: int, token_ids: Iterable[int], cache_salt: Any, extras: Any) -> None:
        self.block_size, self.tokens = block_size, list(token_ids)
        self.pages: list[ModelPage] = []
        self.num_cached_tokens = self.num_computed_tokens = 0
        self.num_written_tokens = 0  # KV that stands in the pages: computed, + 1 after an aligned full hit
        self.num_nameable_tokens = 2**63  # an item that was cut leaves KV behind that nothing can name
        self.is_preempted = self.is_closed = False
        self.step: ModelStep | None = None
        self.scope: list[tuple[Any, ...]] = [] if cache_salt is None else [(1, _as_bytes(cache_salt))]
        self.items: dict[int, list[tuple[Any, ...]]] = {}  # at the first token they touch of each block
        for x in extras or ():
            if isinstance(x, Media):
                for first in range(x.start // block_size * block_size, x.start + x.length, block_size):
                    self.items.setdefault(max(first, x.start), []).append((3, x.start - first, x.digest))
            elif isinstance(x, Embeddings):
                for first in {p // block_size * block_size for p in x.positions}:
                    at = tuple(p - first for p in x.positions if first <= p < first + block_size)
                    self.items.setdefault(first + at[0], []).append((4, at, x.digest))
            elif isinstance(x, Adapter):
                self.scope.append((2, _as_bytes(x.id), x.revision))
            elif isinstance(x, Extra):
                self.scope.append((x.tag, x.payload))

    def identity(self, num_tokens: int) -> Identity:
        """All that decides the KV of the leading tokens."""
        leading = enumerate(self.tokens[:num_tokens])
        return (tuple(sorted(self.scope)), *((t, tuple(sorted(self.items.get(i, ())))) for i, t in leading))

    @property
    def is_in_step(self) -> bool:
        """Reserved in a step that is neither committed nor abandoned."""
        return self.step is not None and self.step.is_open

    @property
    def is_idle(self) -> bool:
        """Neither closed nor in a step."""
        return not self.is_closed and not self.is_in_step

    @property
    def num_committed_tokens(self) -> int:
        """Tokens in published blocks."""
        whole = self.pages[: self.num_written_tokens // self.block_size]
        return self.block_size * sum(page.identity != () for page in whole)

    def cut_items(self, num_tokens: int) -> None:
        """Forget the items from ``num_tokens`` on; a cut through a block with others ends what has a name."""
        first = num_tokens // self.block_size * self.block_size
        if first <= self.num_nameable_tokens:
            is_cut = any(first <= i < num_tokens for i in self.items)
            self.num_nameable_tokens = first if is_cut else 2**63
        self.items = {i: items for i, items in self.items.items() if i < num_tokens}

    def pages_to_write(self, end: int) -> tuple[bool, int]:
        """To fill [0, end): must a copy replace the last page (published, but partly ours); pages to add."""
        ends_inside = self.num_written_tokens % self.block_size > 0
        return ends_inside and self.pages[-1].identity != (), -(-end // self.block_size) - len(self.pages)


@dataclass(eq=False)
class ModelStep:
    """What a step computes, and what `abandon` needs to go back."""

    sequences: list[ModelSequence]
    num_new_tokens: list[int]
    pages_before: list[list[ModelPage]]  # of each sequence
    preempted: list[bool]  # whether it was, before
    # source, destination, leading tokens
    copies: list[tuple[ModelPage, ModelPage, int]] = field(default_factory=list)
    is_open: bool = True


Found = tuple[list[list[ModelPage]], list[ModelPage], int]


def find(published: list[ModelPage], seq: ModelSequence) -> Found:
    """Pages of each whole block that matches; pages that hold the longest run behind them; its length."""
    blocks: list[list[ModelPage]] = []
    for end in range(seq.block_size, min(len(seq.tokens), seq.num_nameable_tokens) + 1, seq.block_size):
        if not (same := [page for page in published if page.identity == seq.identity(end)]):
            break
        blocks.append(same)
    start, ours = len(blocks) * seq.block_size, seq.identity(len(seq.tokens))
    deeper = [page for page in published if len(page.identity) == 1 + start + seq.block_size]
    runs = [_common_run(ours, page.identity, start) for page in deeper]
    longest = max(runs, default=0)
    return blocks, [page for page, run in zip(deeper, runs, strict=True) if run == longest > 0], longest


def _common_run(ours: Identity, theirs: Identity, start: int) -> int:
    """Equal tokens from ``start`` to where an item of either begins; 0 unless all before is equal."""
    run = 0
    if ours[: 1 + start] == theirs[: 1 + start]:
        for mine, other in zip(ours[1 + start :], theirs[1 + start :], strict=False):
            if mine != other or mine[1]:
                break
            run += 1
    return run


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
