"""The meaning of `BlockPool`, by brute force: no tree, no hash, no native code; short enough to check by eye.

A page's KV depends on everything before it, so a published page is named by all of it: its *identity*. Pages
are interchangeable exactly if their identities are equal; the rest is who holds a page and who let go when.
There are no block ids. Where several pages begin with the same run, ``ModelPool.choose`` decides; which of
several blocks ends first, when their claims end at one time and depth, ``ModelPool.order`` does.
"""
# ruff: noqa: D102 (the verbs are those of BlockPool and documented there)

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pagedkv.errors import OutOfBlocksError, StateError, UsageError
from pagedkv.retention import Breakpoint, Retention
from pagedkv.testing.claims import DEFAULT, Wishes
from pagedkv.testing.identity import (
    NAMELESS,
    Identity,
    Match,
    ModelFence,
    ModelPage,
    ModelSequence,
    ModelStep,
    owner,
)
from pagedkv.testing.pages import ModelPages, require


class ModelPool(ModelPages):
    """The verbs of `BlockPool`; a call that raises has changed nothing.

    The keywords in ``prompt`` are those of `BlockPool.match`: cache_salt, salt_from, extras.
    """

    def __init__(
        self,
        num_blocks: int | list[int],
        block_size: int,
        caching: bool = True,
        granular: bool = True,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        super().__init__(num_blocks, block_size, caching, granular, windows)
        self.admitted: list[ModelSequence] = []  # every prompt ever
        self.fences: list[ModelFence] = []

    @property
    def num_cached_tokens(self) -> int:
        return sum(seq.num_hit_tokens for seq in self.admitted)

    # ---------------------------------------------------------------- requests

    def open(
        self,
        token_ids: Iterable[int],
        *,
        retention: Iterable[Retention] = (),
        breakpoints: Iterable[Breakpoint] = (),
        no_cache: Iterable[tuple[int, int]] = (),
        reuse: bool = True,
        **prompt: Any,
    ) -> ModelSequence:
        seq = ModelSequence(self.block_size, token_ids, **prompt)
        require(len(seq.tokens) > 0, UsageError)
        seq.is_query = reuse
        seq.wishes = Wishes(self.block_size, retention, breakpoints, since=self.now)
        seq.publish_end = min((start for start, _ in no_cache), default=seq.publish_end)
        seq.num_publishable_tokens = min(len(seq.tokens), seq.publish_end) if self.caching else 0
        self.sequences.append(seq)
        for k, block in reversed(list(enumerate(self._attach(seq, reuse=reuse)))):
            self._refresh(block)
            if (claim := seq.wishes.claim(k)) is not None:
                self._raise(block, claim)
        seq.num_hit_tokens = seq.num_cached_tokens
        seq.was_last_found = seq.num_written_tokens > seq.num_cached_tokens
        self.admitted.append(seq)
        return seq

    def fork(self, seq: ModelSequence) -> ModelSequence:
        require(seq.is_idle, StateError)
        self.sequences.append(seq.fork())
        return self.sequences[-1]

    def append(self, seq: ModelSequence, token_ids: Iterable[int]) -> None:
        require(seq.is_idle, StateError)
        seq.tokens.extend(token_ids)

    def truncate(self, seq: ModelSequence, num_tokens: int) -> None:
        require(seq.is_idle, StateError)
        require(0 <= num_tokens <= len(seq.tokens), UsageError)
        if num_tokens <= seq.publish_end < len(seq.tokens):
            seq.publish_end = 2**63  # what must not be published is gone
        self._shorten(seq, num_tokens)

    def no_cache(self, seq: ModelSequence, position: int) -> None:
        require(seq.is_idle and position >= seq.num_committed_tokens, StateError)
        seq.publish_end = min(seq.publish_end, position)

    def preempt(self, seq: ModelSequence) -> None:
        require(seq.is_idle, StateError)
        self._cut(seq, 0)
        seq.is_preempted = seq.is_hit_certain = True

    def expect_reuse(self, seq: ModelSequence) -> None:
        require(seq.is_idle, StateError)
        seq.is_last_turn = False

    def last_turn(self, seq: ModelSequence) -> None:
        require(seq.is_idle, StateError)
        seq.is_last_turn = True

    def close(self, seq: ModelSequence) -> None:
        require(not seq.is_closed, StateError)
        seq.is_closed = True
        if not seq.is_in_step:  # otherwise its pages go when the step ends
            self._leave(seq)

    def fence(self, seqs: list[ModelSequence]) -> ModelFence:
        require(not any(seq.is_closed for seq in seqs), StateError)
        fence = ModelFence([page for seq in reversed(seqs) for page in seq.held()])
        for page in fence.pages:
            page.holders.append(fence)
        self.fences.append(fence)
        return fence

    def release(self, fence: ModelFence) -> None:
        require(fence in self.fences, StateError)
        self.fences.remove(fence)
        self._release(fence.pages, fence)

    # ---------------------------------------------------------------- steps

    def reserve(self, seqs: list[ModelSequence], num_new_tokens: list[int]) -> ModelStep:
        require(0 < len(seqs) == len(set(seqs)) == len(num_new_tokens), UsageError)
        require(all(seq.is_idle for seq in seqs), StateError)
        left = [len(seq.tokens) - seq.num_computed_tokens for seq in seqs]
        require(all(1 <= n <= most for n, most in zip(num_new_tokens, left, strict=True)), UsageError)
        everything = (self, *self.writable, *self.published, *seqs)
        undo = [{k: _copy(v) for k, v in vars(x).items()} for x in everything]
        were_preempted = [seq.is_preempted for seq in seqs]
        ends: list[int] = []
        giving_up: list[ModelSequence] = []  # their runs that end inside a block
        while True:  # what fits cold never fails: runs are given up, the last first, where that frees a page
            for seq in seqs:
                if seq.is_preempted:
                    self._attach(seq, with_run=seq not in giving_up)
            ends = ends or [
                min(len(seq.tokens), seq.num_computed_tokens + n)
                for seq, n in zip(seqs, num_new_tokens, strict=True)
            ]
            for seq, was_preempted in zip(seqs, were_preempted, strict=True):
                if seq in giving_up and not was_preempted:
                    self._lose_run(seq)
            plans = [seq.pages_to_write(end) for seq, end in zip(seqs, ends, strict=True)]
            needed = sum(map(sum, plans))  # in every group
            available = [self.num_free(group) + len(self.evictable(group)) for group in self.groups]
            if not (short := [group for group in self.groups if available[group] < needed]):
                break
            copying = [seq for seq, plan in zip(seqs, plans, strict=True) if plan[0]]
            families = [
                family
                for seq in copying
                for group in reversed(short)
                if (tail := seq.tables[group][-1]) is not None
                and (family := [other for other in copying if other.tables[group][-1] is tail])
                and len(tail.holders) == len(family)  # nobody else needs it
            ]
            for x, fields in zip(everything, undo, strict=True):
                vars(x).update({k: _copy(v) for k, v in fields.items()})
            if not families:
                free = self.num_free(short[0])
                raise OutOfBlocksError("too few pages", needed, free, available[short[0]] - free)
            giving_up += families[-1]
        self.expire()
        self._make_room_in_quotas(seqs, ends)
        counts = [end - seq.num_computed_tokens for seq, end in zip(seqs, ends, strict=True)]
        before = [[table[:] for table in seq.tables] for seq in seqs]
        step = ModelStep(seqs, counts, before, were_preempted, [[] for _ in self.groups])
        for seq, (must_copy, num_pages) in zip(seqs, plans, strict=True):
            seq.step = step
            if seq.num_written_tokens == 0:  # nothing of an older generation yet
                seq.generation = self.generation
            for group, table in enumerate(seq.tables):
                if must_copy:  # the source stays referenced until the step ends
                    source, own = table[-1], self._take(seq, group)
                    assert source is not None
                    step.copies[group].append((source, own, seq.num_written_tokens % self.block_size))
                    table[-1] = own
                table += [self._take(seq, group) for _ in range(num_pages)]
        return step

    def commit(self, step: ModelStep, num_accepted: list[int] | None = None) -> None:
        most, accepted = step.num_new_tokens, step.num_new_tokens if num_accepted is None else num_accepted
        require(step.is_open, StateError)
        in_range = [0 <= a <= n for a, n in zip(accepted, most, strict=False)]
        require(len(accepted) == len(most) and all(in_range), UsageError)
        step.is_open = False
        for seq, tables, count, n in zip(step.sequences, step.tables_before, accepted, most, strict=True):
            seq.is_hit_certain = True
            sources = [page for table in tables for page in table if page and page not in seq.held()]
            if not seq.is_closed:
                seq.num_computed_tokens += count
                seq.num_written_tokens = max(seq.num_written_tokens, seq.num_computed_tokens)
                if count < n:
                    self._shorten(seq, seq.num_computed_tokens)
                self._publish_computed(seq)
                self._leave_windows(seq)
            self._release(sources, seq)  # of copies
            if seq.is_closed:
                self._leave(seq)

    def abandon(self, step: ModelStep) -> None:
        require(step.is_open, StateError)
        step.is_open = False
        for seq, tables, was_preempted in zip(
            step.sequences, step.tables_before, step.preempted, strict=True
        ):
            for table, before in zip(seq.tables, tables, strict=True):
                self._release([page for page in table if page not in before], seq)
            seq.tables, seq.is_preempted = tables, was_preempted
            if seq.is_closed:
                self._leave(seq)
            elif was_preempted:
                self._cut(seq, 0)

    # ---------------------------------------------------------------- inside

    def _attach(self, seq: ModelSequence, *, with_run: bool = True, reuse: bool = True) -> list[Identity]:
        """Refer to what matches; at least the last token is left to compute. Return the whole blocks."""
        found = self._find(seq)
        if not reuse:
            found = Match([], [[] for _ in self.groups], [], 0)
        start = len(found.blocks) * self.block_size
        hit = min(start + found.num_partial_tokens * with_run, len(seq.tokens) - 1)
        seq.tables = found.tables
        for table, source in zip(found.tables, found.sources, strict=False):
            table += [source] if hit > start else []
        seq.num_written_tokens = max(hit, start)
        seq.num_cached_tokens = seq.num_computed_tokens = hit
        seq.num_committed_tokens = start
        seq.is_preempted = False
        self._keep(found.blocks)
        for page in seq.held():
            self._hold(page, seq)
        return found.blocks

    def _lose_run(self, seq: ModelSequence) -> None:
        self._cut(seq, seq.num_written_tokens // self.block_size * self.block_size)
        if not seq.is_hit_certain:
            seq.num_hit_tokens = min(seq.num_hit_tokens, seq.num_written_tokens)
            seq.was_last_found = False

    def _make_room_in_quotas(self, seqs: list[ModelSequence], ends: list[int]) -> None:
        """Whoever takes part and may publish more than the quota leaves evicts the tenant's oldest."""
        for salt, quota in self.quotas.items():
            num_wanted = 0
            for seq, end in zip(seqs, ends, strict=True):
                first = seq.num_committed_tokens // self.block_size
                last = min(end, seq.publish_end, seq.num_nameable_tokens) // self.block_size
                identities = [seq.identity(self.block_size * (k + 1)) for k in range(first, last)]
                num_wanted += sum(owner(identity) == salt for identity in identities)
            theirs = self.pages_of_tenant(salt)
            excess = len(theirs) + num_wanted - quota if any(seq.salt == salt for seq in seqs) else 0
            for page in [page for page in theirs if not page.holders][: max(excess, 0)]:
                self._evict(page, "quota")

    def _publish_computed(self, seq: ModelSequence) -> None:
        end = min(seq.num_computed_tokens, seq.num_nameable_tokens, seq.publish_end) if self.caching else 0
        if self.caching:
            seq.quota_end = 2**62
        for k in range(seq.num_committed_tokens // self.block_size, end // self.block_size):
            first, claim = seq.pages[k], seq.wishes.claim(k)
            # A fork may have published it, when a quota had kept it back before.
            identity = (first and first.identity) or seq.identity((k + 1) * self.block_size)
            own = [page for table in seq.tables if (page := table[k]) and page.identity == NAMELESS]
            salt, is_gone = owner(identity), all(table[k] is None for table in seq.tables)
            is_full = salt in self.quotas and len(self.pages_of_tenant(salt)) >= self.quotas[salt]
            if (first in own and is_full) or (is_gone and identity not in self.known):
                seq.quota_end = k * self.block_size
                break
            self._publish(own, identity, claim)
            seq.num_committed_tokens += self.block_size

    def _leave_windows(self, seq: ModelSequence) -> None:
        """Let go of what no token sees from the next one on."""
        for group, table in enumerate(seq.tables):
            first = self.first_seen(group, seq.looks_back_from)
            self._release(table[:first], seq)
            table[:first] = [None] * first

    def _look_back(self, seq: ModelSequence, blocks: list[Identity]) -> None:
        """Hold again what is seen after a cut, where it is published and still there; else go back."""
        last, held = seq.looks_back_from, len(seq.pages)

        def page_at(group: int, k: int) -> ModelPage | None:
            return seq.tables[group][k] or (self.page(blocks[k], group) if k < len(blocks) else None)

        def is_there(size: int) -> bool:
            position = min(size * self.block_size, last)
            firsts = [self.first_seen(group, position) for group in self.groups]
            return all(
                page_at(g, k) is not None for g, first in enumerate(firsts) for k in range(first, size)
            )

        size = next(size for size in range(held, -1, -1) if is_there(size))
        if size < held:
            self._cut(seq, size * self.block_size)
        for group, table in enumerate(seq.tables):
            first = self.first_seen(group, seq.looks_back_from)
            for k in range(first, len(table)):
                if table[k] is None:
                    table[k] = page = page_at(group, k)
                    assert page is not None
                    self._hold(page, seq)

    def _shorten(self, seq: ModelSequence, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on."""
        if num_tokens < len(seq.tokens):
            ends = range(self.block_size, seq.num_committed_tokens + 1, self.block_size)
            blocks = [seq.identity(end) for end in ends]
            seq.cut_items(num_tokens)
            del seq.tokens[num_tokens:]
            self._cut(seq, num_tokens)
            self._look_back(seq, blocks)

    def _leave(self, seq: ModelSequence) -> None:
        """Let go of everything; after the last turn, what nobody else has used goes first."""
        following: set[Identity] = set()
        for k in range(seq.num_committed_tokens // self.block_size - 1, -1, -1):
            identity = seq.identity((k + 1) * self.block_size)
            own = [table[k] for table in seq.tables]
            pages = [page for page in self.published if page.identity == identity]
            is_alone = all(
                len(page.holders) == (page in own) and (page in own or self.windows[page.group] is not None)
                for page in pages
            )
            others = {block for block in self.known if block[: -self.block_size] == identity} - following
            if not seq.is_last_turn or others or not is_alone or self.claim(identity).priority != DEFAULT:
                break
            following = {identity}
            self.going_first |= following
        self._cut(seq, 0)

    def _cut(self, seq: ModelSequence, num_tokens: int) -> None:
        """Let go of the KV from ``num_tokens`` on."""
        num_pages = -(-num_tokens // self.block_size)
        for table in seq.tables:
            self._release(table[num_pages:], seq)
            del table[num_pages:]
        for length in ("num_written_tokens", "num_computed_tokens", "num_cached_tokens"):
            setattr(seq, length, min(getattr(seq, length), num_tokens))
        whole = num_tokens // self.block_size * self.block_size
        seq.num_committed_tokens = min(seq.num_committed_tokens, whole)


def _copy(value: Any) -> Any:
    """Copy lists, and lists of lists, but nothing else."""
    return [_copy(x) for x in value] if isinstance(value, list) else value
