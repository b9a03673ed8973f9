"""What a pool has done and what it holds."""

from __future__ import annotations

from typing import NamedTuple


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
    num_evicted_blocks : int
        Pages evicted since the pool was made.
    num_prompts : int
        Prompts opened since the pool was made. A preempted sequence is not counted again.
    num_prompt_tokens, num_cached_tokens : int
        Their tokens, and how many of these were found.
    """

    num_blocks: int
    num_free_blocks: int
    num_writable_blocks: int
    num_committed_blocks: int
    num_evictable_blocks: int
    num_nodes: int
    num_evicted_blocks: int
    num_prompts: int
    num_prompt_tokens: int
    num_cached_tokens: int

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found, 0 to 1; 0 before the first prompt."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0
