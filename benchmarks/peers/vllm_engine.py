"""vLLM's engine on the CPU, in this process, with the model of the demo in bfloat16.

BENCH_FOLDER is the model's folder; BENCH_THREADS how many threads it takes.
"""

from __future__ import annotations

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_WAIT_POLICY="passive",
    VLLM_CPU_KVCACHE_SPACE="2",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)
os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("BENCH_THREADS", "2"))

import time
from functools import cache

import vllm
from vllm import LLM, SamplingParams

from benchmarks import harness
from benchmarks.peers.engine_rows import rows
from benchmarks.requests_table import CONTEXT_LENGTH, NUM_STEPS


class VLLM:
    """Its offline engine; blocks of its own choice, prefix caching as it is by default."""

    def __init__(self) -> None:
        self.llm = LLM(
            model=os.environ["BENCH_FOLDER"],
            dtype="bfloat16",
            max_model_len=CONTEXT_LENGTH,
            max_num_batched_tokens=CONTEXT_LENGTH,
            max_num_seqs=32,
            enforce_eager=True,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            seed=0,
        )

    def generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Milliseconds until all have so many tokens."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        start_ns = time.perf_counter_ns()
        self.llm.generate(asked, params, use_tqdm=False)
        return (time.perf_counter_ns() - start_ns) / 1e6

    def remember(self, prefix: list[int]) -> None:
        """Compute a prefix; its cache keeps the K and V of whole blocks."""
        self.generate([prefix], 1)

    def first_token(self, prompt: list[int]) -> float:
        """Milliseconds from a prompt to its first token."""
        return self.generate([prompt], 1)

    def step(self, prompts: list[list[int]]) -> float:
        """Milliseconds of one decode step: the prompts with some more tokens, less the prompts with one."""
        others = [
            [prompt[0] ^ 1, *prompt[1:]] for prompt in prompts
        ]  # nothing of one is cached for the other
        first = self.generate(others, 1)
        return (self.generate(prompts, NUM_STEPS + 1) - first) / NUM_STEPS


@cache
def engine() -> VLLM:
    """Start it once."""
    return VLLM()


ROWS = rows("vLLM", engine)


if __name__ == "__main__":
    harness.main({"peer": "vLLM", "version": vllm.__version__}, ROWS)
