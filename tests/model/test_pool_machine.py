"""Whatever the caller does, the pool and its meaning hold the same pages and evict the same ones.

After every call the whole visible state is compared with `pagedkv.testing.model.ModelPool`, and every step
runs against noted KV: a page that is served to the wrong tokens, or evicted under a reader, is seen.
"""

from __future__ import annotations

import unittest

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_prompts import (
    ITEMS,
    Prompt,
    fitting,
    prompts,
    retentions,
    salt_positions,
    token_lists,
    wishes,
)
from side_by_side import Pair, SideBySide, StepPair

pytestmark = pytest.mark.timeout(3600)  # the nightly profile takes a quarter of an hour


SPANS_S = st.sampled_from([0.5, 1.0, 2.0, 10.0])


class PoolMachine(RuleBasedStateMachine):
    ALWAYS: frozenset[str] = frozenset()  # habits that every run has
    WINDOWS: st.SearchStrategy[tuple[int | None, ...]] = st.just((None,))  # of the groups of layers

    @initialize(
        data=st.data(),
        num_blocks=st.integers(3, 14),
        block_size=st.sampled_from([4, 4, 4, 16, 1, 3]),
        caching=st.sampled_from([True] * 9 + [False]),
        granular=st.sampled_from([True] * 4 + [False]),
        are_digests_broken=st.sampled_from([False] * 7 + [True]),
        habits=st.sets(st.sampled_from(["wishes", "tenants", "fences", "bumps", "items", "maps", "hints"])),
    )
    def build(
        self,
        data: st.DataObject,
        num_blocks: int,
        block_size: int,
        caching: bool,
        granular: bool,
        are_digests_broken: bool,
        habits: set[str],
    ) -> None:
        """Habits: not every caller does everything, so that what is done goes deeper."""
        windows = data.draw(self.WINDOWS)
        counts = [num_blocks, *(data.draw(st.integers(3, 14)) for _ in windows[1:])]
        self.pools = SideBySide(counts, block_size, caching, granular, are_digests_broken, windows)
        self.habits = habits | self.ALWAYS

    @invariant()
    def pools_agree(self) -> None:
        if hasattr(self, "pools"):
            self.pools.check()
            if "maps" in self.habits:
                self.pools.look()

    def teardown(self) -> None:
        if hasattr(self, "pools"):
            self.pools.give_everything_back()

    # ---------------------------------------------------------------- requests

    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        self._open(data, self._draw_prompt(data))

    @precondition(lambda self: self.pools.pairs)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=5))
    def open_again(self, data: st.DataObject, more: list[int]) -> None:
        """The tokens of another request and some more: duplicates when both are computed side by side."""
        pair = data.draw(st.sampled_from(self.pools.pairs))
        tokens = pair.model.tokens[: 4 * self.pools.model.block_size] + more or [0]
        self._open(data, (tokens, fitting(pair.keywords, len(tokens))))

    @precondition(lambda self: self.pools.pairs)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        self.pools.append(self._pick(data, busy=False), tokens)

    @precondition(lambda self: self.pools.pairs)
    @rule(data=st.data(), regrow=st.booleans())
    def truncate(self, data: st.DataObject, regrow: bool) -> None:
        pair = self._pick(data, busy=False)
        self._truncate(pair, data.draw(st.integers(0, len(pair.model.tokens))), regrow=regrow)

    @precondition(lambda self: self.pools.pairs)
    @rule(data=st.data(), busy=st.sampled_from([False, False, False, None]))
    def fork(self, data: st.DataObject, busy: bool | None) -> None:
        pair = self._pick(data, busy=busy)
        self._make_room_for_one_more(but=pair)
        self.pools.fork(pair)

    @precondition(lambda self: self.pools.pairs)
    @rule(data=st.data())
    def no_cache(self, data: st.DataObject) -> None:
        pair = self._pick(data, busy=False)
        self.pools.no_cache(pair, data.draw(st.integers(0, len(pair.model.tokens) + 4)))

    @precondition(lambda self: self.pools.pairs)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.pools.preempt(self._pick(data, busy=False))

    @precondition(lambda self: self.pools.pairs)
    @rule(data=st.data(), busy=st.sampled_from([None, True, False]))
    def close(self, data: st.DataObject, busy: bool | None) -> None:
        self.pools.close(self._pick(data, busy=busy))

    # ---------------------------------------------------------------- steps

    @precondition(lambda self: self.pools.pairs)
    @rule(data=st.data(), all_tokens=st.booleans())
    def reserve(self, data: st.DataObject, all_tokens: bool) -> None:
        pairs = self._pick_some(data, self.pools.pairs)
        idle = [pair for pair in pairs if pair in self._to_compute()] or pairs[:1]  # the latter is refused
        left = [max(pair.num_uncached_tokens, 1) for pair in idle]
        self.pools.reserve(idle, left if all_tokens else [data.draw(st.integers(1, n)) for n in left])

    @precondition(lambda self: any(not step.is_executed for step in self.pools.steps))
    @rule(data=st.data())
    def execute(self, data: st.DataObject) -> None:
        self.pools.execute(data.draw(st.sampled_from([x for x in self.pools.steps if not x.is_executed])))

    @precondition(lambda self: any(step.is_executed for step in self.pools.steps))
    @rule(data=st.data(), accept_all=st.booleans())
    def commit(self, data: st.DataObject, accept_all: bool) -> None:
        step = data.draw(st.sampled_from([x for x in self.pools.steps if x.is_executed]))
        counts = step.model.num_new_tokens
        self.pools.commit(step, None if accept_all else [data.draw(st.integers(0, n)) for n in counts])

    @precondition(lambda self: self.pools.steps)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        self.pools.abandon(data.draw(st.sampled_from(self.pools.steps)))

    @precondition(lambda self: self._to_compute())
    @rule(data=st.data(), preempt=st.booleans(), keep=st.sampled_from([True, True, False]))
    def compute(self, data: st.DataObject, preempt: bool, keep: bool) -> None:
        """What an engine does most: all that is left of some sequences, in one step."""
        pairs = self._pick_some(data, self._to_compute())
        if preempt:
            self.pools.preempt(data.draw(st.sampled_from(pairs)))
        self._compute(pairs, keep=keep)

    @rule(
        data=st.data(),
        num_requests=st.integers(1, 3),
        close=st.sampled_from([True, True, False]),
    )
    def serve(self, data: st.DataObject, num_requests: int, close: bool) -> None:
        """Whole requests, computed in one step; twins leave duplicate pages."""
        for i in range(num_requests):
            if i > 0 and data.draw(st.booleans()):
                self._open(data, (self.pools.pairs[-1].model.tokens, self.pools.pairs[-1].keywords))
            else:
                self._open(data, self._draw_prompt(data))
        pairs = self.pools.pairs[-num_requests:]
        step = self._compute(pairs)
        for pair in pairs if close or step is None else ():
            self.pools.close(pair)

    @rule(
        data=st.data(),
        num_requests=st.integers(1, 3),
        num_short=st.sampled_from([0, 0, 1, 2]),
        close=st.booleans(),
    )
    def serve_when_pages_are_short(
        self, data: st.DataObject, num_requests: int, num_short: int, close: bool
    ) -> None:
        """Requests with cached runs, so many pages short: runs are given up, or the step is refused."""
        for _ in range(num_requests):
            self._open(data, self._draw_near_a_cached_one(data))
        model, pairs = self.pools.model, self.pools.pairs[-num_requests:]
        needed = sum(sum(pair.model.pages_to_write(len(pair.model.tokens))) for pair in pairs)
        group = data.draw(st.sampled_from(model.groups))
        num_spare = model.num_free(group) + len(model.evictable(group)) - needed
        if num_spare >= 0 and all(pair in self._to_compute() for pair in pairs):
            self.pools.allocate(num_spare + min(num_short, needed), group)
            step = self.pools.reserve(pairs, [pair.num_uncached_tokens for pair in pairs])
            self.pools.free(self.pools.raw)
            if step is not None:
                self.pools.execute(step)
                if close:  # best one that copies: its source is let go as well
                    destinations = [destination for _, destination, _ in step.model.copies[0]]
                    copying = [p for p in pairs if set(destinations) & set(p.model.held())]
                    self.pools.close(data.draw(st.sampled_from(copying or pairs)))
                self.pools.commit(step)

    @precondition(lambda self: "items" in self.habits)
    @rule(data=st.data(), preempt=st.booleans())
    def serve_what_is_left_of_an_item(self, data: st.DataObject, preempt: bool) -> None:
        """A picture is cut, and the same tokens take its place: its KV must not be theirs."""
        tokens = data.draw(st.sampled_from(token_lists(self.pools.model.block_size)))
        item = data.draw(st.sampled_from(ITEMS))
        self._open(data, (list(tokens), fitting({"extras": [item]}, len(tokens))))
        pair = self.pools.pairs[-1]
        if self._compute([pair]) is not None and pair.model.items:
            self._truncate(pair, data.draw(st.sampled_from(list(pair.model.items))) + 1, regrow=True)
            if preempt:
                self.pools.preempt(pair)
            if pair in self._to_compute():
                self._compute([pair])

    @precondition(lambda self: any(pair.model.is_idle for pair in self.pools.pairs))
    @rule(
        data=st.data(),
        num_forks=st.integers(1, 2),
        tokens=st.lists(st.integers(0, 1), min_size=3, max_size=6),
        together=st.booleans(),
    )
    def sample(self, data: st.DataObject, num_forks: int, tokens: list[int], together: bool) -> None:
        """Several samples of one prompt: each writes behind the tail that they share."""
        family = [self._pick(data, busy=False)]
        for _ in range(num_forks):
            self._make_room_for_one_more(but=family[0])
            self.pools.fork(family[0])
            family.append(self.pools.pairs[-1])
        for pair in family:
            self.pools.append(pair, tokens[: data.draw(st.integers(1, 3))])
        for pairs in [family] if together else [[pair] for pair in family]:
            if all(pair in self._to_compute() for pair in pairs):
                self._compute(pairs)

    @precondition(lambda self: "fences" in self.habits and self.pools.pairs)
    @rule(data=st.data(), busy=st.sampled_from([None, True, False]))
    def fence(self, data: st.DataObject, busy: bool | None) -> None:
        first = self._pick(data, busy=busy)
        others = [pair for pair in self.pools.pairs if pair is not first and data.draw(st.booleans())]
        self.pools.fence([first, *others])

    @precondition(lambda self: self.pools.fences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pools.release(data.draw(st.sampled_from(self.pools.fences)))

    # ---------------------------------------------------------------- the index

    @rule(
        data=st.data(),
        what=st.sampled_from(["explain", "explain_near", "lookup", "match_lengths", "look", "listen"]),
    )
    def ask(self, data: st.DataObject, what: str) -> None:
        """What changes nothing; but looking ends claims, and what was told once is not told again."""
        size = self.pools.model.block_size
        if what == "explain":
            self.pools.explain(*self._draw_prompt(data), across_tenants=data.draw(st.booleans()))
        elif what == "explain_near":
            self.pools.explain(*self._draw_near_a_cached_one(data), across_tenants=data.draw(st.booleans()))
        elif what == "lookup":
            self.pools.lookup(*self._draw_a_cached_one(data))
        elif what == "match_lengths":
            queue = data.draw(st.lists(prompts(size), max_size=4))
            self.pools.match_lengths(queue, data.draw(salt_positions(size)))
        elif what == "look":
            self.pools.look()
        else:
            self.pools.listen()

    @precondition(lambda self: "hints" in self.habits and self.pools.pairs)
    @rule(data=st.data(), busy=st.sampled_from([False, False, False, None]), is_last=st.booleans())
    def hint(self, data: st.DataObject, busy: bool | None, is_last: bool) -> None:
        """That a conversation ends, or that it goes on after all; also of requests that have ended."""
        pair = self._pick(data, busy=busy)
        if is_last:
            self.pools.last_turn(pair)
        else:
            self.pools.expect_reuse(pair, data.draw(SPANS_S))
        if is_last and data.draw(st.booleans()):
            self.pools.close(pair)

    @precondition(lambda self: "hints" in self.habits)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        size = self.pools.model.block_size
        self.pools.waiting(data.draw(st.lists(prompts(size), max_size=4)), data.draw(salt_positions(size)))

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        self.pools.touch(*self._draw_a_cached_one(data))

    @precondition(lambda self: "wishes" in self.habits)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        tokens, keywords = self._draw_a_cached_one(data)
        for wish in data.draw(retentions(len(tokens), min_size=1)):
            self.pools.retain(tokens, keywords, wish._asdict())
        if data.draw(st.booleans()):  # block after block comes up to its parent's priority
            for end in range(self.pools.model.block_size, len(tokens) + 1, self.pools.model.block_size):
                self.pools.retain(tokens, keywords, {"end": end})

    @precondition(lambda self: "wishes" in self.habits)
    @rule(data=st.data(), num_turns=st.integers(2, 3), more=st.lists(st.integers(0, 1), max_size=6))
    def converse(self, data: st.DataObject, num_turns: int, more: list[int]) -> None:
        """Each turn hits the one before, within the time that it asked for or later."""
        tokens, keywords = self._draw_prompt(data)
        for _ in range(num_turns):
            self._make_room_for_one_more()
            pair = self.pools.open(tokens, keywords, data.draw(wishes(len(tokens)) | st.just({})))
            self._compute([pair])
            self.pools.close(pair)
            self.pools.advance(data.draw(SPANS_S))
            tokens = tokens + more

    @rule(seconds=SPANS_S)
    def advance(self, seconds: float) -> None:
        self.pools.advance(seconds)

    @precondition(lambda self: "tenants" in self.habits)
    @rule(
        salt=st.sampled_from(["tenant", "tenant", b"other", "stranger"]),
        num_blocks=st.none() | st.integers(0, 6),
    )
    def set_quota(self, salt: str | bytes, num_blocks: int | None) -> None:
        self.pools.set_quota(salt, num_blocks)

    # ---------------------------------------------------------------- pages

    @rule(
        data=st.data(),
        verb=st.sampled_from(["allocate", "allocate", "free", "free", "evict", "reset", "bump", "bump"]),
    )
    def handle_pages(self, data: st.DataObject, verb: str) -> None:
        pools = self.pools
        if verb == "allocate" and len(pools.raw) < min(pools.model.num_blocks) // 2:
            pools.allocate(data.draw(st.integers(0, 4)), data.draw(st.sampled_from(pools.model.groups)))
        elif verb == "free" and pools.raw:  # one may come twice, which is refused
            pools.free(data.draw(st.lists(st.sampled_from(pools.raw), min_size=1, max_size=3)))
        elif verb == "free" and pools.id_of:  # refused as well: these are the pages of sequences
            page = data.draw(st.sampled_from(list(pools.id_of)))
            pools.free([(pools.id_of[page], page)])
        elif verb == "evict":
            pools.evict(data.draw(st.integers(0, 3)))
        elif verb == "reset":
            pools.reset()
        elif verb == "bump" and "bumps" in self.habits:
            pools.bump_generation()

    # ---------------------------------------------------------------- helpers

    def _open(self, data: st.DataObject, prompt: Prompt) -> None:
        self._make_room_for_one_more()
        is_wishful = "wishes" in self.habits and data.draw(st.booleans())
        self.pools.open(*prompt, data.draw(wishes(len(prompt[0]))) if is_wishful else {})

    def _draw_prompt(self, data: st.DataObject) -> Prompt:
        is_tenants = "tenants" in self.habits and data.draw(st.booleans())
        return data.draw(prompts(self.pools.model.block_size, tenants=is_tenants))

    def _make_room_for_one_more(self, but: Pair | None = None) -> None:
        """A pool of a few pages can't serve many."""
        idle = [pair for pair in self.pools.pairs if pair.model.is_idle and pair is not but]
        if len(self.pools.pairs) > 3 and idle:
            self.pools.close(idle[0])

    def _truncate(self, pair: Pair, num_tokens: int, *, regrow: bool) -> None:
        tail = pair.model.tokens[num_tokens:]
        self.pools.truncate(pair, num_tokens)
        if regrow and tail:  # the same tokens, but without the items that covered them
            self.pools.append(pair, tail)

    def _compute(self, pairs: list[Pair], *, keep: bool = True) -> StepPair | None:
        step = self.pools.reserve(pairs, [pair.num_uncached_tokens for pair in pairs])
        if step is not None:
            self.pools.execute(step)
            (self.pools.commit if keep else self.pools.abandon)(step)
        return step

    def _to_compute(self) -> list[Pair]:
        return [pair for pair in self.pools.pairs if pair.model.is_idle and pair.num_uncached_tokens > 0]

    def _pick(self, data: st.DataObject, busy: bool | None) -> Pair:
        """One that is open (and in a step, or in none); if there is none, one to be refused."""
        pairs = [pair for pair in self.pools.pairs if not pair.model.is_closed]
        fit = [pair for pair in pairs if busy is None or busy is pair.model.is_in_step]
        return data.draw(st.sampled_from(fit or self.pools.pairs))

    def _pick_some(self, data: st.DataObject, pairs: list[Pair]) -> list[Pair]:
        """At least one of them, in order or in the opposite order."""
        mask = data.draw(st.integers(1, 2 ** len(pairs) - 1))
        return [p for i, p in enumerate(pairs) if mask >> i & 1][:: data.draw(st.sampled_from([1, -1]))]

    def _draw_a_cached_one(self, data: st.DataObject) -> Prompt:
        """A prompt that begins with a cached one, or is one."""
        if not self.pools.model.published:
            return self._draw_prompt(data)
        page = data.draw(st.sampled_from(self.pools.model.published))
        tokens = [token for token, _, _ in page.identity[1:]] + data.draw(st.sampled_from([[], [3], [0, 0]]))
        return tokens, fitting(self.pools.keywords_of[page], len(tokens))

    def _draw_near_a_cached_one(self, data: st.DataObject) -> Prompt:
        """A prompt that parts from a cached one inside its last block, or soon after."""
        if not self.pools.model.published:
            return self._draw_prompt(data)
        page = data.draw(st.sampled_from(self.pools.model.published))
        tokens = [token for token, _, _ in page.identity[1:]]
        del tokens[len(tokens) - data.draw(st.integers(0, self.pools.model.block_size - 1)) :]
        tokens += data.draw(st.sampled_from([[3], [4], [3, 4, 3, 4, 3]]))
        return tokens, fitting(self.pools.keywords_of[page], len(tokens))


class RetentionMachine(PoolMachine):
    ALWAYS = frozenset({"wishes"})


class TenantMachine(PoolMachine):
    ALWAYS = frozenset({"tenants", "wishes"})


class GenerationMachine(PoolMachine):
    ALWAYS = frozenset({"bumps", "wishes", "fences"})


class HintMachine(PoolMachine):
    ALWAYS = frozenset({"hints", "maps"})


WINDOW = st.integers(1, 12)


class GroupMachine(PoolMachine):
    """Groups that see all, groups that see a window, and both; windows that blocks divide or not."""

    WINDOWS = st.one_of(
        st.tuples(st.none(), WINDOW),
        st.tuples(WINDOW),
        st.tuples(st.none(), WINDOW, WINDOW),
        st.tuples(WINDOW, WINDOW),
        st.tuples(st.none(), st.none()),
    )


def tried(machine: type[PoolMachine]) -> type[unittest.TestCase]:
    """100 runs of 50 steps, 1,000 under the nightly profile; together 30,000 and 300,000 steps."""
    case: type[unittest.TestCase] = machine.TestCase
    case.settings = settings(  # type: ignore[attr-defined]
        settings(),
        stateful_step_count=50,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    return case


# Hypothesis varies what it has tried before, so each of these is sure to be tried from the beginning.
TestPool = tried(PoolMachine)
TestRetention = tried(RetentionMachine)
TestTenants = tried(TenantMachine)
TestGenerations = tried(GenerationMachine)
TestHints = tried(HintMachine)
TestGroups = tried(GroupMachine)
