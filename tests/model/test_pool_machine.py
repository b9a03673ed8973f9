"""The pool and its meaning side by side: whatever the caller does, both hold and evict the same pages.

After every call the whole visible state is compared with `pagedkv.testing.model.ModelPool`, and every step
runs against noted KV: a page that is served to the wrong tokens, or evicted under a reader, is seen.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_driving import NotedKV, digests

from pagedkv import (
    Adapter,
    BlockPool,
    Embeddings,
    Extra,
    Media,
    OutOfBlocksError,
    PagedKVError,
    Sequence,
    Step,
)
from pagedkv.testing.model import ModelPage, ModelPool, ModelSequence, ModelStep

Prompt = tuple[list[int], dict[str, Any]]  # token ids, keyword arguments of open and match

# A digest names a content, and a content has one length: the same digest never comes with two lengths.
PICTURE_LENGTHS = {b"1" * 32: 1, b"3" * 32: 3, b"5" * 32: 5}
SCOPES: list[dict[str, Any]] = [
    {"cache_salt": "tenant"},
    {"cache_salt": b"other"},
    {"extras": [Adapter("sql", b"r1")]},
    {"extras": [Adapter("sql", b"r2")]},
    {"extras": [Extra(200, b"mine")]},
]

SELDOM = st.sampled_from([False, False, False, False, True])  # or the pool would be empty most of the time


@st.composite
def prompts(draw: st.DrawFn, block_size: int) -> Prompt:
    """Few patterns of a block's length, so that prefixes, partial runs and duplicates are frequent."""
    half = block_size // 2
    patterns = [[0] * block_size, [0] * half + [1] * (block_size - half), [1] * block_size]
    tokens = [t for i in draw(st.lists(st.sampled_from([0, 0, 1, 2]), max_size=3)) for t in patterns[i]]
    tokens += patterns[draw(st.integers(0, 2))][: draw(st.integers(0, block_size))]
    tokens = tokens or [0]
    if draw(st.integers(0, 3)) == 0:
        tokens[draw(st.integers(0, len(tokens) - 1))] = 2
    kind = draw(st.sampled_from(["plain"] * 12 + ["scope", "media", "embeddings", "both"]))
    if kind == "plain":
        return tokens, {}
    keywords: dict[str, Any] = {"extras": []}
    if kind in ("scope", "both"):
        keywords.update(draw(st.sampled_from(SCOPES)))
    extras = list(keywords["extras"]) if "extras" in keywords else []
    if kind in ("media", "both"):
        digest = draw(st.sampled_from([d for d, length in PICTURE_LENGTHS.items() if length <= len(tokens)]))
        start = draw(st.integers(0, len(tokens) - PICTURE_LENGTHS[digest]))
        extras.append(Media(start, PICTURE_LENGTHS[digest], digest))
    if kind == "embeddings":
        positions = sorted(draw(st.sets(st.integers(0, len(tokens) - 1), min_size=1, max_size=2)))
        extras.append(Embeddings(positions, b"e" * 32))
    return tokens, {**keywords, "extras": extras}


@dataclass(eq=False)
class Pair:
    """One request in both pools."""

    real: Sequence
    model: ModelSequence
    keywords: dict[str, Any]


@dataclass(eq=False)
class StepPair:
    real: Step
    model: ModelStep
    pairs: list[Pair]
    is_executed: bool = False


