"""Requests by the hundred: a full pool that serves, its queue, and its eviction."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import Any

import numpy as np

from benchmarks import prompts
from benchmarks.harness import timed
from benchmarks.prompts import BLOCK_SIZE, Prompts
from benchmarks.work.requests import as_tokens, compute, leave, name_all
from pagedkv import BlockPool, Sequence


class Serving:
    """Serve prompts of 2,000 tokens from a full pool, 32 at a time, and name all their blocks."""

    def __init__(
        self,
        name: str,
        *,
        num_heads: int = 0,
        num_blocks: int = prompts.SERVING_BLOCKS,
        events: bool = False,
        pool: BlockPool | None = None,
        **identity: Any,
    ) -> None:
        self.pool, self.prompts, self.identity = (
            pool or BlockPool(num_blocks, events=events),
            Prompts(name),
            identity,
        )
        self.events = events
        self.heads = self.prompts.heads(num_heads)
        self.running: deque[Sequence] = deque()
        num_own_tokens = prompts.NUM_SERVED_TOKENS - bool(num_heads) * prompts.NUM_HEAD_TOKENS
        self.sample(2 * prompts.SERVING_BLOCKS // (num_own_tokens // BLOCK_SIZE))
        assert not self.pool.stats().num_free_blocks

    def sample(self, num_prompts: int = prompts.NUM_SERVED_TOGETHER) -> float:
        """Mean time of a request: open, reserve, commit, digests or events, and the close of the oldest."""
        batch = [as_tokens(tokens) for tokens in self.prompts.served(self.heads, num_prompts)]
        pool, running = self.pool, self.running
        start_ns = time.perf_counter_ns()
        for tokens in batch:
            seq = pool.open(tokens, **self.identity)
            compute(pool, seq)
            name_all(pool, seq)
            running.append(seq)
            if len(running) > prompts.NUM_RUNNING:
                running.popleft().close()
            if self.events:
                pool.take_events()
        return (time.perf_counter_ns() - start_ns) / 1000 / num_prompts


class Queue:
    """Match the lengths of 1,024 waiting requests of 2,000 tokens of which 1,000 are cached."""

    def __init__(self, num_heads: int, **identity: Any) -> None:
        self.pool, rows = BlockPool(131_072), Prompts("queue")
        heads = rows.heads(num_heads)
        # What is cached must look to the extras as the requests do, so it is a request that has ended.
        for head in heads:
            leave(self.pool, as_tokens(head + rows.draw(prompts.NUM_SERVED_TOKENS - len(head))), **identity)
        self.waiting = [as_tokens(tokens) for tokens in rows.served(heads, prompts.NUM_WAITING)]
        self.identity: dict[str, Any] = {}
        if "cache_salt" in identity:
            self.identity["cache_salts"] = [identity["cache_salt"]] * len(self.waiting)
        if "extras" in identity:
            self.identity["extras"] = [identity["extras"]] * len(self.waiting)
        assert (
            self.pool.match_lengths(self.waiting, **self.identity).min() >= prompts.NUM_HEAD_TOKENS // 16 * 16
        )

    def sample(self) -> float:
        """Time of one call."""
        return timed(partial(self.pool.match_lengths, self.waiting, **self.identity))


def add_leaves(pool: BlockPool, blocks: np.ndarray[Any, np.dtype[np.int32]]) -> None:
    """Cache prompts of one block; each is a leaf below the root."""
    seqs = [pool.open(block) for block in blocks]
    pool.commit(pool.reserve(seqs, [len(block) for block in blocks]))
    # They are closed as they go, which takes less than ten million calls of `close`.


class Leaves:
    """Evict from a pool in which every page is a leaf."""

    def __init__(self, pool: BlockPool, batch: int) -> None:
        self.pool, self.batch, self.rng, self.num_made = pool, batch, np.random.default_rng(0), 0
        while self.pool.stats().num_free_blocks:
            self.refill(min(2_000, self.pool.stats().num_free_blocks))

    def refill(self, num_blocks: int) -> None:
        """Make leaves that nobody made before: each begins with a token of its own, in no order."""
        blocks = self.rng.integers(0, 128_000, (num_blocks, BLOCK_SIZE), dtype=np.int32)
        numbers = np.arange(self.num_made, self.num_made + num_blocks, dtype=np.uint64)
        blocks[:, 0] = numbers * 2_654_435_761 % 2**31  # an odd factor: all differ
        add_leaves(self.pool, blocks)
        self.num_made += num_blocks

    def sample(self) -> float:
        """Mean time of a victim."""
        time_us = timed(partial(self.pool.evict, self.batch)) / self.batch
        self.refill(self.batch)
        return time_us
