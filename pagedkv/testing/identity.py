"""The nouns of the oracle in `pagedkv.testing.model`: pages, requests, and what decides the KV of a page."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pagedkv.extras import Adapter, Embeddings, Extra, Media
from pagedkv.testing.claims import Wishes
from pagedkv.usage import Usage

# (generation, (token, request-wide entries that enter here, items that begin here), (token, ...), ...)
Identity = tuple[Any, ...]
NAMELESS: Identity = ()


@dataclass(eq=False)
class ModelPage:
    """A page in use: WRITABLE until it has an identity, then COMMITTED while held, then EVICTABLE."""

    group: int = 0
    identity: Identity = NAMELESS
    holders: list[object] = field(default_factory=list)  # one entry a reference
    last_push: int = 0  # ticks of the pool's: when it became the last to go among those of its priority,
    last_use: int = 0  # and when it was released or touched,
    used_at: float = 0.0  # in seconds
    published_at: float = 0.0
    goes_first: bool = False  # its block did when it was pushed


Table = list[ModelPage | None]  # of one group, by block; None in front of a window


class Match(NamedTuple):
    """Whole blocks found; of each group their pages, and the source of the run inside the next block."""

    blocks: list[Identity]
    tables: list[Table]
    sources: list[ModelPage]
    num_partial_tokens: int


class ModelSequence:
    """One request; ``tables[g][i]`` holds tokens [i * block_size, (i + 1) * block_size) for group g."""

    def __init__(
        self,
        block_size: int,
        token_ids: Iterable[int],
        cache_salt: str | bytes | None = None,
        salt_from: int | None = None,
        extras: Iterable[Any] | None = (),
    ) -> None:
        self.block_size, self.tokens = block_size, list(token_ids)
        self.generation = 0
        self.wishes = Wishes(block_size)
        self.tables: list[Table] = [[]]
        self.num_cached_tokens = self.num_computed_tokens = 0
        self.num_prompt_tokens = len(self.tokens)
        self.num_publishable_tokens = 0  # of the prompt, when it was opened
        self.quota_end = 2**62  # where a quota ended the latest publication
        self.is_query = True  # the prompt was looked up
        self.num_hit_tokens = 0  # of the prompt, found by `open` and of use
        self.was_last_found = False  # the prompt's last token was found, and is computed all the same
        self.is_hit_certain = False
        self.num_written_tokens = 0  # KV that stands in the pages: computed, + 1 after an aligned full hit
        self.num_committed_tokens = 0  # in blocks that it found published, or published
        self.num_nameable_tokens = 2**63  # an item that was cut leaves KV behind that nothing can name
        self.publish_end = 2**63  # no block that holds this position or a later one is published
        self.is_preempted = self.is_closed = False
        self.is_last_turn = False  # what it alone has used goes first, once it is closed
        self.step: ModelStep | None = None
        self.scope: dict[int, list[tuple[Any, ...]]] = {}  # at the first token of the block they enter
        self.items: dict[int, list[tuple[Any, ...]]] = {}  # at the first token they touch of each block
        self.salt = None if cache_salt is None else _as_bytes(cache_salt)
        if self.salt is not None:
            self.scope[(salt_from or 0) // block_size * block_size] = [(1, self.salt)]
        for x in extras or ():
            if isinstance(x, Media):
                for first in range(x.start // block_size * block_size, x.start + x.length, block_size):
                    self.items.setdefault(max(first, x.start), []).append((3, x.start - first, x.digest))
            elif isinstance(x, Embeddings):
                for first in {p // block_size * block_size for p in x.positions}:
                    at = tuple(p - first for p in x.positions if first <= p < first + block_size)
                    self.items.setdefault(first + at[0], []).append((4, at, x.digest))
            elif isinstance(x, Adapter):
                self.scope.setdefault(0, []).append((2, _as_bytes(x.id), x.revision))
            elif isinstance(x, Extra):
                self.scope.setdefault(0, []).append((x.tag, x.payload))

    def identity(self, num_tokens: int) -> Identity:
        """All that decides the KV of the leading tokens."""

        def at(entries: dict[int, list[tuple[Any, ...]]], position: int) -> tuple[Any, ...]:
            return tuple(sorted(entries.get(position, [])))

        leading = enumerate(self.tokens[:num_tokens])
        return (self.generation, *((token, at(self.scope, i), at(self.items, i)) for i, token in leading))

    def fork(self) -> ModelSequence:
        """Make another with the same tokens and pages."""
        child = copy.copy(self)
        child.is_hit_certain = True
        for name, value in vars(self).items():
            if isinstance(value, list | dict):
                setattr(child, name, value.copy())
        child.tables = [table[:] for table in self.tables]
        for page in child.held():
            page.holders.append(child)
        return child

    @property
    def pages(self) -> Table:
        """Those of the first group."""
        return self.tables[0]

    def held(self) -> list[ModelPage]:
        """Those of all groups."""
        return [page for table in self.tables for page in table if page is not None]

    @property
    def usage(self) -> Usage:
        """What became of each token of the prompt."""
        usage = Usage(0, self.num_hit_tokens, {})
        end = min(self.num_publishable_tokens, self.quota_end) // self.block_size * self.block_size
        for position in range(self.num_hit_tokens, self.num_prompt_tokens):
            is_known = self.was_last_found and position == self.num_prompt_tokens - 1
            ttl_s = self.wishes.write_ttl(position)
            if position >= end or is_known or ttl_s is None:
                usage = usage._replace(input=usage.input + 1)
            else:
                usage.cache_write_by_ttl[ttl_s] = usage.cache_write_by_ttl.get(ttl_s, 0) + 1
        return usage

    @property
    def looks_back_from(self) -> int:
        """The next token; or the start of the block that it continues, whose tail may be given up."""
        start = self.num_computed_tokens // self.block_size * self.block_size
        return start if self.num_written_tokens % self.block_size else self.num_computed_tokens

    @property
    def num_releasable_blocks(self) -> int:
        """Pages that nobody else holds."""
        return sum(page is not None and len(page.holders) == 1 for page in self.pages)

    @property
    def is_in_step(self) -> bool:
        """Reserved in a step that is neither committed nor abandoned."""
        return self.step is not None and self.step.is_open

    @property
    def is_idle(self) -> bool:
        """Neither closed nor in a step."""
        return not self.is_closed and not self.is_in_step

    def cut_items(self, num_tokens: int) -> None:
        """Forget the items from ``num_tokens`` on; a cut through a block with others ends what has a name."""
        first = num_tokens // self.block_size * self.block_size
        if first <= self.num_nameable_tokens:
            is_cut = any(first <= i < num_tokens for i in self.items)
            self.num_nameable_tokens = first if is_cut else 2**63
        self.items = {i: items for i, items in self.items.items() if i < num_tokens}

    def pages_to_write(self, end: int) -> tuple[bool, int]:
        """To fill [0, end): must a copy replace the last page, which others use as well; pages to add."""
        must_copy = False
        if self.num_written_tokens % self.block_size > 0:
            tail = self.pages[self.num_written_tokens // self.block_size]
            assert tail is not None, "no window is in front of the block that is written"
            must_copy = tail.identity != NAMELESS or len(tail.holders) > 1
        return must_copy, -(-end // self.block_size) - len(self.pages)


@dataclass(eq=False)
class ModelStep:
    """What a step computes, and what `abandon` needs to go back."""

    sequences: list[ModelSequence]
    num_new_tokens: list[int]
    tables_before: list[list[Table]]  # of each sequence
    preempted: list[bool]  # whether it was, before
    # of each group: source, destination, leading tokens
    copies: list[list[tuple[ModelPage, ModelPage, int]]]
    is_open: bool = True


@dataclass(eq=False)
class ModelFence:
    """Pages held beside the sequences'; one that two of them hold comes twice."""

    pages: list[ModelPage]


