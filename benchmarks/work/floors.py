"""What the machine needs for the bare steps: SHA-256, a copy, a chain of loads."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.harness import timed
from pagedkv import _core

NODE_BYTES = 128
"""Of a node that a chase visits: two cache lines, as much as 16 tokens and what must be known of them."""


@functools.cache
def native() -> ctypes.CDLL:
    """Compile the loops; they need a C++ compiler, as the package itself does."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "floors.so"
        source = Path(__file__).with_name("floors.cpp")
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        subprocess.run([*compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        loops = ctypes.CDLL(str(library))
    word = ctypes.c_uint64
    loops.chase.argtypes, loops.chase.restype = [ctypes.c_void_p, word, word], word
    loops.copy.argtypes, loops.copy.restype = [ctypes.c_void_p, ctypes.c_void_p, word, word], None
    return loops


def sha(num_blocks: int) -> Callable[[], float]:
    """Time SHA-256 of one message: two compressions for each block, one after the other, and nothing else."""
    # 9 bytes short: the padding then ends the last compression.
    message, path = bytes(128 * num_blocks - 9), _core.sha256_isa()
    return lambda: timed(lambda: _core.sha256(message, path))


def compression(num_blocks: int = 625) -> Callable[[], float]:
    """Time one compression."""
    loop = sha(num_blocks)
    return lambda: loop() / (2 * num_blocks)


def chase(num_visited: int, num_nodes: int, num_times: int = 1) -> Callable[[], float]:
    """Time a walk over nodes that lie anywhere in an array, each found through the one before it.

    Every call visits the same nodes, `num_times` each.
    """
    order = np.random.default_rng(0).permutation(num_nodes)[:num_visited].astype(np.uint64)
    memory = np.zeros(num_nodes * NODE_BYTES // 8, np.uint64)
    memory[order * (NODE_BYTES // 8)] = np.roll(order, -1) * NODE_BYTES
    loops, address = native(), memory.ctypes.data
    start, num_steps = int(order[0]) * NODE_BYTES, num_visited * num_times

    def walk() -> float:
        start_ns = time.perf_counter_ns()
        loops.chase(address, start, num_steps)
        elapsed_ns = time.perf_counter_ns() - start_ns
        assert len(memory)  # alive until here: the loop knows only its address
        return elapsed_ns / 1000

    return walk


def copy(num_bytes: int, num_copies: int = 20) -> Callable[[], float]:
    """Time the copy of so many bytes."""
    source, target = np.zeros(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    loops = native()

    def run() -> float:
        start_ns = time.perf_counter_ns()
        loops.copy(target.ctypes.data, source.ctypes.data, num_bytes, num_copies)
        return (time.perf_counter_ns() - start_ns) / 1000 / num_copies

    return run
