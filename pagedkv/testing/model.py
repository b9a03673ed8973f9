"""The meaning of `BlockPool`, by brute force: no tree, no hash, no native code; short enough to check by eye.

A page's KV depends on everything before it, so a published page is named by all of it: its *identity*. Pages
are interchangeable exactly if their identities are equal; the rest is who holds a page and who let go when.
There are no block ids. Where several pages begin with the same run, ``ModelPool.choose`` decides.
"""
# ruff: noqa: D102 (the verbs are those of BlockPool and documented there)

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pagedkv.errors import OutOfBlocksError, PagedKVError, StateError, UsageError
from pagedkv.testing.identity import NAMELESS, Identity, Match, ModelPage, ModelSequence, ModelStep, find


class ModelPool:
    """The verbs of `BlockPool`; a call that raises has changed nothing.

    The keywords in ``prompt`` are those of `BlockPool.match`: cache_salt, salt_from, extras.
    """

    def __init__(self, num_blocks: int, block_size: int, caching: bool = True, granular: bool = True) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.caching, self.granular = caching, granular
        self.choose: Callable[[list[ModelPage]], ModelPage] = lambda pages: pages[0]
        self.generation = self.tick = 0
        self.writable: list[ModelPage] = []
        self.published: list[ModelPage] = []  # in order of publication
        self.evicted: list[Identity] = []  # every victim ever, in order

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - len(self.writable) - len(self.published)

    @property
    def evictable(self) -> list[ModelPage]:
        """Published and held by nobody, in the order in which they go."""
        idle = [page for page in self.published if not page.holders]
        return sorted(idle, key=lambda page: (self._is_current(page.identity), page.last_use))

    @property
    def index(self) -> set[Identity]:
        """All blocks that a prompt can hit."""
        return {page.identity for page in self.published if self._is_current(page.identity)}

    def match(self, token_ids: Iterable[int], **prompt: Any) -> Match:
        return self._find(ModelSequence(self.block_size, token_ids, **prompt))

    def touch(self, token_ids: Iterable[int], **prompt: Any) -> int:
        pages = self.match(token_ids, **prompt).pages
        self._use(pages)
        return len(pages) * self.block_size

    def open(self, token_ids: Iterable[int], **prompt: Any) -> ModelSequence:
        seq = ModelSequence(self.block_size, token_ids, **prompt)
        _require(len(seq.tokens) > 0, UsageError)
        self._attach(seq)
        return seq

    def fork(self, seq: ModelSequence) -> ModelSequence:
        _require(seq.is_idle, StateError)
        return seq.fork()

    def no_cache(self, seq: ModelSequence, position: int) -> None:
        _require(seq.is_idle and position >= seq.num_committed_tokens, StateError)
        seq.publish_end = min(seq.publish_end, position)

    def reserve(self, seqs: list[ModelSequence], num_new_tokens: list[int]) -> ModelStep:
        _require(0 < len(seqs) == len(set(seqs)) == len(num_new_tokens), UsageError)
        _require(all(seq.is_idle for seq in seqs), StateError)
        left = [len(seq.tokens) - seq.num_computed_tokens for seq in seqs]
        _require(all(1 <= n <= most for n, most in zip(num_new_tokens, left, strict=True)), UsageError)
        everything = (self, *self.writable, *self.published, *seqs)
        undo = [{k: v[:] if isinstance(v, list) else v for k, v in vars(x).items()} for x in everything]
        were_preempted = [seq.is_preempted for seq in seqs]
        for seq in seqs:
            if seq.is_preempted:
                self._attach(seq)
        wanted = zip(seqs, num_new_tokens, strict=True)
        ends = [min(len(seq.tokens), seq.num_computed_tokens + n) for seq, n in wanted]
        copying = [seq for seq, end in zip(seqs, ends, strict=True) if seq.pages_to_write(end)[0]]
        tails = [seq.pages[-1] for seq in copying]
        for tail in reversed(tails):  # what fits cold never fails: a run goes where that frees a page
            if self._num_missing(seqs, ends) > 0 and len(tail.holders) == tails.count(tail):
                for seq in [seq for seq, page in zip(copying, tails, strict=True) if page is tail]:
                    self._cut(seq, seq.num_written_tokens // self.block_size * self.block_size)
        if (missing := self._num_missing(seqs, ends)) > 0:
            available = self.num_free_blocks + len(self.evictable)
            for x, fields in zip(everything, undo, strict=True):
                vars(x).update(fields)
            free = self.num_free_blocks
            raise OutOfBlocksError("too few pages", missing + available, free, available - free)
        counts = [end - seq.num_computed_tokens for seq, end in zip(seqs, ends, strict=True)]
        step = ModelStep(seqs, counts, [seq.pages[:] for seq in seqs], were_preempted)
        for seq, end in zip(seqs, ends, strict=True):
            seq.step = step
            if seq.num_written_tokens == 0:  # nothing of an older generation yet
                seq.generation = self.generation
            must_copy, num_pages = seq.pages_to_write(end)
            if must_copy:  # the source stays referenced until the step ends
                source, seq.pages[-1] = seq.pages[-1], self._take(seq)
                step.copies.append((source, seq.pages[-1], seq.num_written_tokens % self.block_size))
            seq.pages += [self._take(seq) for _ in range(num_pages)]
        return step

    def commit(self, step: ModelStep, num_accepted: list[int] | None = None) -> None:
        most, accepted = step.num_new_tokens, step.num_new_tokens if num_accepted is None else num_accepted
        _require(step.is_open, StateError)
        in_range = [0 <= a <= n for a, n in zip(accepted, most, strict=False)]
        _require(len(accepted) == len(most) and all(in_range), UsageError)
        step.is_open = False
        for seq, pages, count, n in zip(step.sequences, step.pages_before, accepted, most, strict=True):
            self._release([page for page in pages if page not in seq.pages], seq)  # the source of a copy
            if seq.is_closed:
                self._cut(seq, 0)
                continue
            seq.num_computed_tokens += count
            seq.num_written_tokens = max(seq.num_written_tokens, seq.num_computed_tokens)
            if count < n:
                self._shorten(seq, seq.num_computed_tokens)
            self._publish(seq)

    def abandon(self, step: ModelStep) -> None:
        _require(step.is_open, StateError)
        step.is_open = False
        for seq, pages, was_preempted in zip(step.sequences, step.pages_before, step.preempted, strict=True):
            self._release([page for page in seq.pages if page not in pages], seq)
            seq.pages, seq.is_preempted = pages, was_preempted
            if seq.is_closed or was_preempted:
                self._cut(seq, 0)

    def append(self, seq: ModelSequence, token_ids: Iterable[int]) -> None:
        _require(seq.is_idle, StateError)
        seq.tokens.extend(token_ids)

    def truncate(self, seq: ModelSequence, num_tokens: int) -> None:
        _require(seq.is_idle, StateError)
        _require(0 <= num_tokens <= len(seq.tokens), UsageError)
        if num_tokens <= seq.publish_end < len(seq.tokens):
            seq.publish_end = 2**63  # what must not be published is gone
        self._shorten(seq, num_tokens)

    def preempt(self, seq: ModelSequence) -> None:
        _require(seq.is_idle, StateError)
        self._cut(seq, 0)
        seq.is_preempted = True

    def close(self, seq: ModelSequence) -> None:
        _require(not seq.is_closed, StateError)
        seq.is_closed = True
        if not seq.is_in_step:  # otherwise its pages go when the step ends
            self._cut(seq, 0)

    def allocate(self, num_blocks: int) -> list[ModelPage]:
        if num_blocks > self.num_free_blocks + len(self.evictable):
            raise OutOfBlocksError("too few pages", num_blocks, self.num_free_blocks, len(self.evictable))
        return [self._take(self) for _ in range(num_blocks)]

    def free(self, pages: list[ModelPage]) -> None:
        _require(all(pages.count(page) <= page.holders.count(self) for page in pages), StateError)
        self._release(pages, self)

    def evict(self, num_blocks: int) -> int:
        victims = self.evictable[:num_blocks]
        self.published = [page for page in self.published if page not in victims]
        self.evicted += [page.identity for page in victims]
        return len(victims)

    def reset(self) -> bool:
        if self.writable or len(self.published) > len(self.evictable):
            return False
        self.published = []
        return True

    def bump_generation(self) -> None:
        self._use(self.evictable[::-1])  # among what can't be hit, the order of eviction is kept
        self.generation += 1

    def _find(self, seq: ModelSequence) -> Match:
        seq.generation = self.generation
        pages, sources, run = find(self.published, seq)
        return Match(pages, self.choose(sources), run) if run and self.granular else Match(pages, None, 0)

    def _is_current(self, identity: Identity) -> bool:
        return bool(identity[0] == self.generation)

    def _attach(self, seq: ModelSequence) -> None:
        """Refer to what matches; at least the last token is left to compute."""
        pages, source, run = self._find(seq)
        hit = min(len(pages) * self.block_size + run, len(seq.tokens) - 1)
        seq.pages = pages + ([source] if source and hit > len(pages) * self.block_size else [])
        seq.num_written_tokens = max(hit, len(pages) * self.block_size)
        seq.num_cached_tokens = seq.num_computed_tokens = hit
        seq.is_preempted = False
        for page in seq.pages:
            page.holders.append(seq)

    def _num_missing(self, seqs: list[ModelSequence], ends: list[int]) -> int:
        wanted = sum(sum(seq.pages_to_write(end)) for seq, end in zip(seqs, ends, strict=True))
        return wanted - self.num_free_blocks - len(self.evictable)

    def _take(self, holder: object) -> ModelPage:
        if self.num_free_blocks == 0:
            self.evict(1)
        self.writable.append(ModelPage(holders=[holder]))
        return self.writable[-1]

    def _use(self, pages: list[ModelPage]) -> None:
        """Make the pages of a path the last to go, the deepest of them first."""
        for page in reversed(pages):
            self.tick += 1
            page.last_use = self.tick

    def _release(self, pages: list[ModelPage], holder: object) -> None:
        for page in reversed(pages):  # deepest first
            page.holders.remove(holder)
            if page in self.published:
                self._use([page])
            elif not page.holders:
                self.writable.remove(page)

    def _publish(self, seq: ModelSequence) -> None:
        end = min(seq.num_computed_tokens, seq.num_nameable_tokens, seq.publish_end) if self.caching else 0
        for k, page in enumerate(seq.pages[: end // self.block_size]):
            if page.identity == NAMELESS:
                page.identity = seq.identity((k + 1) * self.block_size)
                self.writable.remove(page)
                self.published.append(page)

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


def _require(condition: bool, error: type[PagedKVError]) -> None:
    if not condition:
        raise error("wrong argument or moment")
