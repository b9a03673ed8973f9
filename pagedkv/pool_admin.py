"""What an operator asks of a pool, and tells it: counters, explanations, quotas, eviction, events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pagedkv.checks import check_bool, check_bytes, check_int, check_number, check_ordered
from pagedkv.errors import StateError
from pagedkv.events import KVEvent, event_from_core
from pagedkv.explanation import Explanation
from pagedkv.extras import AnyExtra, check_salt
from pagedkv.hashing import BlockHash
from pagedkv.snapshot import PoolSnapshot
from pagedkv.spec import MAX_BLOCKS
from pagedkv.stats import CacheStats, GroupStats, TenantUsage

if TYPE_CHECKING:
    from pagedkv import _core


class PoolAdmin:
    """The part of :class:`BlockPool` that no request needs."""

    num_blocks: int
    num_blocks_by_group: tuple[int, ...]
    block_size: int
    events: bool
    _core: _core.BlockPool

    @property
    def num_groups(self) -> int:
        """Groups of layers, each with pages and tables of its own."""
        return len(self.num_blocks_by_group)

    # ------------------------------------------------------------------ what is kept

    def set_quota(self, cache_salt: str | bytes, num_blocks: int | None) -> None:
        """Limit the published pages (of the first group) of the tenant with this salt; None lifts the limit.

        Nothing is evicted now. Above the limit a step first evicts the tenant's own oldest blocks, inside
        `reserve`; what has no room even so stays unpublished. Nothing ever fails for it. Blocks before
        `salt_from` belong to nobody.

        A tenant's first limit sorts what it has, in slices between which other calls go on; it holds once the
        call returns.
        """
        limit = None if num_blocks is None else check_int("num_blocks", num_blocks, 0, MAX_BLOCKS)
        self._core.set_quota(check_salt(cache_salt), limit)

    def tenant_usage(self, cache_salt: str | bytes) -> TenantUsage:
        """Return how many published pages belong to the tenant with this salt, and its quota."""
        _, num_blocks, quota = self._core.tenant_usage(check_salt(cache_salt))
        return TenantUsage(num_blocks, quota)

    def tenants(self) -> dict[bytes, TenantUsage]:
        """Return the usage of every tenant that has published pages or a quota, by salt."""
        return {salt: TenantUsage(num_blocks, quota) for salt, num_blocks, quota in self._core.tenants()}

    @property
    def now_s(self) -> float:
        """Seconds since the pool was made."""
        return self._core.now_s

    def advance(self, seconds: float) -> None:
        """Move the clock of a pool with ``clock="manual"``.

        Raises
        ------
        StateError
            For a pool with a monotonic clock.
        UsageError
            Unless `seconds` is finite and not negative.
        """
        self._core.advance(check_number("advance: seconds", seconds))

    def evict(self, num_blocks: int) -> int:
        """Evict up to `num_blocks` pages, the longest unused first, and return how many.

        Of several groups, so many of each, those counted that go with a block; returned is the largest
        number.
        """
        return self._core.evict(check_int("num_blocks", num_blocks, 0, MAX_BLOCKS))

    def reset(self) -> bool:
        """Forget everything cached. False, and no change, while any page is referenced."""
        return self._core.reset()

    def bump_generation(self) -> None:
        """Make all that is cached unmatchable at once, in constant time: after the weights have changed.

        Running sequences keep their pages and finish; what they publish is not found by others either. The
        pages are evicted ahead of all that can be hit.
        """
        self._core.bump_generation()

    def take_events(self) -> list[KVEvent]:
        """Return what changed in the index since the last call, oldest first.

        Changes of more blocks than 4,096, and than twice the blocks of the index, are not kept: the next call
        then returns `AllBlocksCleared` and, stored anew, all that can be hit, so that replaying still gives
        the index exactly. `CacheStats.num_dropped_events` counts what was dropped.

        Raises
        ------
        StateError
            For a pool made without ``events=True``.
        """
        if not self.events:
            raise StateError("take_events: expected a pool with events=True, got one without")
        return [event_from_core(self.block_size, *event) for event in self._core.take_events()]

    def stats(self) -> CacheStats:
        """Return a snapshot of the counters."""
        counts = self._core.stats()
        counts["groups"] = tuple(GroupStats._make(group) for group in counts["groups"])
        return CacheStats(**counts)

    def digest_of(self, block_id: int, *, group: int = 0) -> BlockHash | None:
        """Digest of the block that a page of a group holds; None for a page that is not published."""
        group = check_int("group", group, 0, self.num_groups - 1)
        block_id = check_int("block_id", block_id, 0, self.num_blocks_by_group[group] - 1)
        return self._core.digest_of(block_id, group)

    def check_integrity(self) -> None:
        """Check every invariant from scratch, in time linear in the pool, for which others wait. For tests.

        Raises
        ------
        IntegrityError
        """
        self._core.check_integrity()

    # ------------------------------------------------------------------ the truth

    def explain(
        self,
        token_ids: Any,
        *,
        cache_salt: str | bytes | None = None,
        salt_from: int | None = None,
        extras: Iterable[AnyExtra] | None = (),
        across_tenants: bool = False,
    ) -> Explanation:
        """Say where the cached part of a prompt ends, and why there. Modifies nothing.

        Takes time linear in the number of evictions remembered, which is that of the pool's blocks, but stops
        no other call for long.

        Parameters
        ----------
        token_ids, cache_salt, salt_from, extras
            As for `match`.
        across_tenants : bool
            Also tell whether another salt has the block. For operators: it shows one tenant what others sent.
        """
        found = self._core.explain(
            token_ids, cache_salt, salt_from, extras, check_bool("across_tenants", across_tenants)
        )
        return Explanation(position=found["num_cached_tokens"], **found)

    def snapshot(self, *, group: int = 0) -> PoolSnapshot:
        """Return all pages of a group as arrays, at one moment: for page maps and for ``pagedkv inspect``.

        Ends the retentions whose time is over, as the next `reserve` would, so that it shows what really goes
        next. Pages are copied in slices, between which other calls go on, and what they change is copied
        again until for a moment nothing is left: the snapshot is of that moment. Times of more than 49 days
        are told modulo that.
        """
        return PoolSnapshot(**self._core.snapshot(check_int("group", group, 0, self.num_groups - 1)))

    def lookup(self, digests: Iterable[bytes]) -> npt.NDArray[np.int32]:
        """Find blocks by digest, for routers, tiers and other processes.

        The first call makes the index, which afterwards takes 6 bytes a block, and computes the digests that
        nobody has asked for yet.

        Parameters
        ----------
        digests : iterable of bytes, 32 each
            Of the consecutive blocks of one prompt.

        Returns
        -------
        ndarray [num_found] int32
            A page of the first group of each of the leading blocks that it holds. Not referenced: it may be
            evicted by any later call. A digest that two different blocks share finds neither.
        """
        wanted = [
            check_bytes(f"digests[{i}]", digest, 32, 32)
            for i, digest in enumerate(check_ordered("digests", digests))
        ]
        return self._core.lookup(wanted)
