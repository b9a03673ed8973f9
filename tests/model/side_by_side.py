"""`BlockPool` and its meaning, `pagedkv.testing.model.ModelPool`, driven by the same calls and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequence_
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cmp_to_key
from itertools import takewhile
from typing import Any

from comparing import check_counters, check_events, check_map, check_pages, check_sequence, check_tables
from digest_format import DigestFormat
from event_replay import EventReplay
from pool_driving import NotedKV
from pool_prompts import Prompt, fitting

from pagedkv import BlockHash, BlockPool, OutOfBlocksError, PagedKVError, Sequence, Step, hash_blocks
from pagedkv.sequence import Fence
from pagedkv.testing import broken_hashes
from pagedkv.testing.explaining import explain
from pagedkv.testing.identity import Identity, ModelFence, ModelPage, ModelSequence, ModelStep, find
from pagedkv.testing.model import ModelPool


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

    def __init__(
        self,
        num_blocks: int | list[int],
        block_size: int,
        caching: bool = True,
        granular: bool = True,
        are_digests_broken: bool = False,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        with broken_hashes() if are_digests_broken else nullcontext():
            self.pool = BlockPool(
                num_blocks,
                block_size=block_size,
                namespace=b"ns",
                prefix_caching=caching,
                token_granular=granular,
                events=True,
                clock="manual",
                windows=windows,
            )
        self.are_digests_broken = are_digests_broken
        self.model = ModelPool(num_blocks, block_size, caching, granular, windows)
        self.model.choose = self._follow_source
        self.model.order = self._follow_order
        self.kv = [NotedKV(block_size) for _ in windows]
        self.format = DigestFormat(block_size, b"ns")
        self.replay = EventReplay(is_whole=windows[0] is None)
        self.pairs: list[Pair] = []
        self.steps: list[StepPair] = []
        self.raw: list[tuple[int, ModelPage]] = []  # of allocate
        self.id_of: dict[ModelPage, int] = {}
        self.kv_of: dict[ModelPage, list[int]] = {}  # what each published page must hold,
        self.keywords_of: dict[ModelPage, dict[str, Any]] = {}  # and how its request was opened
        self.fences: list[tuple[Fence, ModelFence]] = []
        # The page of the run that the pool says it will borrow: for a sequence, or for what was asked last.
        self._source_of: dict[ModelSequence | None, int] = {}

    # ---------------------------------------------------------------- requests

    def match(self, tokens: list[int], keywords: dict[str, Any]) -> None:
        found = self.pool.match(tokens, **keywords)
        self._source_of = {None: found.partial_block_id}
        meant = self.model.match(tokens, **keywords)
        assert found.num_block_tokens == len(meant.blocks) * self.model.block_size
        assert found.num_partial_tokens == meant.num_partial_tokens
        assert found.block_ids.tolist() == self.ids(meant.tables[0])
        assert found.partial_block_id == (self.id_of[meant.sources[0]] if meant.sources else -1)

    def match_lengths(self, prompts: list[Prompt], salt_from: int | None) -> None:
        """Of a queue; all salts enter at one place."""
        lengths = self.pool.match_lengths(
            [tokens for tokens, _ in prompts],
            cache_salts=[keywords.get("cache_salt") for _, keywords in prompts],
            salt_from=salt_from,
            extras=[keywords["extras"] for _, keywords in prompts],
        )
        for length, (tokens, keywords) in zip(lengths.tolist(), prompts, strict=True):
            own = {**keywords, "salt_from": salt_from if "cache_salt" in keywords else None}
            self.match(tokens, own)
            meant = self.model.match(tokens, **own)
            assert length == len(meant.blocks) * self.model.block_size + meant.num_partial_tokens

    def touch(self, tokens: list[int], keywords: dict[str, Any]) -> None:
        self.both_return(
            lambda: self.pool.touch(tokens, **keywords), lambda: self.model.touch(tokens, **keywords)
        )

    def retain(self, tokens: list[int], keywords: dict[str, Any], wish: dict[str, Any]) -> None:
        self.both_return(
            lambda: self.pool.retain(tokens, **wish, **keywords),
            lambda: self.model.retain(tokens, **wish, **keywords),
        )

    def waiting(self, prompts: list[Prompt], salt_from: int | None) -> None:
        """A queue whose salts all enter at one place."""
        own = [
            (tokens, {**keywords, "salt_from": salt_from if "cache_salt" in keywords else None})
            for tokens, keywords in prompts
        ]
        self.both_return(
            lambda: self.pool.waiting(
                [tokens for tokens, _ in prompts],
                cache_salts=[keywords.get("cache_salt") for _, keywords in prompts],
                salt_from=salt_from,
                extras=[keywords["extras"] for _, keywords in prompts],
            ).tolist(),
            lambda: self.model.waiting(own),
        )

    def expect_reuse(self, pair: Pair, within_s: float) -> None:
        self.both(
            lambda: self.pool.expect_reuse(pair.real, within_s=within_s),
            lambda: self.model.expect_reuse(pair.model),
        )

    def last_turn(self, pair: Pair) -> None:
        self.both(lambda: self.pool.last_turn(pair.real), lambda: self.model.last_turn(pair.model))

    def open(self, tokens: list[int], keywords: dict[str, Any], wishes: dict[str, Any]) -> Pair:
        self.match(tokens, keywords)
        opened = self.both(
            lambda: self.pool.open(tokens, **keywords, **wishes),
            lambda: self.model.open(tokens, **keywords, **wishes),
        )
        assert opened is not None
        pair = Pair(*opened, keywords, len(tokens))
        self.pairs.append(pair)
        return pair

    def fork(self, pair: Pair) -> None:
        forked = self.both(pair.real.fork, lambda: self.model.fork(pair.model))
        if forked is not None:
            self.pairs.append(Pair(*forked, pair.keywords, pair.items_end))

    def append(self, pair: Pair, tokens: list[int]) -> None:
        argument = tokens[0] if len(tokens) == 1 else tokens
        self.both(
            lambda: self.pool.append(pair.real, argument), lambda: self.model.append(pair.model, tokens)
        )

    def truncate(self, pair: Pair, num_tokens: int) -> None:
        self.both(lambda: pair.real.truncate(num_tokens), lambda: self.model.truncate(pair.model, num_tokens))
        pair.items_end = min(pair.items_end, len(pair.model.tokens))

    def no_cache(self, pair: Pair, position: int) -> None:
        self.both(lambda: pair.real.no_cache(position), lambda: self.model.no_cache(pair.model, position))

    def preempt(self, pair: Pair) -> None:
        self.both(pair.real.preempt, lambda: self.model.preempt(pair.model))

    def close(self, pair: Pair) -> None:
        self.both(pair.real.close, lambda: self.model.close(pair.model))
        closed = [p for p in self.pairs if p.model.is_closed and not p.model.is_in_step]
        for p in closed[:-1]:  # one is kept, to be refused
            self.pairs.remove(p)

    def fence(self, pairs: list[Pair]) -> None:
        fenced = self.both(
            lambda: self.pool.fence([pair.real for pair in pairs]),
            lambda: self.model.fence([pair.model for pair in pairs]),
        )
        if fenced is not None:
            self.fences.append(fenced)

    def release(self, fence: tuple[Fence, ModelFence]) -> None:
        self.both_return(fence[0].release, lambda: self.model.release(fence[1]))
        assert self.both(fence[0].release, lambda: self.model.release(fence[1])) is None  # once
        self.fences.remove(fence)

    # ---------------------------------------------------------------- steps

    def reserve(self, pairs: list[Pair], counts: list[int]) -> StepPair | None:
        self._source_of = {}
        for pair in pairs:
            if pair.model.is_preempted:
                # What was cut has no name, so no prompt can ask for it: ask for what is before it.
                named = [i for i in pair.model.items if i >= pair.model.num_nameable_tokens]
                end = min([len(pair.model.tokens), *named])
                keywords = fitting(pair.keywords, min(end, pair.items_end))
                found = self.pool.match(pair.model.tokens[:end], **keywords)
                self._source_of[pair.model] = found.partial_block_id
        preempted = [pair for pair in pairs if pair.model.is_preempted]
        result = self.both(
            lambda: self._reserve(pairs, counts, preempted),
            lambda: self.model.reserve([pair.model for pair in pairs], counts),
        )
        if result is None:
            return None
        step = StepPair(*result, pairs)
        self.steps.append(step)
        self._learn_ids()
        assert step.real.num_new_tokens == step.model.num_new_tokens
        return step

    def _reserve(self, pairs: list[Pair], counts: list[int], preempted: list[Pair]) -> Step:
        real = [pair.real for pair in pairs]
        step = self.pool.reserve(real, counts) if counts[1:] else self.pool.reserve(real[0], counts[0])
        # Asked for less than a whole sequence, the pool may have named another of several runs.
        for source, target, _ in step.copies_of(0):
            for pair in preempted:
                if target in pair.real.block_ids_of(0).tolist():
                    self._source_of[pair.model] = source
        return step

    def execute(self, step: StepPair) -> None:
        """Prepare, and do what an engine does with the tables."""
        tables = self.pool.prepare(step.real, prefix_multiple=self.model.block_size)
        check_tables(self, step, tables)
        causes = [self._causes(pair) for pair in step.pairs]
        for group, window in enumerate(self.model.windows):
            self.kv[group].execute(tables, causes, group=group, window=window)
        step.is_executed = True

    def commit(self, step: StepPair, accepted: list[int] | None = None) -> None:
        causes = [self._causes(pair) for pair in step.pairs]
        tables = [[table[:] for table in pair.model.tables] for pair in step.pairs]
        ended = self.both(
            lambda: self.pool.commit(step.real, accepted), lambda: self.model.commit(step.model, accepted)
        )
        assert ended is not None
        self._end(step)
        size = self.model.block_size
        for pair, cause, before in zip(step.pairs, causes, tables, strict=True):
            pair.items_end = min(pair.items_end, len(pair.model.tokens))
            for i, page in [entry for table in before for entry in enumerate(table)]:
                if page is not None and page.identity:
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

    def allocate(self, num_blocks: int, group: int = 0) -> None:
        result = self.both(
            lambda: self.pool.allocate(num_blocks, group=group),
            lambda: self.model.allocate(num_blocks, group),
        )
        if result is not None:
            block_ids, pages = result[0].tolist(), result[1]
            self._learn(pages, block_ids, group)
            self.raw += zip(block_ids, pages, strict=True)
            self.kv[group].spoil(block_ids)

    def free(self, chosen: list[tuple[int, ModelPage]]) -> None:
        for group in self.model.groups:
            theirs = [x for x in chosen if x[1].group == group]
            ids, pages = [x[0] for x in theirs], [x[1] for x in theirs]
            freed = self.both(
                lambda ids=ids, group=group: self.pool.free(ids, group=group),
                lambda pages=pages: self.model.free(pages),
            )
            if freed is not None:
                self.raw = [x for x in self.raw if x not in theirs]

    def evict(self, num_blocks: int) -> None:
        self.both_return(lambda: self.pool.evict(num_blocks), lambda: self.model.evict(num_blocks))

    def reset(self) -> None:
        self.both_return(self.pool.reset, self.model.reset)

    def bump_generation(self) -> None:
        self.both_return(self.pool.bump_generation, self.model.bump_generation)

    def advance(self, seconds: float) -> None:
        self.both_return(lambda: self.pool.advance(seconds), lambda: self.model.advance(seconds))

    def set_quota(self, salt: str | bytes, num_blocks: int | None) -> None:
        self.both_return(
            lambda: self.pool.set_quota(salt, num_blocks), lambda: self.model.set_quota(salt, num_blocks)
        )

    def explain(self, tokens: list[int], keywords: dict[str, Any], *, across_tenants: bool) -> None:
        self.match(tokens, keywords)
        answer = self.pool.explain(tokens, **keywords, across_tenants=across_tenants)
        meant = explain(self.model, tokens, **keywords, across_tenants=across_tenants)
        assert answer.position == answer.num_cached_tokens == meant.num_cached_tokens
        assert answer.num_block_tokens == meant.num_block_tokens
        assert answer.reason == meant.reason
        assert answer.expected_token in meant.expected_tokens
        assert (answer.evicted_at_s, answer.evicted_by) == (meant.evicted_at_s, meant.evicted_by)

    def lookup(self, tokens: list[int], keywords: dict[str, Any]) -> None:
        digests = hash_blocks(tokens, block_size=self.model.block_size, namespace=b"ns", **keywords)
        known = {identity for identity in self.model.known if self.model.is_current(identity)}
        seq = ModelSequence(self.model.block_size, tokens, **keywords)
        seq.generation = self.model.generation
        blocks = find(known, seq)[0]
        if self.are_digests_broken:  # a digest names a block only if that is alone
            digests = [self.digest(())]
            blocks = list(known) if len(known) == 1 else []
        pages = [self.model.page(block, 0) for block in blocks]
        assert self.pool.lookup(digests).tolist() == self.ids(takewhile(lambda page: page is not None, pages))

    # ---------------------------------------------------------------- comparing

    def ids(self, table: Iterable[ModelPage | None]) -> list[int]:
        return [-1 if page is None else self.id_of[page] for page in table]

    def digest(self, identity: Identity) -> BlockHash:
        return BlockHash(bytes(32) if self.are_digests_broken else self.format.digest(identity))

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

    def both_return(self, real: Callable[[], Any], model: Callable[[], Any]) -> None:
        """The two results are equal."""
        result = self.both(real, model)
        assert result is not None
        assert result[0] == result[1]

    def check(self) -> None:
        """Compare all that can be seen, and what every published page holds."""
        self.pool.check_integrity()
        self._learn_ids()
        check_pages(self)
        check_counters(self)
        for pair in self.pairs:
            check_sequence(self, pair)

    def look(self) -> None:
        """Compare the maps; this ends the claims whose time has come."""
        check_map(self)

    def listen(self) -> None:
        """Take the events; they tell of all that happened since the last time."""
        if self.are_digests_broken:
            self.pool.take_events()
        else:
            check_events(self)

    def give_everything_back(self) -> None:
        """What is left is evicted in the order of its last release, page by page."""
        for step in self.steps[:]:
            self.abandon(step)
        for pair in [pair for pair in self.pairs if not pair.model.is_closed]:
            self.close(pair)
        self.free(self.raw)
        for fence in self.fences[:]:
            self.release(fence)
        self.check()
        self.look()
        self.listen()
        while any(self.model.evictable(group) for group in self.model.groups):
            self.evict(1)
            self.check()
            self.look()
            self.listen()
        for group in self.pool.stats().groups:
            assert group.num_free_blocks == group.num_blocks
        assert self.pool.stats().num_nodes == 0
        assert self.pool.reset()

    def _learn_ids(self) -> None:
        for pair in self.pairs:
            if not pair.model.is_closed:
                for group, table in enumerate(pair.model.tables):
                    self._learn(table, pair.real.block_ids_of(group).tolist(), group)

    def _learn(self, pages: Sequence_[ModelPage | None], block_ids: list[int], group: int) -> None:
        live = {*self.model.writable, *self.model.published}
        self.id_of = {page: block_id for page, block_id in self.id_of.items() if page in live}
        page_of = {block_id: page for page, block_id in self.id_of.items() if page.group == group}
        assert len(pages) == len(block_ids)
        for page, block_id in zip(pages, block_ids, strict=True):
            if page is None:
                assert block_id == -1, "a page is held in front of a window"
                continue
            assert page.group == group
            assert self.id_of.setdefault(page, block_id) == block_id, "a sequence lost the page it held"
            assert page_of.setdefault(block_id, page) is page, "one page has two meanings"

    def _follow_source(self, blocks: list[Identity], seq: ModelSequence) -> Identity:
        """Any of several longest runs would do; the model takes the one that the pool said it would.

        If it said that there is none, one whose pages are not all there.
        """
        tables = {block: [self.model.page(block, group) for group in self.model.groups] for block in blocks}
        source = self._source_of.get(seq, self._source_of.get(None, -1))
        for block, pages in tables.items():
            if pages[0] is not None and self.id_of.get(pages[0]) == source:
                return block
        return next((block for block, pages in tables.items() if None in pages), blocks[0])

    def _follow_order(self, equals: list[Identity]) -> list[Identity]:
        """Any order of blocks would do whose claims end alike; the model takes the one that the pool took."""
        rank_of = [self.pool.snapshot(group=group).eviction_rank for group in self.model.groups]
        ranks: dict[tuple[Identity, int], int] = {}
        for page in self.model.published:
            if page.identity in equals:
                key, rank = (page.identity, page.group), int(rank_of[page.group][self.id_of[page]])
                ranks[key] = max(ranks.get(key, -1), rank)

        def order(one: Identity, other: Identity) -> int:
            pairs = [(ranks.get((one, g), -1), ranks.get((other, g), -1)) for g in self.model.groups]
            return next((a - b for a, b in pairs if min(a, b) >= 0), pairs[0][0] - pairs[0][1])

        return sorted(equals, key=cmp_to_key(order))

    def _causes(self, pair: Pair) -> list[int]:
        return self.kv[0].causes(
            pair.model.tokens,
            **pair.keywords,
            items_end=pair.items_end,
            generation=pair.model.generation,
        )
