"""Time of a block digest, against what the processor needs for the bare SHA-256.

Run it on a quiet machine: ``python benchmarks/digest.py``. It exits with 1 when a bound is missed twice.

Every figure is the best of many rounds in which all rows take turns, in nanoseconds a block of 16 tokens. The
bare loop is SHA-256 of one long message on the path in use: two compressions for each block, nothing else. A
row that reads many times its usual figure is the trap of SHA-NI: compiled with AVX instructions around it,
or entered with the upper halves of the vector registers in use, it becomes up to 150 times slower.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from hashlib import sha256

import numpy as np

from pagedkv import _core, hash_blocks, hash_blocks_batch

BLOCK_SIZE = 16
NUM_TOKENS = 10_000
NUM_PROMPTS, NUM_PROMPT_TOKENS = 8, 2_000
NUM_ROUNDS = 300

Row = tuple[Callable[[], object], int]  # what to time, blocks that it hashes

# (row, most times another row, that row)
BOUNDS = [
    ("chain, native", 1.2, "bare SHA-256 loop"),
    ("batch", 1 / 1.3, "one by one"),
]


def make_rows() -> dict[str, Row]:
    """Give each row its name."""
    tokens = np.arange(NUM_TOKENS, dtype=np.int32)
    num_blocks = NUM_TOKENS // BLOCK_SIZE
    block_bytes = [block.tobytes() for block in tokens.reshape(-1, BLOCK_SIZE)]
    # 9 bytes short: the padding then ends the last compression.
    message, path = bytes(128 * num_blocks - 9), _core.sha256_isa()
    prompts = [np.arange(i, i + NUM_PROMPT_TOKENS, dtype=np.int32) for i in range(NUM_PROMPTS)]
    num_batch_blocks = NUM_PROMPTS * (NUM_PROMPT_TOKENS // BLOCK_SIZE)

    def hashlib_chain() -> bytes:
        parent = b""
        for tokens_of_block in block_bytes:
            parent = sha256(parent + tokens_of_block).digest()
        return parent

    return {
        "bare SHA-256 loop": (lambda: _core.sha256(message, path), num_blocks),
        "chain, native": (lambda: _core.hash_blocks(tokens, BLOCK_SIZE, b"", [], []), num_blocks),
        "hash_blocks": (lambda: hash_blocks(tokens), num_blocks),
        "hash_blocks, xxh3-128": (lambda: hash_blocks(tokens, scheme="xxh3-128"), num_blocks),
        "hashlib chain": (hashlib_chain, num_blocks),
        "hash_blocks, sha256-vllm": (lambda: hash_blocks(tokens, scheme="sha256-vllm"), num_blocks),
        "one by one": (lambda: [hash_blocks(prompt) for prompt in prompts], num_batch_blocks),
        "batch": (lambda: hash_blocks_batch(prompts), num_batch_blocks),
    }


def measure(rows: dict[str, Row]) -> dict[str, float]:
    """Time all rows in turn; the best of each, in nanoseconds a block."""
    best = dict.fromkeys(rows, float("inf"))
    for _ in range(NUM_ROUNDS):
        for name, (function, num_blocks) in rows.items():
            start_ns = time.perf_counter_ns()
            result = function()
            elapsed_ns = time.perf_counter_ns() - start_ns
            del result  # outside the time: the callers keep their digests
            best[name] = min(best[name], elapsed_ns / num_blocks)
    return best


def report(best: dict[str, float]) -> bool:
    """Print the table; whether every bound holds."""
    print(f"SHA-256 path: {_core.sha256_isa()}")
    bare = best["bare SHA-256 loop"]
    for name, ns in best.items():
        print(
            f"{name:26} {ns:9.1f} ns a block {ns / bare:7.2f} × bare {1000 * BLOCK_SIZE / ns:7.1f} M tokens/s"
        )
    holds = True
    for name, most, other in BOUNDS:
        ratio = best[name] / best[other]
        holds &= ratio <= most
        print(f"{name} ≤ {most:.2f} × {other}: {ratio:.2f}, {'holds' if ratio <= most else 'MISSED'}")
    return holds


def main() -> int:
    """Measure, and once more when a bound is missed."""
    rows = make_rows()
    return 0 if report(measure(rows)) or report(measure(rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
