"""Our engine with the model of the demo: the rows of whole requests, each with what bounds it.

    python -m benchmarks.work.engine > engine.json

BENCH_THREADS says how many threads torch and the kernels take.
"""

from __future__ import annotations

import os

# Before torch is imported: its idle workers would otherwise spin on the cores that the others are timed on.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import time
from collections import deque
from functools import cache, partial
from statistics import mean

import numpy as np
import torch

from benchmarks import harness
from benchmarks import requests_table as table
from benchmarks.engine_table import (
    ALONE,
    APART,
    ARITHMETIC,
    COLD,
    FLOAT32,
    INT8,
    NO_SALT,
    OFF,
    PREFIX,
    RATIO,
    READING,
    TTFT,
    WEIGHTS,
)
from benchmarks.harness import Round, Source, quiesce, timed
from benchmarks.requests_table import NUM_NEW, NUM_SHARED, Draw
from benchmarks.work import limits
from pagedkv import BlockPool, PagedKVCache, Sequence, __version__, ops
from pagedkv.runner import Engine, Model, SamplingParams, load_model
from pagedkv.runner.bundled import bundled_model_path

ONE = SamplingParams(max_tokens=1, ignore_eos=True)
NUM_KEPT_BLOCKS, NUM_AT_ONCE = 8_192, 32
"""The pool whose calls are timed without a model, and the requests in it."""


@cache
def model(dtype: str) -> Model:
    """Load the model once in each dtype."""
    return load_model(bundled_model_path(), dtype=dtype).model


def engine(dtype: str = "bfloat16", **options: object) -> Engine:
    """Make an engine whose cache holds some prompts of the longest kind, and warm it up."""
    made = Engine(model(dtype), **{"num_blocks": 2_048, **options})  # type: ignore[arg-type]
    draw = Draw("warm-up")
    for _ in range(table.NUM_WARM_UPS):
        made.generate([draw(NUM_NEW)], SamplingParams(max_tokens=2, ignore_eos=True))
    return made


def first_token(made: Engine, prompt: list[int]) -> float:
    """Milliseconds from a prompt to its first token."""
    [request] = made.generate([prompt], ONE)
    assert request.time_to_first_token_s is not None
    return 1000 * request.time_to_first_token_s


