"""transformers with the model of the demo: its own attention and its dynamic cache, greedy.

BENCH_FOLDER is the model's folder; BENCH_THREADS how many threads torch takes.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["HF_HUB_OFFLINE"] = "1"

import time
from functools import cache, partial

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks import harness
from benchmarks.peers.engine_rows import rows
from benchmarks.requests_table import NUM_STEPS


class Transformers:
    """One sequence at a time, as the issue's figures are."""

    def __init__(self, dtype: torch.dtype) -> None:
        folder = os.environ["BENCH_FOLDER"]
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.prefix: list[int] = []
        self.cache = DynamicCache()

    @torch.inference_mode()
    def forward(self, tokens: list[int], cache: DynamicCache) -> int:
        """Compute tokens behind what `cache` holds; return the likeliest next one."""
        out = self.model(torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    def remember(self, prefix: list[int]) -> None:
        """Compute a prefix and keep its K and V."""
        self.prefix, self.cache = prefix, DynamicCache()
        self.forward(prefix, self.cache)

    def first_token(self, prompt: list[int]) -> float:
        """Milliseconds from a prompt to its first token."""
        num_known = len(self.prefix) if prompt[: len(self.prefix)] == self.prefix else 0
        cache = self.cache if num_known else DynamicCache()
        start_ns = time.perf_counter_ns()
        self.forward(prompt[num_known:], cache)
        elapsed_ms = (time.perf_counter_ns() - start_ns) / 1e6
        if num_known:
            cache.crop(num_known - cache.get_seq_length())  # what the prompt added goes
        return elapsed_ms

    def step(self, prompts: list[list[int]]) -> float:
        """Milliseconds of one decode step, the mean of some."""
        [prompt] = prompts
        cache = DynamicCache()
        token = self.forward(prompt, cache)
        token = self.forward([token], cache)
        start_ns = time.perf_counter_ns()
        for _ in range(NUM_STEPS):
            token = self.forward([token], cache)
        return (time.perf_counter_ns() - start_ns) / 1e6 / NUM_STEPS


@cache
def engine(dtype: torch.dtype) -> Transformers:
    """Load the model once."""
    return Transformers(dtype)


ROWS = rows(
    "transformers",
    partial(engine, torch.bfloat16),
    batches=(1,),
    others={"transformers, float32": partial(engine, torch.float32)},
)


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(int(os.environ.get("BENCH_THREADS", "2")))
    harness.main({"peer": "transformers", "version": transformers.__version__}, ROWS)