Found = tuple[list[Identity], list[Identity], int]


def find(known: Iterable[Identity], seq: ModelSequence) -> Found:
    """Find the whole blocks, the blocks that hold the longest run behind them, and its length."""
    blocks: list[Identity] = []
    for end in range(seq.block_size, min(len(seq.tokens), seq.num_nameable_tokens) + 1, seq.block_size):
        if (identity := seq.identity(end)) not in known:
            break
        blocks.append(identity)
    start, ours = len(blocks) * seq.block_size, seq.identity(len(seq.tokens))
    deeper = [identity for identity in known if len(identity) == 1 + start + seq.block_size]
    runs = [_common_run(ours, identity, start) for identity in deeper]
    longest = max(runs, default=0)
    return blocks, [block for block, run in zip(deeper, runs, strict=True) if run == longest > 0], longest


def owner(identity: Identity) -> bytes | None:
    """Return the salt that the last block depends on."""
    salts = [entry[1] for _, scope, _ in identity[1:] for entry in scope if entry[0] == 1]
    return salts[0] if salts else None


def _common_run(ours: Identity, theirs: Identity, start: int) -> int:
    """Equal tokens from ``start`` to where an item of either begins; 0 unless all before is equal."""
    run = 0
    if ours[: 1 + start] == theirs[: 1 + start]:
        for mine, other in zip(ours[1 + start :], theirs[1 + start :], strict=False):
            if mine != other or mine[2]:
                break
            run += 1
    return run


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