class Prefix:
    """What a cached prefix costs at least: its attention alone, or reading its K and V."""

    def __init__(self, made: Engine, num_cached: int) -> None:
        config, cached = made.model.config, made.cache
        num_blocks = -(-(num_cached + NUM_NEW) // cached.spec.block_size)
        self.num_layers = config.num_layers
        self.pages = cached.pages[0]
        self.query = torch.randn(NUM_NEW, config.num_heads, config.head_dim).to(made.model.dtype)
        self.table = torch.arange(num_blocks, dtype=torch.int32)[None]
        self.seq_lens = torch.tensor([num_cached + NUM_NEW], dtype=torch.int32)
        self.starts = torch.tensor([0, NUM_NEW], dtype=torch.int32)
        self.read = limits.reading(cached.pages.extents[0], self.table, timed)

    def arithmetic(self) -> float:
        """Milliseconds of attention in all layers, by the rate of one."""
        call = partial(ops.paged_attention, self.query, *self.pages, self.table, self.seq_lens, self.starts)
        return min(timed(call) for _ in range(2)) * self.num_layers / 1000

    def reading(self) -> float:
        """Milliseconds to read the K and V of all layers once."""
        return self.read() / 1000


def warm() -> Source:
    """Time the first token behind a cached prefix, and what it can come down to."""
    made, draw = engine(), Draw("warm")
    prefix = draw(NUM_SHARED)
    for _ in range(table.NUM_WARM_UPS):
        first_token(made, prefix + draw(NUM_NEW))
    bound = Prefix(made, NUM_SHARED)
    quiesce()
    while True:
        times: Round = {}
        for _ in range(4):
            for series, value in (
                ("pagedkv", first_token(made, prefix + draw(NUM_NEW))),
                (ALONE, first_token(made, draw(NUM_NEW))),
                (ARITHMETIC, bound.arithmetic()),
                (READING, bound.reading()),
            ):
                times.setdefault(series, []).append(value)
            times.setdefault(PREFIX, []).append(max(times[ARITHMETIC][-1], times[READING][-1]))
        yield times


def prefixes() -> Source:
    """Time the first token behind prefixes of several lengths; ours is the slope."""
    made, draw = engine(), Draw("prefixes")
    whole = draw(table.PREFIX_LENGTHS[-1])
    bounds = [Prefix(made, length) for length in table.PREFIX_LENGTHS]
    first_token(made, whole + draw(NUM_NEW))
    quiesce()
    while True:
        times: Round = {}
        for length, bound in zip(table.PREFIX_LENGTHS, bounds, strict=True):
            for series, value in (
                (f"{length:,}", min(first_token(made, whole[:length] + draw(NUM_NEW)) for _ in range(2))),
                (f"{length:,}, {ARITHMETIC}", bound.arithmetic()),
                (f"{length:,}, {READING}", bound.reading()),
            ):
                times[series] = [value]
        for series, ending in (("pagedkv", ""), (ARITHMETIC, f", {ARITHMETIC}"), (READING, f", {READING}")):
            values = [times[f"{length:,}{ending}"][0] for length in table.PREFIX_LENGTHS]
            slope, _ = np.polyfit(np.array(table.PREFIX_LENGTHS) / 1000, values, 1)
            times[series] = [float(slope)]
        yield times


def cold() -> Source:
    """Time a whole prompt."""
    made, draw = engine(), Draw("cold")
    quiesce()
    while True:
        yield {"pagedkv": [first_token(made, draw(table.NUM_COLD))]}


def step_ms(made: Engine, prompts: list[list[int]]) -> float:
    """Milliseconds of one decode step of all `prompts` together, the mean of some."""
    params = SamplingParams(max_tokens=table.NUM_STEPS + 2, ignore_eos=True)
    requests = [made.submit(prompt, params) for prompt in prompts]
    while not all(request.output_ids for request in requests):
        made.step()
    steps = [timed(made.step) for _ in range(table.NUM_STEPS)]
    made.run()
    return mean(steps) / 1000


def weights_floor(num_bytes: int) -> float:
    """Milliseconds to read so many bytes once."""
    pages = torch.ones(num_bytes // 2**16, 2**16, dtype=torch.uint8)
    read = limits.reading(pages, torch.arange(len(pages), dtype=torch.int32), timed)
    read()
    return min(read() for _ in range(3)) / 1000


def decode(num_seqs: int) -> Source:
    """Time a step, with weights of each kind where one sequence decodes."""
    kinds = {"pagedkv": "bfloat16", INT8: "int8"} | ({FLOAT32: "float32"} if num_seqs == 1 else {})
    engines = {series: engine(dtype) for series, dtype in kinds.items()}
    draw, config = Draw("decode"), model("bfloat16").config
    inner = config.hidden_size * (config.intermediate_size * 3 + config.head_dim * config.num_heads)
    inner += config.hidden_size * config.head_dim * (config.num_heads + 2 * config.num_kv_heads)
    num_bytes = 2 * (inner * config.num_layers + config.vocab_size * config.hidden_size)
    quiesce()
    while True:
        times: Round = {}
        for _ in range(2):
            for series, made in engines.items():
                prompts = [draw(table.NUM_DECODED_FROM) for _ in range(num_seqs)]
                times.setdefault(series, []).append(step_ms(made, prompts))
            times.setdefault(WEIGHTS, []).append(weights_floor(num_bytes))
        yield times


class Decoding:
    """Sequences that decode with a long context that nobody computed: only the time of a step is wanted."""

    def __init__(self, *, num_shared: int, num_seqs: int = 32) -> None:
        self.model = model("bfloat16")
        num_blocks = num_seqs * (-(-table.NUM_COLD // 16) + 8)
        self.cache = PagedKVCache(self.model.config.kv_spec("bfloat16"), num_blocks)
        draw = Draw(f"decoding {num_shared}")
        shared = draw(num_shared)
        self.seqs = [self._open(shared + draw(table.NUM_COLD - num_shared)) for _ in range(num_seqs)]

    def _open(self, tokens: list[int]) -> Sequence:
        seq = self.cache.open(tokens)
        step = self.cache.reserve([seq], [seq.num_uncached_tokens])
        self.cache.prepare(step)
        self.cache.commit(step)
        self.cache.append([seq], [tokens[0]])
        return seq

    def step(self) -> None:
        """Compute a token of each sequence, as an engine does."""
        step = self.cache.reserve(self.seqs, [1] * len(self.seqs))
        meta = self.cache.prepare(step)
        logits = self.model.logits(self.model.forward(self.cache, meta))
        self.cache.commit(step)
        self.cache.append(self.seqs, logits.argmax(-1).tolist())


def decode_shared() -> Source:
    """Time a step of sequences that share most of their pages, and of such that share none."""
    together, apart = Decoding(num_shared=NUM_SHARED), Decoding(num_shared=0)
    for each in (together, apart):
        each.step()
    quiesce()
    while True:
        times: Round = {"pagedkv": [], APART: []}
        for _ in range(4):
            times["pagedkv"].append(timed(together.step) / 1000)
            times[APART].append(timed(apart.step) / 1000)
        yield times


class Calls:
    """An engine's calls of a full pool for prompts of which nothing is cached: no model, only the pool."""

    def __init__(self, *, caching: bool = True, salted: bool = False) -> None:
        self.pool = BlockPool(NUM_KEPT_BLOCKS, prefix_caching=caching)
        self.salt = "a tenant" if salted else None
        self.random = np.random.default_rng(0)
        self.running: deque[Sequence] = deque()
        self.turn = 0
        for _ in range(2 * NUM_KEPT_BLOCKS // 125):
            self.sample()

    def sample(self) -> float:
        """Microseconds of this thread in all calls for one prompt of 2,000 tokens, and one that ends."""
        tokens = self.random.integers(0, 49_000, 2_000, dtype=np.int32)
        self.turn += 1
        tokens[0] = 49_000 + self.turn  # which no other prompt begins with
        pool, running = self.pool, self.running
        start_ns = time.thread_time_ns()
        seq = pool.open(tokens, cache_salt=self.salt)
        step = pool.reserve([seq], [2_000])
        pool.prepare(step)
        pool.commit(step)
        running.append(seq)
        if len(running) > NUM_AT_ONCE:
            pool.close(running.popleft())
        return (time.thread_time_ns() - start_ns) / 1000


def in_turns(first: Calls, second: Calls, num_pairs: int) -> list[tuple[float, float]]:
    """Take samples of two in pairs; who begins changes, since whoever did leaves its traces in the caches."""
    pairs = []
    for turn in range(num_pairs):
        if turn % 2:
            theirs = second.sample()
            pairs.append((first.sample(), theirs))
        else:
            pairs.append((first.sample(), second.sample()))
    return pairs


def caching() -> Source:
    """Time the calls with caching and without, in turns; ours is the difference."""
    made, draw = engine(), Draw("caching")
    first_s = 1000 * first_token(made, draw(2_000))
    on, off = Calls(), Calls(caching=False)
    quiesce()
    while True:
        pairs = in_turns(on, off, 340)
        ours = [with_it - without for with_it, without in pairs]
        yield {
            "pagedkv": ours,
            "caching on": [pair[0] for pair in pairs],
            OFF: [pair[1] for pair in pairs],
            TTFT: [first_s],
        }


def salt() -> Source:
    """Time the calls with a salt and without, in turns."""
    with_salt, without = Calls(salted=True), Calls()
    quiesce()
    while True:
        pairs = in_turns(with_salt, without, 1_000)
        yield {"pagedkv": [pair[0] for pair in pairs], NO_SALT: [pair[1] for pair in pairs]}


def caching_whole() -> Source:
    """Time whole prompts with caching and without, in turns."""
    on, off, draw = engine(), engine(prefix_caching=False), Draw("whole")
    quiesce()
    while True:
        prompt = draw(2_000)
        times = {"pagedkv": [first_token(on, prompt)], OFF: [first_token(off, prompt)]}
        yield {**times, RATIO: [times["pagedkv"][0] / times[OFF][0]]}


def saved() -> Source:
    """Time the longest prompt, whole and behind its prefix; ours is what is left, in per cent."""
    made, draw = engine(), Draw("saved")
    quiesce()
    while True:
        prefix = draw(table.NUM_LONGEST)
        whole = first_token(made, prefix + draw(NUM_NEW))
        warm_ms = min(first_token(made, prefix + draw(NUM_NEW)) for _ in range(2))
        yield {"pagedkv": [100 * warm_ms / whole], COLD: [whole], "cached": [warm_ms]}


ROWS: harness.Rows = {
    "warm": warm,
    "prefixes": prefixes,
    "cold": cold,
    **{f"decode_{num_seqs}": partial(decode, num_seqs) for num_seqs in table.BATCHES},
    "decode_shared": decode_shared,
    "caching": caching,
    "salt": salt,
    "caching_whole": caching_whole,
    "saved": saved,
}


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("BENCH_THREADS", "2")))
    harness.main({"library": "pagedkv", "version": __version__}, ROWS)
