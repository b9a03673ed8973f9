"""`BlockPool` and its meaning, `pagedkv.testing.model.ModelPool`, driven by the same calls and compared."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from pool_driving import NotedKV, digests
from pool_prompts import fitting

from pagedkv import BlockPool, OutOfBlocksError, PagedKVError, Sequence, Step, StepTables
from pagedkv.testing.identity import Identity
from pagedkv.testing.model import ModelPage, ModelPool, ModelSequence, ModelStep


@dataclass(eq=False)
class Pair:
    """One request in both pools."""

    real: Sequence
    model: ModelSequence
    keywords: dict[str, Any]
    items_end: int  # media and embeddings reach no further: what is behind was appended after a cut

    @property
    def num_uncached_tokens(self) -> int:
        return len(self.model.tokens) - self.model.num_computed_tokens


@dataclass(eq=False)
class StepPair:
    """One step in both pools."""

    real: Step
    model: ModelStep
    pairs: list[Pair]
    is_executed: bool = False


class SideBySide:
    """Both pools. Every verb asserts that they answer alike; `check` compares all that can be seen.

    Model pages have no block ids. Those of the real pool are learnt from the sequences that hold the pages,
    and must then stay the same for as long as a page lives: two sequences share a page in one pool exactly if
    they do in the other.
    """

    def __init__(self, num_blocks: int, block_size: int, caching: bool, granular: bool) -> None:
        self.pool = BlockPool(
            num_blocks,
            block_size=block_size,
            namespace=b"ns",
            prefix_caching=caching,
            token_granular=granular,
        )
        self.model = ModelPool(num_blocks, block_size, caching, granular)
        self.model.choose = self._follow
        self.kv = NotedKV(block_size)
        self.pairs: list[Pair] = []
        self.steps: list[StepPair] = []
        self.raw: list[tuple[int, ModelPage]] = []  # of allocate
        self.id_of: dict[ModelPage, int] = {}
        self.kv_of: dict[ModelPage, list[int]] = {}  # what each published page must hold,
        self.keywords_of: dict[ModelPage, dict[str, Any]] = {}  # and how its request was opened
        self.num_prompts = self.num_prompt_tokens = self.num_cached_tokens = 0
        self.has_given_up_a_run = False
        self._matched_ids: set[int] = set()
        self._digests: dict[Identity, bytes] = {}

    # ---------------------------------------------------------------- requests

    def open(self, tokens: list[int], keywords: dict[str, Any]) -> Pair:
        size, found = self.model.block_size, self.pool.match(tokens, **keywords)
        self._matched_ids = {*found.block_ids.tolist(), found.partial_block_id}
        meant = self.model.match(tokens, **keywords)
        assert found.num_block_tokens == len(meant.pages) * size
        assert found.num_partial_tokens == meant.num_partial_tokens
        assert found.block_ids.tolist() == [self.id_of[page] for page in meant.pages]
        assert found.partial_block_id == (self.id_of[meant.source] if meant.source else -1)
        opened = self.both(
            lambda: self.pool.open(tokens, **keywords), lambda: self.model.open(tokens, **keywords)
        )
        assert opened is not None
        pair = Pair(*opened, keywords, len(tokens))
        self.pairs.append(pair)
        self.num_prompts += 1
        self.num_prompt_tokens += len(tokens)
        self.num_cached_tokens += pair.model.num_cached_tokens
        return pair

    def append(self, pair: Pair, tokens: list[int]) -> None:
        argument = tokens[0] if len(tokens) == 1 else tokens
        self.both(
            lambda: self.pool.append(pair.real, argument), lambda: self.model.append(pair.model, tokens)
        )

    def truncate(self, pair: Pair, num_tokens: int) -> None:
        self.both(lambda: pair.real.truncate(num_tokens), lambda: self.model.truncate(pair.model, num_tokens))
        pair.items_end = min(pair.items_end, len(pair.model.tokens))

    def preempt(self, pair: Pair) -> None:
        self.both(pair.real.preempt, lambda: self.model.preempt(pair.model))

    def close(self, pair: Pair) -> None:
        self.both(pair.real.close, lambda: self.model.close(pair.model))
        closed = [p for p in self.pairs if p.model.is_closed and not p.model.is_in_step]
        for p in closed[:-1]:  # one is kept, to be refused
            self.pairs.remove(p)

    # ---------------------------------------------------------------- steps

    def reserve(self, pairs: list[Pair], counts: list[int]) -> StepPair | None:
        self._matched_ids = set()
        for pair in pairs:
            if pair.model.is_preempted:
                # What was cut has no name, so no prompt can ask for it: ask for what is before it.
                named = [i for i in pair.model.items if i >= pair.model.num_nameable_tokens]
                end = min([len(pair.model.tokens), *named])
                found = self.pool.match(
                    pair.model.tokens[:end], **fitting(pair.keywords, min(end, pair.items_end))
                )
                self._matched_ids |= {*found.block_ids.tolist(), found.partial_block_id}
        cached = {pair: pair.model.num_cached_tokens for pair in pairs}
        real = [pair.real for pair in pairs]
        result = self.both(
            lambda: self.pool.reserve(real, counts) if counts[1:] else self.pool.reserve(real[0], counts[0]),
            lambda: self.model.reserve([pair.model for pair in pairs], counts),
        )
        if result is None:
            return None
        step = StepPair(*result, pairs)
        self.steps.append(step)
        self._learn_ids()
        assert step.real.num_new_tokens == step.model.num_new_tokens
        self.has_given_up_a_run |= any(pair.model.num_cached_tokens < cached[pair] for pair in pairs)
        return step

    def execute(self, step: StepPair) -> None:
        """Prepare, and do what an engine does with the tables."""
        tables = self.pool.prepare(step.real)
        self._check_tables(step, tables)
        self.kv.execute(tables, [self._causes(pair) for pair in step.pairs])
        step.is_executed = True

    def commit(self, step: StepPair, accepted: list[int] | None = None) -> None:
        causes = [self._causes(pair) for pair in step.pairs]
        ended = self.both(
            lambda: self.pool.commit(step.real, accepted), lambda: self.model.commit(step.model, accepted)
        )
        assert ended is not None
        self._end(step)
        size = self.model.block_size
        for pair, cause in zip(step.pairs, causes, strict=True):
            pair.items_end = min(pair.items_end, len(pair.model.tokens))
            for i, page in enumerate(pair.model.pages):
                if page.identity:
                    self.kv_of.setdefault(page, cause[i * size : (i + 1) * size])
                    self.keywords_of.setdefault(page, pair.keywords)

    def abandon(self, step: StepPair) -> None:
        ended = self.both(lambda: self.pool.abandon(step.real), lambda: self.model.abandon(step.model))
        assert ended is not None
        self._end(step)

    def _end(self, step: StepPair) -> None:
        self.steps.remove(step)
        for call in (self.pool.commit, self.pool.abandon):  # a step ends once
            again = self.both(lambda call=call: call(step.real), lambda: self.model.abandon(step.model))
            assert again is None

    # ---------------------------------------------------------------- pages

    def allocate(self, num_blocks: int) -> None:
        result = self.both(lambda: self.pool.allocate(num_blocks), lambda: self.model.allocate(num_blocks))
        if result is not None:
            block_ids, pages = result[0].tolist(), result[1]
            self._learn(pages, block_ids)
            self.raw += zip(block_ids, pages, strict=True)
            self.kv.spoil(block_ids)

    def free(self, chosen: list[tuple[int, ModelPage]]) -> None:
        ids, pages = [x[0] for x in chosen], [x[1] for x in chosen]
        if self.both(lambda: self.pool.free(ids), lambda: self.model.free(pages)) is not None:
            self.raw = [x for x in self.raw if x not in chosen]

    def evict(self, num_blocks: int) -> None:
        result = self.both(lambda: self.pool.evict(num_blocks), lambda: self.model.evict(num_blocks))
        assert result is not None
        assert result[0] == result[1]

    def reset(self) -> None:
        result = self.both(self.pool.reset, self.model.reset)
        assert result is not None
        assert result[0] is result[1]

    # ---------------------------------------------------------------- comparing

    def both(self, real: Callable[[], Any], model: Callable[[], Any]) -> tuple[Any, Any] | None:
        """The two results; None when both refuse, in which case they refuse alike."""
        outcomes: list[Any] = []
        for call in (real, model):
            try:
                outcomes.append(call())
            except PagedKVError as error:
                outcomes.append(error)
        errors = [type(x) if isinstance(x, PagedKVError) else None for x in outcomes]
        assert errors[0] is errors[1], f"the pool answers {outcomes[0]!r}, its meaning is {outcomes[1]!r}"
        if errors[0] is OutOfBlocksError:
            needed, free, evictable = outcomes[1].needed, outcomes[1].free, outcomes[1].evictable
            assert (outcomes[0].needed, outcomes[0].free, outcomes[0].evictable) == (needed, free, evictable)
        return None if errors[0] else (outcomes[0], outcomes[1])

    def check(self) -> None:
        """Compare all that can be seen, and what every published page holds."""
        self.pool.check_integrity()
        model, stats = self.model, self.pool.stats()
        assert stats.num_free_blocks == model.num_free_blocks
        assert stats.num_writable_blocks == len(model.writable)
        assert stats.num_committed_blocks == len(model.published) - len(model.evictable)
        assert stats.num_evictable_blocks == len(model.evictable)
        assert stats.num_evicted_blocks == len(model.evicted)
        assert stats.num_nodes == len({page.identity for page in model.published})
        assert (stats.num_prompts, stats.num_prompt_tokens) == (self.num_prompts, self.num_prompt_tokens)
        assert 0 <= stats.num_cached_tokens <= self.num_cached_tokens
        assert self.has_given_up_a_run or stats.num_cached_tokens == self.num_cached_tokens
        self._learn_ids()
        for pair in self.pairs:
            self._check_sequence(pair)
        names: list[bytes | None] = [None] * model.num_blocks
        for page in model.published:
            first = self.id_of[page] * model.block_size
            assert [self.kv.slots.get(first + i) for i in range(model.block_size)] == self.kv_of[page]
            names[self.id_of[page]] = self._digest(page.identity)
        assert digests(self.pool) == names
        identities = {page.identity for page in model.published}
        for identity in identities:
            parent = identity[: -model.block_size]
            assert len(parent) == 1 or parent in identities, "a block outlived its parent"

    def give_everything_back(self) -> None:
        """What is left is evicted in the order of its last release, page by page."""
        for step in self.steps[:]:
            self.abandon(step)
        for pair in [pair for pair in self.pairs if not pair.model.is_closed]:
            self.close(pair)
        self.free(self.raw)
        self.check()
        while self.model.evictable:
            self.evict(1)
            self.check()
        assert self.pool.stats().num_free_blocks == self.pool.num_blocks
        assert self.pool.reset()

    def _check_sequence(self, pair: Pair) -> None:
        real, seq = pair.real, pair.model
        assert real.is_closed == seq.is_closed
        if not seq.is_closed:
            assert real.token_ids.tolist() == seq.tokens
            assert real.num_tokens == len(seq.tokens)
            assert real.num_cached_tokens == seq.num_cached_tokens
            assert real.num_computed_tokens == seq.num_computed_tokens
            assert real.num_cached_tokens <= real.num_computed_tokens <= real.num_tokens
            assert real.num_uncached_tokens == pair.num_uncached_tokens
            assert real.num_committed_tokens == seq.num_committed_tokens
            assert real.num_reserved_tokens == len(seq.pages) * seq.block_size
            num_nameable = min(len(seq.tokens), seq.num_nameable_tokens)
            ends = range(seq.block_size, num_nameable + 1, seq.block_size)
            assert real.block_hashes == [self._digest(seq.identity(end)) for end in ends]

    def _check_tables(self, step: StepPair, tables: StepTables) -> None:
        size, row = self.model.block_size, 0
        written: list[int] = []
        assert tables.block_table.shape[0] == len(tables.seq_lens) == len(step.pairs)
        for i, (pair, n) in enumerate(zip(step.pairs, step.model.num_new_tokens, strict=True)):
            start, seq = pair.model.num_computed_tokens, pair.model
            pages = [self.id_of[page] for page in seq.pages]
            table = tables.block_table[i].tolist()
            assert table == pages + [-1] * (len(table) - len(pages))
            assert len(set(pages)) == len(pages)
            assert tables.query_start_loc[i] == row
            assert tables.seq_lens[i] == start + n
            positions = list(range(start, start + n))
            assert tables.positions[row : row + n].tolist() == positions
            assert tables.token_ids[row : row + n].tolist() == seq.tokens[start : start + n]
            slots = [
                pages[p // size] * size + p % size if p >= seq.num_written_tokens else -1 for p in positions
            ]
            assert tables.slot_mapping[row : row + n].tolist() == slots
            written += [slot for slot in slots if slot >= 0]
            row += n
        assert tables.query_start_loc.tolist()[-1] == row == len(tables.slot_mapping)
        assert len(set(written)) == len(written), "two tokens are written to one slot"
        read = Counter(id_ for pair in self.pairs for id_ in pair.real.block_ids.tolist())
        for block_id in {slot // size for slot in written}:
            assert self.pool.digest_of(block_id) is None, "a published page is written"
            assert read[block_id] <= 1, "a page is written that another sequence reads"
        assert [tuple(map(int, copy)) for copy in tables.copies] == step.real.copies
        assert step.real.copies == [
            (self.id_of[src], self.id_of[dst], n) for src, dst, n in step.model.copies
        ]

    def _learn_ids(self) -> None:
        for pair in self.pairs:
            if not pair.model.is_closed:
                self._learn(pair.model.pages, pair.real.block_ids.tolist())

    def _learn(self, pages: list[ModelPage], block_ids: list[int]) -> None:
        live = {*self.model.writable, *self.model.published}
        self.id_of = {page: block_id for page, block_id in self.id_of.items() if page in live}
        page_of = {block_id: page for page, block_id in self.id_of.items()}
        assert len(pages) == len(block_ids)
        for page, block_id in zip(pages, block_ids, strict=True):
            assert self.id_of.setdefault(page, block_id) == block_id, "a sequence lost the page it held"
            assert page_of.setdefault(block_id, page) is page, "one page has two meanings"

    def _follow(self, pages: list[ModelPage]) -> ModelPage:
        """Any page of one identity would do; the model takes the one that the pool said it would."""
        return next((page for page in pages if self.id_of.get(page) in self._matched_ids), pages[0])

    def _causes(self, pair: Pair) -> list[int]:
        salt, extras = pair.keywords.get("cache_salt"), pair.keywords["extras"]
        return self.kv.causes(pair.model.tokens, salt, extras, items_end=pair.items_end)

    def _digest(self, identity: Identity) -> bytes:
        """The published digest format, over an identity."""
        size = self.model.block_size
        if len(identity) == 1:
            return sha256(b"pagedkv.block.v1" + struct.pack("<II", size, 2) + b"ns").digest()
        if identity not in self._digests:
            parent, block = identity[:-size], identity[-size:]
            entries = [
                *(parent[0] if len(parent) == 1 else ()),
                *(item for _, items in block for item in items),
            ]
            extras = [struct.pack("<BI", tag, len(x)) + x for tag, x in sorted(map(_entry, entries))]
            tokens = struct.pack(f"<{size}I", *(token for token, _ in block))
            self._digests[identity] = sha256(self._digest(parent) + tokens + b"".join(extras)).digest()
        return self._digests[identity]


def _entry(entry: tuple[Any, ...]) -> tuple[int, bytes]:
    """Tag and payload of an entry of an identity's scope or items."""
    tag, *content = entry
    if tag == 2:
        return tag, struct.pack("<I", len(content[0])) + content[0] + content[1]
    if tag == 3:
        return tag, struct.pack("<i", content[0]) + content[1]
    if tag == 4:
        return tag, struct.pack(f"<{1 + len(content[0])}H", len(content[0]), *content[0]) + content[1]
    return tag, content[0]
