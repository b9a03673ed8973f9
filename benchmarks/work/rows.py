"""The rows of this library, each with its floor.

python -m benchmarks.work.rows [--rows ROW ...]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from benchmarks import harness, prompts
from benchmarks.harness import Round, Source, quiesce, timed
from benchmarks.prompts import BLOCK_SIZE
from benchmarks.table import CHASE, COMPRESSION, COPY, NATIVE_BATCH, NATIVE_CHAIN, ONE_BY_ONE, SHA
from benchmarks.work import floors
from benchmarks.work.identity import identities
from benchmarks.work.requests import LONG_POOL_BLOCKS, Close, Cold, Decode, Digest, DigestBatch, Path, Warm
from benchmarks.work.serving import Leaves, Queue, Serving
from pagedkv import BlockPool, __version__, _core

NUM_BLOCKS = prompts.NUM_TOKENS // BLOCK_SIZE
NUM_SERVED_BLOCKS = prompts.NUM_SERVED_TOKENS // BLOCK_SIZE
NUM_HEAD_BLOCKS = prompts.NUM_HEAD_TOKENS // BLOCK_SIZE

TOUCHED_BYTES = 64 * 2**20


class Work(Protocol):
    """Something that can be timed again and again."""

    def sample(self) -> float:
        """Microseconds of one unit of it."""


def hot(timers: dict[str, Callable[[], float]], num_samples: int) -> Round:
    """Take some samples of each timer, one timer after the other; a first call only warms up."""
    times: Round = {}
    for series, timer in timers.items():
        timer()
        times[series] = [timer() for _ in range(num_samples)]
    return times


def against(
    make: Callable[[], Work], name: str, make_floor: Callable[[], Callable[[], float]], num_samples: int
) -> Source:
    """Time one piece of work and its floor."""
    timers = {"pagedkv": make().sample, name: make_floor()}
    quiesce()
    while True:
        yield hot(timers, num_samples)


def digest() -> Source:
    """Name the blocks of a prompt: as Python objects, and as the core gives them."""
    work = Digest()
    timers = {
        "pagedkv": work.sample,
        NATIVE_CHAIN: lambda: timed(lambda: _core.sha256_chain(bytes(32), work.tokens, _core.sha256_isa())),
        SHA: floors.sha(NUM_BLOCKS),
    }
    quiesce()
    while True:
        yield hot(timers, 20)


def digest_batch() -> Source:
    """Name the blocks of several prompts in one call, and one by one."""
    work = DigestBatch()
    timers = {
        "pagedkv": work.sample,
        ONE_BY_ONE: work.one_by_one,
        NATIVE_BATCH: lambda: timed(
            lambda: _core.sha256_chain(bytes(32), work.prompts[0], _core.sha256_isa(), len(work.prompts))
        ),
        SHA: floors.sha(len(work.prompts) * NUM_SERVED_BLOCKS),
    }
    quiesce()
    while True:
        yield hot(timers, 10)


def touched(make: Callable[[], Work]) -> Source:
    """Time work of which the caches hold nothing, since 64 MB were touched since the last call."""
    work, walk = make(), floors.chase(NUM_BLOCKS, LONG_POOL_BLOCKS)
    other = np.zeros(TOUCHED_BYTES // 8, np.uint64)
    quiesce()
    while True:
        times: Round = {"pagedkv": [], CHASE: []}
        for _ in range(4):
            for series, timer in (("pagedkv", work.sample), (CHASE, walk)):
                other += 1
                times[series].append(timer())
        yield times


class Eviction:
    """A victim of a pool with 10,000 leaves."""

    NUM_LEAVES, BATCH = 10_000, 500

    def __init__(self) -> None:
        self.sample = Leaves(BlockPool(self.NUM_LEAVES), self.BATCH).sample


def eviction_floor() -> Callable[[], float]:
    """Time a load of a node that may be any of the pool's."""
    walk = floors.chase(Eviction.BATCH, Eviction.NUM_LEAVES)
    return lambda: walk() / Eviction.BATCH


