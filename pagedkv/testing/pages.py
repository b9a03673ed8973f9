"""The oracle's pages and its index: what is there, what it is worth, whose it is, and what goes next."""
# ruff: noqa: D102 (the verbs are those of BlockPool and documented there)

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from pagedkv.errors import OutOfBlocksError, PagedKVError, StateError
from pagedkv.retention import Retention
from pagedkv.testing.claims import DEFAULT, Claim, Wishes, combine
from pagedkv.testing.identity import Identity, Match, ModelPage, ModelSequence, Table, find, owner


class ModelPages:
    """The verbs of `BlockPool` that no sequence takes part in."""

    def __init__(
        self,
        num_blocks: int | list[int],
        block_size: int,
        caching: bool = True,
        granular: bool = True,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.windows, self.block_size = windows, block_size
        self.num_blocks = [num_blocks] * len(windows) if isinstance(num_blocks, int) else num_blocks
        self.groups = range(len(windows))
        self.caching, self.granular = caching, granular
        self.choose: Callable[[list[Identity], ModelSequence], Identity] = lambda blocks, _: blocks[0]
        self.order: Callable[[list[Identity]], list[Identity]] = lambda equals: equals
        self.generation = self.tick = 0
        self.now = 0.0
        self.sequences: list[ModelSequence] = []  # every one ever
        self.writable: list[ModelPage] = []
        self.published: list[ModelPage] = []  # in order of publication
        self.claims: dict[Identity, Claim] = {}  # on published blocks; DEFAULT without an end if not there
        self.going_first: frozenset[Identity] = frozenset()  # blocks of conversations that have ended
        self.quotas: dict[bytes, int] = {}
        self.num_evicted_by = Counter[str]()
        self.history: list[tuple[Identity, float, str]] = []  # blocks evicted, when and why
        self.num_not_alone = 0  # blocks published beside others: collisions, if all digests were equal
        self.residencies: list[float] = []  # of each page evicted
        self.reuse_gaps: list[float] = []

    # ---------------------------------------------------------------- what there is

    def num_free(self, group: int = 0) -> int:
        in_use = [page for page in (*self.writable, *self.published) if page.group == group]
        return self.num_blocks[group] - len(in_use)

    def evictable(self, group: int = 0) -> list[ModelPage]:
        """Return what is published and held by nobody, in the order in which it goes."""

        def worth(page: ModelPage) -> tuple[bool, int, int]:
            is_current, priority = self.is_current(page.identity), self.claim(page.identity).priority
            is_first = not is_current or (page.goes_first and priority == DEFAULT)
            return is_current, 0 if is_first else priority, page.last_push

        theirs = [page for page in self.published if page.group == group and not page.holders]
        return sorted(theirs, key=worth)

    @property
    def known(self) -> set[Identity]:
        """Blocks with pages or held by a request that found or published them, and all blocks before them."""
        last = [page.identity for page in self.published]
        last += [seq.identity(n) for seq in self.sequences if (n := seq.num_committed_tokens)]
        size = self.block_size
        return {block[:end] for block in last for end in range(1 + size, len(block) + 1, size)}

    def first_seen(self, group: int, position: int) -> int:
        """Return the first block that the token at a position sees, and all behind it."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - (window - 1)) // self.block_size

    @property
    def index(self) -> set[Identity]:
        """All blocks that a prompt can hit."""
        return {page.identity for page in self.published if self.is_current(page.identity)}

    def is_current(self, identity: Identity) -> bool:
        return bool(identity[0] == self.generation)

    def claim(self, identity: Identity) -> Claim:
        return self.claims.get(identity, Claim())

    def pages_of_tenant(self, salt: bytes | None) -> list[ModelPage]:
        """Its published pages, the one released or touched longest ago first."""
        first = [page for page in self.published if page.group == 0]
        pages = [page for page in first if owner(page.identity) == salt]
        return sorted(pages, key=lambda page: page.last_use)

    def tenants(self) -> dict[bytes, tuple[int, int | None]]:
        owners = Counter(owner(page.identity) for page in self.published if page.group == 0)
        salts = {salt for salt in owners if salt is not None} | self.quotas.keys()
        return {salt: (owners[salt], self.quotas.get(salt)) for salt in salts}

    # ---------------------------------------------------------------- prompts

    def match(self, token_ids: Iterable[int], **prompt: Any) -> Match:
        return self._find(ModelSequence(self.block_size, token_ids, **prompt))

    def touch(self, token_ids: Iterable[int], **prompt: Any) -> int:
        found = self.match(token_ids, **prompt)
        self._keep(found.blocks)
        for table in found.tables:
            self._use(table)
        return len(found.blocks) * self.block_size

    def waiting(self, prompts: list[tuple[list[int], dict[str, Any]]]) -> list[int]:
        return [self.touch(tokens, **prompt) for tokens, prompt in reversed(prompts)][::-1]

    def retain(
        self,
        token_ids: Iterable[int],
        *,
        priority: int = 70,
        ttl_s: float | None = None,
        start: int = 0,
        end: int | None = None,
        **prompt: Any,
    ) -> int:
        found = self.match(token_ids, **prompt)
        self._keep(found.blocks)
        for table in found.tables:
            self._use(table)
        wishes = Wishes(self.block_size, [Retention(start, end, priority, ttl_s)], since=self.now)
        claims = [wishes.claim(k) for k in range(len(found.blocks))]
        for block, claim in reversed(list(zip(found.blocks, claims, strict=True))):
            if claim is not None:
                self._raise(block, claim)
        return self.block_size * sum(claim is not None for claim in claims)

    # ---------------------------------------------------------------- pages

    def allocate(self, num_blocks: int, group: int = 0) -> list[ModelPage]:
        free, evictable = self.num_free(group), len(self.evictable(group))
        if num_blocks > free + evictable:
            raise OutOfBlocksError("too few pages", num_blocks, free, evictable)
        self.expire()
        return [self._take(self, group) for _ in range(num_blocks)]

    def free(self, pages: list[ModelPage]) -> None:
        require(all(pages.count(page) <= page.holders.count(self) for page in pages), StateError)
        self._release(pages, self)

    def evict(self, num_blocks: int) -> int:
        self.expire()
        before = [len(self.evictable(group)) for group in self.groups]
        gone = [0 for _ in self.groups]
        for group in self.groups:  # what goes with a block counts for its group
            while (left := self.evictable(group)) and before[group] - len(left) < num_blocks:
                self._evict(left[0], "request")
            gone[group] = min(num_blocks, before[group] - len(self.evictable(group)))
        return max(gone)

    def reset(self) -> bool:
        if any(page.holders for page in (*self.writable, *self.published)):
            return False
        self.generation += 1  # whoever has computed nothing yet belongs to the time after
        for group in self.groups:
            for page in self.evictable(group):
                if page in self.published:  # and didn't go with another one
                    self._evict(page, "reset")
        return True

    def bump_generation(self) -> None:
        for group in self.groups:
            self._push(self.evictable(group))  # among what can't be hit, the order of eviction is kept
        self.generation += 1

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def expire(self) -> None:
        """End the claims whose time has come: such a block is like any other that was used just now."""
        self._forget()
        due = [identity for identity, claim in self.claims.items() if claim.until <= self.now]
        for identity in sorted(self.order(due), key=lambda i: (self.claim(i).until, -len(i))):
            claim = self.claim(identity)
            if claim.until > self.now:
                continue  # raised for the sake of one behind it
            for end in range(len(identity), 1, -self.block_size):
                is_low = claim.priority < DEFAULT and self.claim(identity[:end]).priority <= DEFAULT
                if end < len(identity) and not is_low:
                    break
                self.claims[identity[:end]] = Claim()
                self._push_block(identity[:end])

    def set_quota(self, cache_salt: str | bytes, num_blocks: int | None) -> None:
        salt = cache_salt.encode() if isinstance(cache_salt, str) else cache_salt
        if num_blocks is None:
            self.quotas.pop(salt, None)
            return
        if salt not in self.quotas:  # what is there goes in the order of eviction
            for page in [page for page in self.evictable() if owner(page.identity) == salt]:
                page.last_use = self._next_tick()
        self.quotas[salt] = num_blocks

    # ---------------------------------------------------------------- inside

    def _find(self, seq: ModelSequence) -> Match:
        seq.generation = self.generation
        known, candidates, run = find(self.known, seq)
        last = max(0, len(seq.tokens) - 1)  # is computed again

        def needs(size: int) -> list[list[Identity]]:
            position = min(size * self.block_size, last)
            return [known[self.first_seen(group, position) : size] for group in self.groups]

        def is_there(size: int) -> bool:
            return all(self.page(block, g) for g, blocks in enumerate(needs(size)) for block in blocks)

        size = next(size for size in range(len(known), -1, -1) if is_there(size))
        tables: list[Table] = []
        for group, blocks in enumerate(needs(size)):
            tables.append([None] * (size - len(blocks)))
            tables[-1] += [self.page(block, group) for block in blocks]
        if run and self.granular and size == len(known):
            source = self.choose(candidates, seq)
            sources = [page for group in self.groups if (page := self.page(source, group))]
            if len(sources) == len(self.groups):
                return Match(known, tables, sources, run)
        return Match(known[:size], tables, [], 0)

    def page(self, identity: Identity, group: int) -> ModelPage | None:
        """Return the page of a block that was published first."""
        same = (page for page in self.published if page.identity == identity and page.group == group)
        return next(same, None)

    def _hold(self, page: ModelPage, holder: object) -> None:
        if not page.holders:
            self.reuse_gaps.append(self.now - page.used_at)
        page.holders.append(holder)

    def _release(self, pages: Iterable[ModelPage | None], holder: object) -> None:
        for page in reversed([page for page in pages if page is not None]):  # deepest first
            page.holders.remove(holder)
            if page in self.published:
                self._use([page])
            elif not page.holders:
                self.writable.remove(page)

    def _take(self, holder: object, group: int) -> ModelPage:
        if self.num_free(group) == 0:
            self._evict(self.evictable(group)[0], "capacity")
        self.writable.append(ModelPage(group, holders=[holder]))
        return self.writable[-1]

    def _evict(self, page: ModelPage, reason: str) -> None:
        going = [page]
        others = [other for other in self.published if other is not page and other.identity == page.identity]
        if self.windows[page.group] is None and all(other.group != page.group for other in others):
            going += others  # what no group with full attention has, nobody can use
        for each in going:
            assert not each.holders
            self.published.remove(each)
            self.num_evicted_by[reason] += 1
            self.residencies.append(self.now - each.published_at)
        is_gone = all(other.identity != page.identity for other in self.published)
        if is_gone and (self.is_current(page.identity) or reason == "reset"):
            self.history = [*self.history, (page.identity[1:], self.now, reason)][-self.num_blocks[0] :]
        self._forget()

    def _forget(self) -> None:
        """Drop what is known of blocks that are not there any more."""
        if self.claims or self.going_first:
            known = self.known
            self.claims = {identity: claim for identity, claim in self.claims.items() if identity in known}
            self.going_first &= known

    def _keep(self, blocks: list[Identity]) -> None:
        """Somebody has use for them after all."""
        self.going_first -= frozenset(blocks)

    def _publish(self, pages: list[ModelPage], identity: Identity, claim: Claim | None) -> None:
        is_new = identity not in self.known
        self.num_not_alone += is_new and any(other[0] == identity[0] for other in self.known)
        for page in pages:
            page.identity, page.published_at, page.used_at = identity, self.now, self.now
            self.writable.remove(page)
            self.published.append(page)
        self._keep([identity])
        if is_new:
            self.claims[identity] = claim = claim or Claim()
        if claim is not None:
            self._raise(identity, claim)

    def _raise(self, identity: Identity, claim: Claim) -> None:
        """Add a claim to a block and all before it; among equals, what comes before goes later."""
        pushed: int | None = None
        for end in range(len(identity), 1, -self.block_size):
            before = self.claim(identity[:end])
            self.claims[identity[:end]] = after = combine(before, claim)
            if after.priority != before.priority or after.priority == pushed:
                self._push_block(identity[:end])
                pushed = after.priority

    def _refresh(self, identity: Identity) -> None:
        claim = self.claim(identity)
        if claim.ttl > 0 and claim.until > self.now:
            self.claims[identity] = claim._replace(until=max(claim.until, self.now + claim.ttl))

    def _push_block(self, identity: Identity) -> None:
        if self.is_current(identity):  # what can't be hit goes in the order of release
            self._push([page for page in self.published if page.identity == identity])

    def _push(self, pages: list[ModelPage]) -> None:
        """Make pages the last to go among their equals, in this order."""
        for page in pages:
            page.last_push = self._next_tick()
            page.goes_first = page.identity in self.going_first

    def _use(self, table: Iterable[ModelPage | None]) -> None:
        """Count the pages of a path as used now, the deepest first."""
        pages = [page for page in table if page is not None][::-1]
        self._push(pages)
        for page in pages:
            page.last_use, page.used_at = self._next_tick(), self.now

    def _next_tick(self) -> int:
        self.tick += 1
        return self.tick


def require(condition: bool, error: type[PagedKVError]) -> None:
    """Refuse a call."""
    if not condition:
        raise error("wrong argument or moment")
