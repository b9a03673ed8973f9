"""llama.cpp's server in this process, with the very file of the demo: weights of four bits.

BENCH_GGUF is the file; BENCH_THREADS how many threads it takes.
"""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any

import xllamacpp

from benchmarks import harness
from benchmarks.peers.engine_rows import rows
from benchmarks.requests_table import CONTEXT_LENGTH, NUM_STEPS


class LlamaCpp:
    """One slot, whose last prompt's K and V it keeps."""

    def __init__(self) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = os.environ["BENCH_GGUF"]
        params.n_ctx = CONTEXT_LENGTH
        params.n_parallel = 1
        params.n_batch = 2_048
        params.n_ubatch = 512
        num_threads = int(os.environ.get("BENCH_THREADS", "2"))
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
        params.port = 0
        self.server = xllamacpp.Server(params)

    def complete(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        """Answer a prompt; return the times that the server took."""
        asked = {
            "prompt": prompt,
            "n_predict": num_tokens,
            "max_tokens": num_tokens,
            "temperature": 0,
            "cache_prompt": True,
            "ignore_eos": True,
        }
        answer = self.server.handle_completions(asked)
        parsed: dict[str, Any] = answer if isinstance(answer, dict) else json.loads(answer)
        timings: dict[str, Any] = parsed["timings"]
        return timings

    def remember(self, prefix: list[int]) -> None:
        """Compute a prefix; its slot keeps the K and V."""
        self.complete(prefix, 1)

    def first_token(self, prompt: list[int]) -> float:
        """Milliseconds that the prompt took, as the server says."""
        return float(self.complete(prompt, 1)["prompt_ms"])

    def step(self, prompts: list[list[int]]) -> float:
        """Milliseconds of one decode step, the mean of some, as the server says."""
        [prompt] = prompts
        return float(self.complete(prompt, NUM_STEPS)["predicted_per_token_ms"])


@cache
def engine() -> LlamaCpp:
    """Load the model once."""
    return LlamaCpp()


ROWS = rows("llama.cpp", engine, batches=(1,))


if __name__ == "__main__":
    harness.main({"peer": "llama.cpp", "version": xllamacpp.__version__}, ROWS)
