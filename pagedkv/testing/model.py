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
from pagedkv.testing.claims import Wishes
from pagedkv.testing.identity import NAMELESS, ModelFence, ModelSequence, ModelStep, owner
from pagedkv.testing.pages import ModelPages, require


class ModelPool(ModelPages):
    """The verbs of `BlockPool`; a call that raises has changed nothing.

    The keywords in ``prompt`` are those of `BlockPool.match`: cache_salt, salt_from, extras.
    """

    def __init__(self, num_blocks: int, block_size: int, caching: bool = True, granular: bool = True) -> None:
        super().__init__(num_blocks, block_size, caching, granular)
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
        **prompt: Any,
    ) -> ModelSequence:
        seq = ModelSequence(self.block_size, token_ids, **prompt)
        require(len(seq.tokens) > 0, UsageError)
        seq.wishes = Wishes(self.block_size, retention, breakpoints, since=self.now)
        seq.publish_end = min((start for start, _ in no_cache), default=seq.publish_end)
        seq.num_publishable_tokens = min(len(seq.tokens), seq.publish_end) if self.caching else 0
        self._attach(seq)
        for k, page in reversed(list(enumerate(seq.pages))):
            if k < seq.num_written_tokens // self.block_size:
                self._refresh(page.identity)
                if (claim := seq.wishes.claim(k)) is not None:
                    self._raise(page.identity, claim)
        seq.num_hit_tokens = seq.num_cached_tokens
        seq.was_last_found = seq.num_written_tokens > seq.num_cached_tokens
        self.admitted.append(seq)
        return seq

    def fork(self, seq: ModelSequence) -> ModelSequence:
        require(seq.is_idle, StateError)
        return seq.fork()

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

    def close(self, seq: ModelSequence) -> None:
        require(not seq.is_closed, StateError)
        seq.is_closed = True
        if not seq.is_in_step:  # otherwise its pages go when the step ends
            self._cut(seq, 0)

    def fence(self, seqs: list[ModelSequence]) -> ModelFence:
        require(not any(seq.is_closed for seq in seqs), StateError)
        fence = ModelFence([page for seq in reversed(seqs) for page in seq.pages])
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
        undo = [{k: v[:] if isinstance(v, list) else v for k, v in vars(x).items()} for x in everything]
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
            available = self.num_free_blocks + len(self.evictable)
            if (needed := sum(map(sum, plans))) <= available:
                break
            tails = {seq: seq.pages[-1] for seq, plan in zip(seqs, plans, strict=True) if plan[0]}
            loose = [tail for tail in tails.values() if len(tail.holders) == list(tails.values()).count(tail)]
            for x, fields in zip(everything, undo, strict=True):
                vars(x).update({k: v[:] if isinstance(v, list) else v for k, v in fields.items()})
            if not loose:
                free = self.num_free_blocks
                raise OutOfBlocksError("too few pages", needed, free, available - free)
            giving_up += [seq for seq, tail in tails.items() if tail is loose[-1]]
        self.expire()
        self._make_room_in_quotas(seqs, ends)
        counts = [end - seq.num_computed_tokens for seq, end in zip(seqs, ends, strict=True)]
        step = ModelStep(seqs, counts, [seq.pages[:] for seq in seqs], were_preempted)
        for seq, (must_copy, num_pages) in zip(seqs, plans, strict=True):
            seq.step = step
            if seq.num_written_tokens == 0:  # nothing of an older generation yet
                seq.generation = self.generation
            if must_copy:  # the source stays referenced until the step ends
                source, seq.pages[-1] = seq.pages[-1], self._take(seq)
                step.copies.append((source, seq.pages[-1], seq.num_written_tokens % self.block_size))
            seq.pages += [self._take(seq) for _ in range(num_pages)]
        return step

    def commit(self, step: ModelStep, num_accepted: list[int] | None = None) -> None:
        most, accepted = step.num_new_tokens, step.num_new_tokens if num_accepted is None else num_accepted
        require(step.is_open, StateError)
        in_range = [0 <= a <= n for a, n in zip(accepted, most, strict=False)]
        require(len(accepted) == len(most) and all(in_range), UsageError)
        step.is_open = False
        for seq, pages, count, n in zip(step.sequences, step.pages_before, accepted, most, strict=True):
            seq.is_hit_certain = True
            self._release([page for page in pages if page not in seq.pages], seq)  # the source of a copy
            if seq.is_closed:
                self._cut(seq, 0)
                continue
            seq.num_computed_tokens += count
            seq.num_written_tokens = max(seq.num_written_tokens, seq.num_computed_tokens)
            if count < n:
                self._shorten(seq, seq.num_computed_tokens)
            self._publish_computed(seq)

    def abandon(self, step: ModelStep) -> None:
        require(step.is_open, StateError)
        step.is_open = False
        for seq, pages, was_preempted in zip(step.sequences, step.pages_before, step.preempted, strict=True):
            self._release([page for page in seq.pages if page not in pages], seq)
            seq.pages, seq.is_preempted = pages, was_preempted
            if seq.is_closed or was_preempted:
                self._cut(seq, 0)

    # ---------------------------------------------------------------- inside

    def _attach(self, seq: ModelSequence, *, with_run: bool = True) -> None:
        """Refer to what matches; at least the last token is left to compute."""
        pages, source, run = self._find(seq)
        hit = min(len(pages) * self.block_size + run * with_run, len(seq.tokens) - 1)
        seq.pages = pages + ([source] if source and hit > len(pages) * self.block_size else [])
        seq.num_written_tokens = max(hit, len(pages) * self.block_size)
        seq.num_cached_tokens = seq.num_computed_tokens = hit
        seq.num_committed_tokens = len(pages) * self.block_size
        seq.is_preempted = False
        for page in seq.pages:
            self._hold(page, seq)

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
            page, claim = seq.pages[k], seq.wishes.claim(k)
            if page.identity == NAMELESS:
                identity = seq.identity((k + 1) * self.block_size)
                salt = owner(identity)
                if salt in self.quotas and len(self.pages_of_tenant(salt)) >= self.quotas[salt]:
                    seq.quota_end = k * self.block_size
                    break
                self._publish(page, identity, claim)
            elif claim is not None:  # a fork published it, when a quota had kept it back before
                self._raise(page.identity, claim)
            seq.num_committed_tokens += self.block_size

    def _shorten(self, seq: ModelSequence, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on."""
        if num_tokens < len(seq.tokens):
            seq.cut_items(num_tokens)
            del seq.tokens[num_tokens:]
            self._cut(seq, num_tokens)

    def _cut(self, seq: ModelSequence, num_tokens: int) -> None:
        """Let go of the KV from ``num_tokens`` on."""
        num_pages = -(-num_tokens // self.block_size)
        self._release(seq.pages[num_pages:], seq)
        del seq.pages[num_pages:]
        for length in ("num_written_tokens", "num_computed_tokens", "num_cached_tokens"):
            setattr(seq, length, min(getattr(seq, length), num_tokens))
        whole = num_tokens // self.block_size * self.block_size
        seq.num_committed_tokens = min(seq.num_committed_tokens, whole)
