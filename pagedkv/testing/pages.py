"""The oracle's pages and its index: what is there, what it is worth, whose it is, and what goes next."""
# ruff: noqa: D102 (the verbs are those of BlockPool and documented there)

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from pagedkv.errors import OutOfBlocksError, PagedKVError, StateError
from pagedkv.retention import Retention
from pagedkv.testing.claims import DEFAULT, Claim, Wishes, combine
from pagedkv.testing.identity import Identity, Match, ModelPage, ModelSequence, find, owner


class ModelPages:
    """The verbs of `BlockPool` that no sequence takes part in."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool = True, granular: bool = True) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.caching, self.granular = caching, granular
        self.choose: Callable[[list[ModelPage]], ModelPage] = lambda pages: pages[0]
        self.order: Callable[[list[Identity]], list[Identity]] = lambda equals: equals
        self.generation = self.tick = 0
        self.now = 0.0
        self.writable: list[ModelPage] = []
        self.published: list[ModelPage] = []  # in order of publication
        self.claims: dict[Identity, Claim] = {}  # on published blocks; DEFAULT without an end if not there
        self.quotas: dict[bytes, int] = {}
        self.num_evicted_by = Counter[str]()
        self.history: list[tuple[Identity, float, str]] = []  # blocks evicted, when and why
        self.num_not_alone = 0  # blocks published beside others: collisions, if all digests were equal
        self.residencies: list[float] = []  # of each page evicted
        self.reuse_gaps: list[float] = []

    # ---------------------------------------------------------------- what there is

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - len(self.writable) - len(self.published)

    @property
    def evictable(self) -> list[ModelPage]:
        """Published and held by nobody, in the order in which they go."""

        def worth(page: ModelPage) -> tuple[bool, int, int]:
            is_current = self.is_current(page.identity)
            return is_current, self.claim(page.identity).priority if is_current else 0, page.last_push

        return sorted((page for page in self.published if not page.holders), key=worth)

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
        pages = [page for page in self.published if owner(page.identity) == salt]
        return sorted(pages, key=lambda page: page.last_use)

    def tenants(self) -> dict[bytes, tuple[int, int | None]]:
        owners = Counter(owner(page.identity) for page in self.published)
        salts = {salt for salt in owners if salt is not None} | self.quotas.keys()
        return {salt: (owners[salt], self.quotas.get(salt)) for salt in salts}

    # ---------------------------------------------------------------- prompts

    def match(self, token_ids: Iterable[int], **prompt: Any) -> Match:
        return self._find(ModelSequence(self.block_size, token_ids, **prompt))

    def touch(self, token_ids: Iterable[int], **prompt: Any) -> int:
        pages = self.match(token_ids, **prompt).pages
        self._use(pages)
        return len(pages) * self.block_size

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
        pages = self.match(token_ids, **prompt).pages
        self._use(pages)
        wishes = Wishes(self.block_size, [Retention(start, end, priority, ttl_s)], since=self.now)
        claims = [wishes.claim(k) for k in range(len(pages))]
        for page, claim in reversed(list(zip(pages, claims, strict=True))):
            if claim is not None:
                self._raise(page.identity, claim)
        return self.block_size * sum(claim is not None for claim in claims)

    # ---------------------------------------------------------------- pages

    def allocate(self, num_blocks: int) -> list[ModelPage]:
        if num_blocks > self.num_free_blocks + len(self.evictable):
            raise OutOfBlocksError("too few pages", num_blocks, self.num_free_blocks, len(self.evictable))
        self.expire()
        return [self._take(self) for _ in range(num_blocks)]

    def free(self, pages: list[ModelPage]) -> None:
        require(all(pages.count(page) <= page.holders.count(self) for page in pages), StateError)
        self._release(pages, self)

    def evict(self, num_blocks: int) -> int:
        self.expire()
        victims = self.evictable[:num_blocks]
        for page in victims:
            self._evict(page, "request")
        return len(victims)

    def reset(self) -> bool:
        victims = self.evictable
        if self.writable or len(self.published) > len(victims):
            return False
        self.generation += 1  # whoever has computed nothing yet belongs to the time after
        for page in victims:
            self._evict(page, "reset")
        return True

    def bump_generation(self) -> None:
        self._push(self.evictable)  # among what can't be hit, the order of eviction is kept
        self.generation += 1

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def expire(self) -> None:
        """End the claims whose time has come: such a block is like any other that was used just now."""
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
            for page in [page for page in self.evictable if owner(page.identity) == salt]:
                page.last_use = self._next_tick()
        self.quotas[salt] = num_blocks

    # ---------------------------------------------------------------- inside

    def _find(self, seq: ModelSequence) -> Match:
        seq.generation = self.generation
        pages, sources, run = find(self.published, seq)
        return Match(pages, self.choose(sources), run) if run and self.granular else Match(pages, None, 0)

    def _hold(self, page: ModelPage, holder: object) -> None:
        if not page.holders:
            self.reuse_gaps.append(self.now - page.used_at)
        page.holders.append(holder)

    def _release(self, pages: list[ModelPage], holder: object) -> None:
        for page in reversed(pages):  # deepest first
            page.holders.remove(holder)
            if page in self.published:
                self._use([page])
            elif not page.holders:
                self.writable.remove(page)

    def _take(self, holder: object) -> ModelPage:
        if self.num_free_blocks == 0:
            self._evict(self.evictable[0], "capacity")
        self.writable.append(ModelPage(holders=[holder]))
        return self.writable[-1]

    def _evict(self, page: ModelPage, reason: str) -> None:
        self.published.remove(page)
        self.num_evicted_by[reason] += 1
        self.residencies.append(self.now - page.published_at)
        if all(other.identity != page.identity for other in self.published):
            self.claims.pop(page.identity, None)
            if self.is_current(page.identity) or reason == "reset":
                self.history = [*self.history, (page.identity[1:], self.now, reason)][-self.num_blocks :]

    def _publish(self, page: ModelPage, identity: Identity, claim: Claim | None) -> None:
        is_new = all(other.identity != identity for other in self.published)
        self.num_not_alone += is_new and any(other.identity[0] == identity[0] for other in self.published)
        page.identity, page.published_at, page.used_at = identity, self.now, self.now
        self.writable.remove(page)
        self.published.append(page)
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

    def _use(self, pages: list[ModelPage]) -> None:
        """Count the pages of a path as used now, the deepest first."""
        self._push(pages[::-1])
        for page in reversed(pages):
            page.last_use, page.used_at = self._next_tick(), self.now

    def _next_tick(self) -> int:
        self.tick += 1
        return self.tick


def require(condition: bool, error: type[PagedKVError]) -> None:
    """Refuse a call."""
    if not condition:
        raise error("wrong argument or moment")
