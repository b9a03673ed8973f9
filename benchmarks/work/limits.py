"""What the machine gives at most: reading, copying, multiplying. Each limit is measured beside the work."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.harness import timed

Timer = Callable[[Callable[[], object]], float]
"""Microseconds of one call."""


def has_amx() -> bool:
    """Whether the processor multiplies tiles of bfloat16."""
    info = Path("/proc/cpuinfo")
    return info.exists() and " amx_bf16" in info.read_text()


def has_bf16_products() -> bool:
    """Whether the processor multiplies bfloat16 at all, in tiles or in pairs."""
    info = Path("/proc/cpuinfo")
    return info.exists() and not {"amx_bf16", "avx512_bf16"}.isdisjoint(info.read_text().split())


def gemm_dtype(device: torch.device) -> torch.dtype:
    """Tell in which dtype torch's products of matrices are fastest."""
    return torch.bfloat16 if device.type == "cuda" or has_bf16_products() else torch.float32


def torch_dtype(device: torch.device) -> torch.dtype:
    """Tell in which dtype torch attends fast: without tiles its loops over bfloat16 are of no use."""
    return torch.bfloat16 if device.type == "cuda" or has_amx() else torch.float32


@functools.cache
def native() -> ctypes.CDLL:
    """Compile the loops for this very machine; they need a C++ compiler, as the package itself does."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "memory.so"
        source = Path(__file__).with_name("memory.cpp")
        flags = ["-O3", "-march=native", "-pthread", "-shared", "-fPIC", "-Wno-psabi"]
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        subprocess.run([*compiler, *flags, "-o", library, source], check=True)
        loops = ctypes.CDLL(str(library))
    word, pointer = ctypes.c_uint64, ctypes.c_void_p
    loops.read_pages.argtypes = [pointer, pointer, word, word, ctypes.c_int]
    loops.read_pages.restype = word
    loops.copy_bytes.argtypes = [pointer, pointer, word, ctypes.c_int]
    loops.copy_bytes.restype = None
    return loops


def timer(device: torch.device) -> Timer:
    """Time calls: by the clock, or on a GPU by the events of its stream."""
    if device.type == "cpu":
        return timed

    def by_events(call: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return 1000 * float(start.elapsed_time(end))

    return by_events


def reading(pages: torch.Tensor, table: torch.Tensor, time: Timer) -> Callable[[], float]:
    """Time the reading of pages, each once, wherever they lie.

    pages : Tensor [num_blocks, …], whole blocks; table : Tensor int32, any shape
    """
    ids = table[table >= 0].unique().int()
    ids = ids[torch.randperm(len(ids))].contiguous()
    page_bytes = pages[0].numel() * pages.element_size()
    if pages.device.type != "cpu":
        copy = copying(len(ids) * page_bytes // 2, pages.device, time)
        return copy  # half as many bytes, since each is read and written
    loops, num_threads = native(), torch.get_num_threads()
    memory = pages.as_strided((len(pages), page_bytes // pages.element_size()), (pages.stride(0), 1))
    assert page_bytes % 256 == 0
    assert memory.stride(0) * pages.element_size() == page_bytes
    return lambda: time(
        lambda: loops.read_pages(pages.data_ptr(), ids.data_ptr(), len(ids), page_bytes, num_threads)
    )


def copying(num_bytes: int, device: torch.device, time: Timer) -> Callable[[], float]:
    """Time the copy of so many bytes in one piece."""
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    if device.type != "cpu":
        return lambda: time(lambda: target.copy_(source))
    loops, num_threads = native(), torch.get_num_threads()
    return lambda: time(
        lambda: loops.copy_bytes(target.data_ptr(), source.data_ptr(), num_bytes, num_threads)
    )


def multiplying(
    num_operations: int, dtype: torch.dtype, device: torch.device, time: Timer
) -> Callable[[], float]:
    """Time one product of square matrices, and tell how long so many operations take at its rate."""

    def product(size: int) -> Callable[[], float]:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty(size, size, dtype=dtype, device=device)
        return lambda: time(lambda: torch.mm(left, right, out=out))

    size, largest = 128, 8_192 if device.type == "cuda" else 2_048
    while size < largest and min(product(size)() for _ in range(2)) < 5_000:  # some 40 ms at twice the size
        size *= 2
    multiply = product(size)
    return lambda: multiply() * num_operations / (2 * size**3)
