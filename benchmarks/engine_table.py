"""The rows of whole requests: what is done by a real model, beside what, and what has to hold."""

from __future__ import annotations

from benchmarks.bounds import Bound, absolute, at_most, faster
from benchmarks.requests_table import BATCHES, NUM_COLD, NUM_LONGEST, NUM_NEW, NUM_SHARED
from benchmarks.table import Row

HARNESS = "pagedkv, engine"
TRANSFORMERS, VLLM, LLAMA = "transformers", "vLLM, engine", "llama.cpp"

# Series beside ours: other engines, …
HF, HF_FLOAT32, VLLM_SERIES, LLAMA_SERIES = "transformers", "transformers, float32", "vLLM", "llama.cpp"
# … ourselves otherwise, …
INT8, FLOAT32 = "pagedkv, int8", "pagedkv, float32"
OFF, NO_SALT, APART = "caching off", "no salt", "nothing shared"
ALONE, COLD, TTFT = "new tokens alone", "nothing cached", "time to first token"
# … and what the machine needs at least.
PREFIX, ARITHMETIC, READING, WEIGHTS = "the prefix", "its attention", "its bytes", "reading the weights"
RATIO = "caching on / off"


def row(name: str, work: str, unit: str, bounds: tuple[Bound, ...], *peers: str, **fields: object) -> Row:
    """Make a row that is measured in milliseconds unless it says otherwise."""
    return Row(name, work, unit, bounds, peers, HARNESS, **{"quantity": "ms", **fields})  # type: ignore[arg-type]


def decode(num_seqs: int) -> Row:
    """Make the row of a decode step."""
    if num_seqs == 1:
        bounds = (
            faster(2, HF),
            faster(2, HF_FLOAT32),
            faster(1.5, VLLM_SERIES),
            at_most(1, LLAMA_SERIES, INT8),
        )
        peers: tuple[str, ...] = (TRANSFORMERS, VLLM, LLAMA)
    else:
        bounds, peers = (faster(1.3, VLLM_SERIES),), (VLLM,)
    work = f"a decode step of {num_seqs} sequence{'s' * (num_seqs > 1)}, bfloat16"
    return row(f"decode_{num_seqs}", work, "step", bounds, *peers, limit=WEIGHTS)


ROWS = (
    row(
        "warm",
        f"first token, {NUM_SHARED:,} cached tokens and {NUM_NEW} new ones, bfloat16",
        "prompt",
        (
            Bound("pagedkv", ((1.3, ALONE), (1.3, PREFIX))),
            faster(3, HF),
            faster(3, VLLM_SERIES),
            faster(3, LLAMA_SERIES),
        ),
        *(TRANSFORMERS, VLLM, LLAMA),
    ),
    row("prefixes", f"what 1,000 more cached tokens cost the first of {NUM_NEW} new ones", "1,000", ()),
    row(
        "cold",
        f"first token, {NUM_COLD:,} tokens and nothing cached, bfloat16",
        "prompt",
        (faster(1.3, HF), at_most(1, VLLM_SERIES)),
        *(TRANSFORMERS, VLLM, LLAMA),
    ),
    *(decode(num_seqs) for num_seqs in BATCHES),
    row(
        "decode_shared",
        f"a decode step of 32 sequences that share {NUM_SHARED:,} tokens",
        "step",
        (faster(3, APART),),
        are_pairs=True,
    ),
    row(
        "caching",
        "thread-CPU time that caching adds to 2,000 tokens of which nothing is cached",
        "prompt",
        (absolute(20), at_most(0.001, TTFT)),
        quantity="µs",
    ),
    row(
        "salt",
        "thread-CPU time of 2,000 tokens of which nothing is cached, with a salt",
        "prompt",
        (at_most(1.02, NO_SALT),),
        quantity="µs",
        are_pairs=True,
    ),
    row("caching_whole", "first token, 2,000 tokens that nobody shares, caching on", "prompt", ()),
    row(
        "saved",
        f"first token behind {NUM_LONGEST:,} cached tokens, as a share of the whole prompt's",
        "prompt",
        (absolute(3),),
        quantity="%",
    ),
)