def decode_floor() -> Callable[[], float]:
    """Time the copy of a sequence's row of the block table."""
    copy = floors.copy(4 * NUM_SERVED_BLOCKS * prompts.NUM_DECODING)
    return lambda: copy() / prompts.NUM_DECODING


def told_apart(make: Callable[..., Work], num_tokens: int, num_samples: int) -> Source:
    """Time the same work with a salt, an adapter or media, in turn; a call before each warms up."""
    works = {series: make(**identity) for series, identity in identities(num_tokens).items()}
    compression = floors.compression()
    quiesce()
    while True:
        times: Round = {series: [] for series in works}
        for _ in range(num_samples):
            for series, work in works.items():
                work.sample()
                times[series].append(work.sample())
        times[COMPRESSION] = [compression() for _ in range(5)]
        yield times


def served(num_heads: int, **options: Any) -> Serving:
    """Serve with shared heads, or without."""
    return Serving("churn" if num_heads else "no overlap", num_heads=num_heads, **options)


def waiting_floor(num_heads: int) -> Callable[[], Callable[[], float]]:
    """Time a walk down the cached half of every waiting prompt."""
    num_nodes = num_heads * NUM_HEAD_BLOCKS
    num_times = prompts.NUM_WAITING // num_heads
    return partial(floors.chase, num_nodes, max(num_nodes, LONG_POOL_BLOCKS), num_times)


LONG, SERVED = prompts.NUM_TOKENS, prompts.NUM_SERVED_TOKENS
WALK = partial(floors.chase, NUM_BLOCKS, LONG_POOL_BLOCKS)
CHURN, ALONE = partial(served, prompts.NUM_HEADS), partial(served, 0)
NUM_OWN_BLOCKS = NUM_SERVED_BLOCKS - NUM_HEAD_BLOCKS

ROWS: harness.Rows = {
    "digest": digest,
    "digest_batch": digest_batch,
    "warm": partial(against, Warm, CHASE, WALK, 20),
    "warm_touched": partial(touched, Warm),
    "path": partial(against, Path, CHASE, WALK, 20),
    "path_touched": partial(touched, Path),
    "cold": partial(against, Cold, SHA, partial(floors.sha, NUM_BLOCKS), 5),
    "close": partial(against, Close, CHASE, WALK, 20),
    "decode": partial(against, Decode, COPY, decode_floor, 4),
    "churn": partial(against, CHURN, SHA, partial(floors.sha, NUM_OWN_BLOCKS), prompts.BATCHES_A_ROUND),
    "churn_events": partial(
        against,
        partial(CHURN, events=True),
        SHA,
        partial(floors.sha, NUM_OWN_BLOCKS),
        prompts.BATCHES_A_ROUND,
    ),
    "no_overlap": partial(
        against, ALONE, SHA, partial(floors.sha, NUM_SERVED_BLOCKS), prompts.BATCHES_A_ROUND
    ),
    "evict_10k": partial(against, Eviction, CHASE, eviction_floor, 5),
    "queue_16": partial(against, partial(Queue, 16), CHASE, waiting_floor(16), 5),
    "queue_1024": partial(against, partial(Queue, 1_024), CHASE, waiting_floor(1_024), 5),
    "digest_identity": partial(told_apart, Digest, LONG, 20),
    "warm_identity": partial(told_apart, Warm, LONG, 20),
    "path_identity": partial(told_apart, Path, LONG, 20),
    "cold_identity": partial(told_apart, Cold, LONG, 8),
    "close_identity": partial(told_apart, Close, LONG, 20),
    "decode_identity": partial(told_apart, Decode, SERVED, 2),
    "churn_identity": partial(told_apart, CHURN, SERVED, 8),
    "no_overlap_identity": partial(told_apart, ALONE, SERVED, 8),
    "queue_identity": partial(told_apart, partial(Queue, 16), SERVED, 4),
}


if __name__ == "__main__":
    harness.main({"library": "pagedkv", "version": __version__, "sha256": _core.sha256_isa()}, ROWS)
