"""What a pool has done and what it holds, as numbers and as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pagedkv.prometheus import Metrics

if TYPE_CHECKING:
    from prometheus_client import Metric


class TenantUsage(NamedTuple):
    """What a tenant has: published pages, and how many it may have; None when there is no limit."""

    num_blocks: int
    quota: int | None


class GroupStats(NamedTuple):
    """Pages of one group: those of the pool, by state, and those that fences hold; see `CacheStats`."""

    num_blocks: int
    num_free_blocks: int
    num_writable_blocks: int
    num_committed_blocks: int
    num_evictable_blocks: int
    num_fenced_blocks: int


class CacheStats(NamedTuple):
    """A snapshot of a pool's counters, taken under its lock.

    Attributes
    ----------
    num_blocks : int
        Pages of the pool; the next four sum to it. Of several groups, those of the first; see `groups`.
    num_free_blocks, num_writable_blocks, num_committed_blocks, num_evictable_blocks : int
        Pages by state: empty; held and not published; held and published; published and held by nobody.
    num_nodes : int
        Distinct blocks in the index; several pages may hold the same block.
    num_evicted_by : dict of str to int
        Pages of all groups evicted since the pool was made, by reason: ``"capacity"`` (`reserve` or
        `allocate` needed the page), ``"request"`` (`evict`), ``"quota"``, ``"reset"``.
    num_prompts : int
        Prompts opened since the pool was made. A preempted sequence is not counted again.
    num_prompt_tokens, num_cached_tokens : int
        Their tokens, but for those opened with ``reuse=False``, and how many of these were found. Each token
        counts once, whatever is preempted, matched again or tried again.
    num_fenced_blocks : int
        Pages that fences hold.
    num_collisions : int
        Blocks that had the digest of a different one; counted once digests are looked up.
    num_dropped_events : int
        Changes of single blocks that `take_events` came too late for; it then tells of all that is there.
    residency_histogram, reuse_gap_histogram : tuple of int, [33]
        How long evicted pages had been published, and how long reused ones had been held by nobody: bucket 0
        counts those below 1 ms, bucket k those of 2^(k − 1) to 2^k ms, each to within 1 ms.
    groups : tuple of GroupStats
    """

    num_blocks: int
    num_free_blocks: int
    num_writable_blocks: int
    num_committed_blocks: int
    num_evictable_blocks: int
    num_nodes: int
    num_evicted_by: dict[str, int]
    num_prompts: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_fenced_blocks: int
    num_collisions: int
    num_dropped_events: int
    residency_histogram: tuple[int, ...]
    reuse_gap_histogram: tuple[int, ...]
    groups: tuple[GroupStats, ...]

    @property
    def num_evicted_blocks(self) -> int:
        """Pages evicted since the pool was made, for whatever reason."""
        return sum(self.num_evicted_by.values())

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pages that somebody holds, 0 to 1; what is only cached can be had at any time."""
        return (self.num_writable_blocks + self.num_committed_blocks) / self.num_blocks

    @property
    def hits_by_source(self) -> dict[str, int]:
        """The cached tokens by where they were found; ``"device"`` is the pool itself."""
        return {"device": self.num_cached_tokens}

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found, 0 to 1; 0 before the first prompt."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


class HasStats(Protocol):
    """What a collector reads: a pool, or a cache."""

    def stats(self) -> CacheStats:
        """Return a snapshot of the counters."""


class CacheCollector:
    """A cache's counters for Prometheus, read when somebody asks for them.

    A process that serves metrics already takes it in so::

        from prometheus_client import REGISTRY

        REGISTRY.register(CacheCollector(cache))

    Parameters
    ----------
    source : PagedKVCache or BlockPool
    prefix, labels
        As for :class:`Metrics`.

    Raises
    ------
    BackendUnavailableError, UsageError
        As :class:`Metrics` does.
    """

    def __init__(
        self, source: HasStats, *, prefix: str = "pagedkv", labels: Mapping[str, str] | None = None
    ) -> None:
        self._source = source
        self._metrics = Metrics(prefix, labels)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, of one snapshot."""
        stats, make = self._source.stats(), self._metrics
        queries, hits = stats.num_prompt_tokens, stats.num_cached_tokens
        yield make.counter("prefix_cache_queries", "Prompt tokens that were looked up.", queries)
        yield make.counter("prefix_cache_hits", "Prompt tokens that were found.", hits)
        yield make.counters(
            "prompt_tokens_cached_by_source",
            "Prompt tokens that were found, by where: device, or a tier below it.",
            "source",
            stats.hits_by_source,
        )
        yield make.gauge(
            "kv_cache_usage_perc", "Share of the pages that requests hold, 0 to 1.", stats.kv_cache_usage
        )
        states = ("free", "writable", "committed", "evictable")
        yield make.gauges(
            "kv_cache_blocks",
            "Pages by state.",
            "state",
            {state: getattr(stats, f"num_{state}_blocks") for state in states},
        )
        yield make.counters(
            "kv_cache_evictions", "Pages that were evicted, by reason.", "reason", stats.num_evicted_by
        )
        # Bucket k ends at 2^k ms; the last one of the pool has no end.
        bounds = [2**k / 1000 for k in range(len(stats.residency_histogram) - 1)]
        yield make.histogram(
            "kv_block_lifetime_seconds",
            "From a page's publication to its eviction.",
            bounds,
            stats.residency_histogram,
            None,
        )
        yield make.histogram(
            "kv_block_reuse_gap_seconds",
            "How long a page that is used again had been held by nobody.",
            bounds,
            stats.reuse_gap_histogram,
            None,
        )