@dataclass(eq=False)
class Ids:
    """Which block id each page of the model has in the real pool, learnt from the sequences that hold it."""

    id_of: dict[ModelPage, int] = field(default_factory=dict)

    def learn(self, pages: list[ModelPage], block_ids: list[int]) -> None:
        assert len(pages) == len(block_ids)
        taken = {block_id: page for page, block_id in self.id_of.items()}
        for page, block_id in zip(pages, block_ids, strict=True):
            assert self.id_of.setdefault(page, block_id) == block_id, "a sequence lost the page it held"
            assert taken.setdefault(block_id, page) is page, "one page has two meanings"

    def forget_all_but(self, live: list[ModelPage]) -> None:
        self.id_of = {page: block_id for page, block_id in self.id_of.items() if page in live}


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.sampled_from([4, 4, 4, 16, 1, 3]),
        caching=st.sampled_from([True] * 9 + [False]),
        granular=st.sampled_from([True] * 4 + [False]),
    )
    def build(self, num_blocks: int, block_size: int, caching: bool, granular: bool) -> None:
        self.pool = BlockPool(
            num_blocks,
            block_size=block_size,
            namespace=b"ns",
            prefix_caching=caching,
            token_granular=granular,
        )
        self.model = ModelPool(num_blocks, block_size, caching, granular)
        self.model.choose = self.choose
        self.kv = NotedKV(block_size)
        self.ids = Ids()
        self.hints: set[int] = set()
        self.pairs: list[Pair] = []
        self.steps: list[StepPair] = []
        self.raw: list[tuple[int, ModelPage]] = []
        self.kv_of: dict[ModelPage, list[int]] = {}  # what each published page must hold
        self.num_prompts = self.num_prompt_tokens = self.num_cached_tokens = 0

    # ---------------------------------------------------------------- helpers

    def choose(self, pages: list[ModelPage]) -> ModelPage:
        """Any page of one identity would do; follow the real pool."""
        return next((page for page in pages if self.ids.id_of.get(page) in self.hints), pages[0])

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
            assert outcomes[0].needed > outcomes[0].free + outcomes[0].evictable
            assert outcomes[0].free == outcomes[1].free
        return None if errors[0] else (outcomes[0], outcomes[1])

    def causes(self, pair: Pair) -> list[int]:
        return self.kv.causes(
            pair.model.tokens, pair.keywords.get("cache_salt"), pair.keywords.get("extras", ())
        )

    def pick(self, data: st.DataObject, *, busy: bool | None = None) -> Pair:
        """A sequence that is open (and in a step, or in none)."""
        fit = [
            p for p in self.pairs if not p.model.is_closed and (busy is None or busy is p.model.is_in_step)
        ]
        return data.draw(st.sampled_from(fit or self.pairs))

    def digest_of(self, page: ModelPage) -> bytes | None:
        """The published digest format, over the identity."""
        if not page.identity:
            return None
        size, (scope, *tokens) = self.model.block_size, page.identity
        digest = sha256(b"pagedkv.block.v1" + struct.pack("<II", size, 2) + b"ns").digest()
        for first in range(0, len(tokens), size):
            block = tokens[first : first + size]
            entries = [_entry(x) for x in (scope if first == 0 else ())] + [
                _entry(x) for t in block for x in t[1]
            ]
            extras = b"".join(
                struct.pack("<BI", tag, len(payload)) + payload for tag, payload in sorted(entries)
            )
            digest = sha256(digest + struct.pack(f"<{size}I", *(t[0] for t in block)) + extras).digest()
        return digest

    # ---------------------------------------------------------------- requests

    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        self._open(*data.draw(prompts(self.model.block_size)))

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=5))
    def open_again(self, data: st.DataObject, more: list[int]) -> None:
        """The tokens of another request and some more: duplicates when both are computed side by side."""
        pair = data.draw(st.sampled_from(self.pairs))
        if not any(isinstance(x, Media | Embeddings) for x in pair.keywords.get("extras", ())):
            self._open(([*pair.model.tokens, *more] or [0])[: 4 * self.model.block_size], pair.keywords)

    def _open(self, tokens: list[int], keywords: dict[str, Any]) -> None:
        found = self.pool.match(tokens, **keywords)
        self.hints = {*found.block_ids.tolist(), found.partial_block_id}
        result = self.both(
            lambda: self.pool.open(tokens, **keywords), lambda: self.model.open(tokens, **keywords)
        )
        assert result is not None
        pair = Pair(*result, keywords)
        self.pairs.append(pair)
        self.num_prompts += 1
        self.num_prompt_tokens += len(tokens)
        self.num_cached_tokens += pair.model.num_cached_tokens

    @rule(data=st.data())
    def match(self, data: st.DataObject) -> None:
        tokens, keywords = data.draw(prompts(self.model.block_size))
        found = self.pool.match(tokens, **keywords)
        self.hints = {*found.block_ids.tolist(), found.partial_block_id}
        meant = self.model.match(tokens, **keywords)
        assert found.num_block_tokens == len(meant.pages) * self.model.block_size
        assert found.num_partial_tokens == meant.num_partial_tokens
        assert found.block_ids.tolist() == [self.ids.id_of[page] for page in meant.pages]
        assert found.partial_block_id == (self.ids.id_of[meant.source] if meant.source else -1)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        pair = self.pick(data, busy=False)
        argument = tokens[0] if len(tokens) == 1 else tokens
        self.both(
            lambda: self.pool.append(pair.real, argument), lambda: self.model.append(pair.model, tokens)
        )

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        pair = self.pick(data, busy=False)
        if any(isinstance(x, Media | Embeddings) for x in pair.keywords.get("extras", ())):
            return  # what the tokens behind the cut would be computed from is the caller's to say
        n = data.draw(st.integers(0, len(pair.model.tokens)))
        self.both(lambda: pair.real.truncate(n), lambda: self.model.truncate(pair.model, n))

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        pair = self.pick(data, busy=False)
        self.both(pair.real.preempt, lambda: self.model.preempt(pair.model))

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), busy=st.sampled_from([None, True, False]))
    def close(self, data: st.DataObject, busy: bool | None) -> None:
        pair = self.pick(data, busy=busy)
        self.both(pair.real.close, lambda: self.model.close(pair.model))
        closed = [p for p in self.pairs if p.model.is_closed and not p.model.is_in_step]
        for p in closed[:-1]:  # one is kept, to be refused
            self.pairs.remove(p)

    # ---------------------------------------------------------------- steps

    def _reserve(self, pairs: list[Pair], counts: list[int]) -> StepPair | None:
        self.hints = set()
        for pair in pairs:
            if pair.model.is_preempted and pair.model.tokens:
                found = self.pool.match(pair.real.token_ids, **pair.keywords)
                self.hints |= {*found.block_ids.tolist(), found.partial_block_id}
        result = self.both(
            lambda: self.pool.reserve([p.real for p in pairs], counts),
            lambda: self.model.reserve([p.model for p in pairs], counts),
        )
        if result is None:
            return None
        step = StepPair(*result, pairs)
        self.steps.append(step)
        self.learn_ids()
        assert step.real.num_new_tokens == step.model.num_new_tokens
        return step

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), all_tokens=st.booleans())
    def reserve(self, data: st.DataObject, all_tokens: bool) -> None:
        pairs = data.draw(st.permutations(self.pairs))[: data.draw(st.integers(1, 3))]
        idle = [p for p in pairs if not p.model.is_closed and not p.model.is_in_step] or pairs
        left = [len(p.model.tokens) - p.model.num_computed_tokens for p in idle]
        counts = [n if all_tokens or n < 2 else data.draw(st.integers(1, n)) for n in left]
        self._reserve(idle, [max(n, 1) for n in counts])

    def _execute(self, step: StepPair) -> None:
        tables = self.pool.prepare(step.real)
        self.check_tables(step, tables)
        self.kv.execute(tables, [self.causes(pair) for pair in step.pairs])
        step.is_executed = True

    @precondition(lambda self: any(not step.is_executed for step in self.steps))
    @rule(data=st.data())
    def execute(self, data: st.DataObject) -> None:
        self._execute(data.draw(st.sampled_from([step for step in self.steps if not step.is_executed])))

    def _commit(self, step: StepPair, accepted: list[int] | None) -> None:
        causes = [self.causes(pair) for pair in step.pairs]
        result = self.both(
            lambda: self.pool.commit(step.real, accepted), lambda: self.model.commit(step.model, accepted)
        )
        assert result is not None
        self.steps.remove(step)
        size = self.model.block_size
        for pair, cause in zip(step.pairs, causes, strict=True):
            for i, page in enumerate(pair.model.pages):
                if page.identity:
                    self.kv_of.setdefault(page, cause[i * size : (i + 1) * size])

    @precondition(lambda self: any(step.is_executed for step in self.steps))
    @rule(data=st.data(), accept=st.sampled_from(["all", "all", "some"]))
    def commit(self, data: st.DataObject, accept: str) -> None:
        step = data.draw(st.sampled_from([step for step in self.steps if step.is_executed]))
        has_items = any(
            isinstance(x, Media | Embeddings) for p in step.pairs for x in p.keywords.get("extras", ())
        )
        accepted = None
        if accept == "some" and not has_items:
            accepted = [data.draw(st.integers(0, n)) for n in step.model.num_new_tokens]
        self._commit(step, accepted)

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(self.steps))
        self.both(lambda: self.pool.abandon(step.real), lambda: self.model.abandon(step.model))
        self.steps.remove(step)
        for call in (self.pool.abandon, self.pool.commit):  # a step ends once
            assert (
                self.both(lambda call=call: call(step.real), lambda: self.model.abandon(step.model)) is None
            )

    @precondition(lambda self: any(not p.model.is_closed and not p.model.is_in_step for p in self.pairs))
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """What an engine does most: all that is left of some sequences, in one step."""
        idle = [p for p in self.pairs if not p.model.is_closed and not p.model.is_in_step]
        idle = [p for p in idle if len(p.model.tokens) > p.model.num_computed_tokens]
        if not idle:
            return
        pairs = data.draw(st.permutations(idle))[: data.draw(st.integers(1, 3))]
        step = self._reserve(pairs, [len(p.model.tokens) - p.model.num_computed_tokens for p in pairs])
        if step is not None:
            self._execute(step)
            self._commit(step, None)

    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        """A whole request: open, compute, close."""
        self.open(data)
        pair = self.pairs[-1]
        step = self._reserve([pair], [len(pair.model.tokens) - pair.model.num_computed_tokens])
        if step is not None:
            self._execute(step)
            self._commit(step, None)
        self.both(pair.real.close, lambda: self.model.close(pair.model))
        self.pairs.remove(pair)

    # ---------------------------------------------------------------- pages

    @precondition(lambda self: len(self.raw) < self.model.num_blocks // 2)
    @rule(n=st.integers(0, 4))
    def allocate(self, n: int) -> None:
        result = self.both(lambda: self.pool.allocate(n), lambda: self.model.allocate(n))
        if result is not None:
            block_ids, pages = result[0].tolist(), result[1]
            self.ids.forget_all_but(self.live_pages())
            self.ids.learn(pages, block_ids)
            self.raw += zip(block_ids, pages, strict=True)
            self.kv.spoil(block_ids)

    @precondition(lambda self: self.raw)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.raw), min_size=1, max_size=3))  # one may come twice
        ids, pages = [x[0] for x in chosen], [x[1] for x in chosen]
        if self.both(lambda: self.pool.free(ids), lambda: self.model.free(pages)) is not None:
            self.raw = [x for x in self.raw if x not in chosen]

    @precondition(lambda self: self.ids.id_of)
    @rule(data=st.data())
    def free_what_allocate_did_not_give(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(list(self.ids.id_of)))
        if page not in [raw for _, raw in self.raw]:
            block_id = self.ids.id_of[page]
            assert self.both(lambda: self.pool.free([block_id]), lambda: self.model.free([page])) is None

    @precondition(lambda self: self.model.evictable)
    @rule(n=st.integers(0, 3), now=SELDOM)
    def evict(self, n: int, now: bool = True) -> None:
        if not now:
            return
        result = self.both(lambda: self.pool.evict(n), lambda: self.model.evict(n))
        assert result is not None
        assert result[0] == result[1]

    @rule(now=SELDOM)
    def reset(self, now: bool) -> None:
        if not now:
            return
        result = self.both(self.pool.reset, self.model.reset)
        assert result is not None
        assert result[0] is result[1]

    # ---------------------------------------------------------------- what always holds

    def learn_ids(self) -> None:
        self.ids.forget_all_but(self.live_pages())
        for pair in self.pairs:
            if not pair.model.is_closed:
                self.ids.learn(pair.model.pages, pair.real.block_ids.tolist())

    def live_pages(self) -> list[ModelPage]:
        return self.model.writable + self.model.published

    def check_tables(self, step: StepPair, tables: Any) -> None:
        size, row = self.model.block_size, 0
        others = Counter(i for p in self.pairs if p not in step.pairs for i in p.real.block_ids.tolist())
        written: list[int] = []
        for i, (pair, n) in enumerate(zip(step.pairs, step.model.num_new_tokens, strict=True)):
            start, seq = pair.model.num_computed_tokens, pair.model
            pages = [self.ids.id_of[page] for page in seq.pages]
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
        assert tables.block_table.shape[0] == len(tables.seq_lens) == len(step.pairs)
        assert len(set(written)) == len(written), "two tokens are written to one slot"
        for block_id in {slot // size for slot in written}:
            assert self.pool.digest_of(block_id) is None, "a published page is written"
            assert others[block_id] == 0, "a page is written that another sequence reads"
        ids = self.ids.id_of
        assert [tuple(map(int, c)) for c in tables.copies] == step.real.copies
        assert step.real.copies == [(ids[src], ids[dst], n) for src, dst, n in step.model.copies]

    @invariant()
    def both_pools_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        model, stats = self.model, self.pool.stats()
        evictable = len(model.evictable)
        assert stats.num_free_blocks == model.num_free_blocks
        assert stats.num_writable_blocks == len(model.writable)
        assert stats.num_committed_blocks == len(model.published) - evictable
        assert stats.num_evictable_blocks == evictable
        assert stats.num_evicted_blocks == len(model.evicted)
        assert stats.num_nodes == len({page.identity for page in model.published})
        assert stats.num_prompts == self.num_prompts
        assert stats.num_prompt_tokens == self.num_prompt_tokens
        self.learn_ids()
        for pair in self.pairs:
            real, seq = pair.real, pair.model
            assert real.is_closed == seq.is_closed
            if seq.is_closed:
                continue
            assert real.token_ids.tolist() == seq.tokens
            assert real.num_tokens == len(seq.tokens)
            assert real.num_cached_tokens == seq.num_cached_tokens
            assert real.num_computed_tokens == seq.num_computed_tokens
            assert real.num_cached_tokens <= real.num_computed_tokens <= real.num_tokens
            assert real.num_uncached_tokens == real.num_tokens - real.num_computed_tokens
            assert real.num_committed_tokens == seq.num_committed_tokens
            assert real.num_reserved_tokens == len(seq.pages) * model.block_size
        self.published_pages_hold_what_they_are_named()

    def published_pages_hold_what_they_are_named(self) -> None:
        names: list[bytes | None] = [None] * self.model.num_blocks
        size = self.model.block_size
        for page in self.model.published:
            block_id = self.ids.id_of[page]
            names[block_id] = self.digest_of(page)
            assert [self.kv.slots.get(block_id * size + i) for i in range(size)] == self.kv_of[page]
        assert digests(self.pool) == names
        identities = {page.identity for page in self.model.published}
        for identity in identities:
            assert len(identity) == 1 + size or identity[:-size] in identities, "a block outlived its parent"

    def teardown(self) -> None:
        """Everything given back, pages go in the order in which they were last released, children first."""
        if not hasattr(self, "pool"):
            return
        for step in self.steps:
            self.both(
                lambda step=step: self.pool.abandon(step.real),
                lambda step=step: self.model.abandon(step.model),
            )
        for pair in self.pairs:
            self.both(pair.real.close, lambda pair=pair: self.model.close(pair.model))
        self.steps, self.pairs = [], []
        self.both(
            lambda: self.pool.free([x[0] for x in self.raw]),
            lambda: self.model.free([x[1] for x in self.raw]),
        )
        self.both_pools_agree()
        while self.model.evictable:
            self.evict(1)
            self.both_pools_agree()
        assert self.pool.stats().num_free_blocks == self.pool.num_blocks
        assert self.pool.reset()


def _entry(item: tuple[Any, ...]) -> tuple[int, bytes]:
    """An entry of an identity's scope or items as (tag, payload)."""
    tag, content = (item[0], item[1:])
    if tag == 2:
        return tag, struct.pack("<I", len(content[0])) + content[0] + content[1]
    if tag == 3:
        return tag, struct.pack("<i", content[0]) + content[1]
    if tag == 4:
        positions = content[0]
        return tag, struct.pack(f"<{1 + len(positions)}H", len(positions), *positions) + content[1]
    return tag, content[0]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(settings(), suppress_health_check=list(HealthCheck))
