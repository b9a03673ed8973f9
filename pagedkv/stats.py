"""What a pool has done and what it holds."""

from __future__ import annotations

from typing import NamedTuple


class TenantUsage(NamedTuple):
    """What a tenant has: published pages, and how many it may have; None when there is no limit."""

    num_blocks: int
    quota: int | None


class CacheStats(NamedTuple):
    """A snapshot of a pool's counters, taken under its lock.

    Attributes
    ----------
    num_blocks : int
        Pages of the pool; the next four sum to it.
    num_free_blocks, num_writable_blocks, num_committed_blocks, num_evictable_blocks : int
        Pages by state: empty; held and not published; held and published; published and held by nobody.
    num_nodes : int
        Distinct blocks in the index; several pages may hold the same block.
    num_evicted_by : dict of str to int
        Pages evicted since the pool was made, by reason: ``"capacity"`` (`reserve` or `allocate` needed the
        page), ``"request"`` (`evict`), ``"quota"``, ``"reset"``.
    num_prompts : int
        Prompts opened since the pool was made. A preempted sequence is not counted again.
    num_prompt_tokens, num_cached_tokens : int
        Their tokens, and how many of these were found. Each token counts once, whatever is preempted, matched
        again or tried again.
    num_fenced_blocks : int
        Pages that fences hold.
    num_collisions : int
        Blocks that had the digest of a different one; counted once digests are looked up.
    residency_histogram, reuse_gap_histogram : tuple of int, [33]
        How long evicted pages had been published, and how long reused ones had been held by nobody: bucket 0
        counts those below 1 ms, bucket k those of 2^(k − 1) to 2^k ms, each to within 1 ms.
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
    residency_histogram: tuple[int, ...]
    reuse_gap_histogram: tuple[int, ...]

    @property
    def num_evicted_blocks(self) -> int:
        """Pages evicted since the pool was made, for whatever reason."""
        return sum(self.num_evicted_by.values())

    @property
    def hits_by_source(self) -> dict[str, int]:
        """The cached tokens by where they were found; ``"device"`` is the pool itself."""
        return {"device": self.num_cached_tokens}

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found, 0 to 1; 0 before the first prompt."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0
