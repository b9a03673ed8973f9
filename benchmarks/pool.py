"""Time the pool's verbs as an engine calls them, on one core.

Every figure is the median of several rounds, called from Python with numpy int32 tokens. The last columns
give what others were measured at on a machine of this kind (vLLM 0.32, SGLang 0.5.23) and how many times
faster this is; those were measured in other runs, so read the ratio as an order of magnitude.

    python benchmarks/pool.py [--rows NAME ...]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from pagedkv import BlockPool, Sequence, hash_blocks

NUM_TOKENS = 10_000
VOCABULARY = 50_000


class Row(NamedTuple):
    """One line of the table: what was done, how long one of it took, and what others took."""

    work: str
    unit: str
    microseconds: float
    vllm_microseconds: float | None = None
    sglang_microseconds: float | None = None


def draw(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    """Tokens of a prompt."""
    return rng.integers(0, VOCABULARY, num_tokens, dtype=np.int32)


def timed(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def repeat(call: Callable[[], object], rounds: int = 51) -> float:
    """Median microseconds of a call."""
    return median(timed(call) for _ in range(rounds))


def compute(pool: BlockPool, seq: Sequence) -> None:
    """Run a sequence's tokens through one step, as if their K/V was written."""
    step = pool.reserve(seq, seq.num_uncached_tokens)
    pool.commit(step)


def fill(pool: BlockPool, tokens: np.ndarray) -> None:
    """Cache a prompt."""
    with pool.open(tokens) as seq:
        compute(pool, seq)


def digests(rng: np.random.Generator) -> Iterator[Row]:
    """Hash a prompt."""
    tokens = draw(rng, NUM_TOKENS)
    yield Row("digest of 10,000 tokens", "prompt", repeat(lambda: hash_blocks(tokens)), 1298, 127)


def warm(rng: np.random.Generator) -> Iterator[Row]:
    """Open a prompt that is cached whole."""
    pool = BlockPool(16_384)
    tokens = draw(rng, NUM_TOKENS)
    fill(pool, tokens)

    def one() -> tuple[float, float]:
        start = time.perf_counter()
        seq = pool.open(tokens)
        middle = time.perf_counter()
        seq.close()
        return (middle - start) * 1e6, (time.perf_counter() - middle) * 1e6

    times = [one() for _ in range(101)]
    work = "open, warm, 10,000 tokens, one earlier prompt"
    yield Row(work, "prompt", median(t for t, _ in times), 1929, 23)
    yield Row("close 625 blocks", "prompt", median(t for _, t in times), 87)

    pool = BlockPool(65_536)
    for end in range(100, NUM_TOKENS + 1, 100):  # each request adds 100 tokens, and a branch
        fill(pool, np.concatenate([tokens[:end], draw(rng, 50)]))
    fill(pool, tokens)
    work = "the same along a path built by 100 requests, with close"
    yield Row(work, "prompt", repeat(lambda: pool.open(tokens).close()), 1929, 79)


def cold(rng: np.random.Generator) -> Iterator[Row]:
    """Open, reserve and commit a prompt that nobody sent before, with digests."""
    pool = BlockPool(16_384)
    prompts = [draw(rng, NUM_TOKENS) for _ in range(60)]

    def one(tokens: np.ndarray) -> Sequence:
        seq = pool.open(tokens)
        compute(pool, seq)
        _ = seq._core.block_hashes()
        return seq

    times = []
    for tokens in prompts:
        start = time.perf_counter()
        seq = one(tokens)
        times.append((time.perf_counter() - start) * 1e6)
        seq.close()
    yield Row("open + reserve + commit, cold, digests included", "prompt", median(times[30:]), 2165)


def decode(rng: np.random.Generator) -> Iterator[Row]:
    """One decode step of 256 sequences."""
    pool = BlockPool(65_536)
    seqs = [pool.open(draw(rng, 2000)) for _ in range(256)]
    for seq in seqs:
        compute(pool, seq)
    tokens, ones = [7] * len(seqs), [1] * len(seqs)

    def step() -> None:
        pool.append(seqs, tokens)
        reserved = pool.reserve(seqs, ones)
        pool.prepare(reserved)
        pool.commit(reserved)

    yield Row("decode step, 256 sequences of 2,000 tokens", "sequence", repeat(step) / len(seqs), 6.4)


def churn(rng: np.random.Generator) -> Iterator[Row]:
    """Serve prompts from a full pool."""
    for work, shared, events, vllm, sglang in (
        ("churn, 2,000 tokens, half shared, full pool", 1000, False, 555, 105),
        ("the same with events", 1000, True, 1061, None),
        ("no overlap, 2,000 tokens, full pool", 0, False, 598, None),
    ):
        pool = BlockPool(4096, events=events)
        heads = [draw(rng, 1000) for _ in range(16)]
        times = []
        for i in range(300):
            tokens = np.concatenate([heads[i % 16], draw(rng, 1000)]) if shared else draw(rng, 2000)
            start = time.perf_counter()
            seq = pool.open(tokens)
            compute(pool, seq)
            _ = seq._core.block_hashes()
            seq.close()
            if events:
                pool.take_events()
            times.append((time.perf_counter() - start) * 1e6)
        yield Row(work, "request", median(times[100:]), vllm, sglang)


def eviction(rng: np.random.Generator) -> Iterator[Row]:
    """Evict leaves, many in one call."""
    for num_leaves in (10_000, 1_000_000):
        pool = BlockPool(num_leaves, block_size=16)
        for _ in range(num_leaves // 2000):
            blocks = draw(rng, 16 * 2000).reshape(2000, 16)
            seqs = [pool.open(block) for block in blocks]
            pool.commit(pool.reserve(seqs, [seq.num_uncached_tokens for seq in seqs]))
            for seq in seqs:
                seq.close()
        batch = num_leaves // 20
        time_us = repeat(partial(pool.evict, batch), 10) / batch
        yield Row(f"evict, {num_leaves:,} leaves, mean of a batch", "page", time_us, None, 259)


def queue(rng: np.random.Generator) -> Iterator[Row]:
    """Match the lengths of a waiting queue."""
    for num_prefixes, sglang in ((16, 15_000), (1024, None)):
        pool = BlockPool(100_000)
        heads = [draw(rng, 1000) for _ in range(num_prefixes)]
        for head in heads:
            fill(pool, head)
        prompts = [np.concatenate([heads[i % num_prefixes], draw(rng, 1000)]) for i in range(1024)]
        time_us = repeat(partial(pool.match_lengths, prompts), 21)
        yield Row(
            f"match lengths of 1,024 prompts, {num_prefixes:,} prefixes", "queue", time_us, None, sglang
        )


ROWS = {f.__name__: f for f in (digests, warm, cold, decode, churn, eviction, queue)}


def ratio(other: float | None, ours: float) -> str:
    """How many times faster, with what the other took."""
    return "" if other is None else f"{other:,.4g} µs, {other / ours:,.3g}×"


def main() -> None:
    """Measure the rows asked for and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS), help="which rows to measure")
    names = parser.parse_args().rows
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    table = Table(title="the pool, one core, medians")
    for heading in ("work", "µs", "a", "vLLM, elsewhere", "SGLang, elsewhere"):
        table.add_column(heading, justify="left" if heading in ("work", "a") else "right")
    for name in names:
        for row in ROWS[name](np.random.default_rng(0)):
            ours = row.microseconds
            others = ratio(row.vllm_microseconds, ours), ratio(row.sglang_microseconds, ours)
            table.add_row(row.work, f"{ours:,.4g}", row.unit, *others)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
