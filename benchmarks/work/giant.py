"""A pool of ten million blocks, each of them cached: what it takes, and whether size slows anything down.

    python -m benchmarks.work.giant

It is a process of its own, since what a pool takes is read off the memory that the process grows by.
"""

from __future__ import annotations

import functools
import resource
from pathlib import Path
from typing import NamedTuple

from benchmarks import harness, prompts
from benchmarks.harness import Round, Source, quiesce
from benchmarks.table import CHASE, SMALL_POOL
from benchmarks.work import floors
from benchmarks.work.requests import Warm
from benchmarks.work.serving import Leaves, Serving
from pagedkv import BlockPool, __version__

NUM_BLOCKS = 10_000_000

BATCH = 10_000
"""Victims of one call."""


class Giant(NamedTuple):
    """The pool, and what the process grew by for each block."""

    leaves: Leaves
    bytes_a_block: float


def resident_bytes() -> int:
    """Memory of this process that lies in pages of RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@functools.cache
def giant() -> Giant:
    """Make it once; that takes a minute."""
    floors.native()
    before = resident_bytes()
    leaves = Leaves(BlockPool(NUM_BLOCKS), BATCH)
    return Giant(leaves, (resident_bytes() - before) / NUM_BLOCKS)


def memory() -> Source:
    """Say what a block takes besides its page, in bytes; the pool itself knows nothing of pages."""
    while True:
        yield {"pagedkv": [giant().bytes_a_block]}


def evict() -> Source:
    """Evict the longest unused leaves."""
    leaves, chase = giant().leaves, floors.chase(BATCH, NUM_BLOCKS)
    quiesce()
    while True:
        times: Round = {"pagedkv": [], CHASE: []}
        for _ in range(3):
            times["pagedkv"].append(leaves.sample())
            times[CHASE].append(chase() / BATCH)
        yield times


def warm() -> Source:
    """Open a cached prompt of 10,000 tokens, here and in a pool of ordinary size."""
    works = {"pagedkv": Warm(giant().leaves.pool), SMALL_POOL: Warm()}
    quiesce()
    while True:
        times: Round = {}
        for series, work in works.items():
            work.sample()
            times[series] = [work.sample() for _ in range(20)]
        yield times


def churn() -> Source:
    """Serve prompts of 2,000 tokens, half of them shared, here and in a pool of ordinary size."""
    works = {
        "pagedkv": Serving("churn", num_heads=prompts.NUM_HEADS, pool=giant().leaves.pool),
        SMALL_POOL: Serving("churn", num_heads=prompts.NUM_HEADS),
    }
    quiesce()
    while True:
        yield {
            series: [work.sample() for _ in range(prompts.BATCHES_A_ROUND)] for series, work in works.items()
        }


ROWS: harness.Rows = {"memory": memory, "evict_10m": evict, "warm_10m": warm, "churn_10m": churn}


if __name__ == "__main__":
    harness.main({"library": "pagedkv", "version": __version__}, ROWS)
    giant.cache_clear()  # before the interpreter ends, which the pool must not outlive
