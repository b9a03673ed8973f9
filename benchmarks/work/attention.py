"""The operations on pages, beside torch's own attention and what the machine gives at most.

    python -m benchmarks.work.attention > attention.json

All series of a row are in this process and take turns call by call, so that a machine that changes its speed
changes it for all. BENCH_DEVICE is "cpu" or "cuda".
"""

from __future__ import annotations

import os

# Before torch is imported: its idle workers would otherwise spin on the cores that the others are timed on.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import harness, shapes
from benchmarks.attention_table import (
    BF16_PAGES,
    COPY,
    F32_GEMM,
    GEMM,
    MASKED,
    OFF,
    READ,
    READ_ALL,
    ROOF,
    SDPA,
    UNGROUPED,
    UNMASKED,
)
from benchmarks.harness import Round, Source, quiesce
from benchmarks.shapes import BLOCK_SIZE, Batch
from benchmarks.work import limits
from pagedkv import BlockPool, KVCacheSpec, __version__, ops
from pagedkv.batch import SharedPrefixes
from pagedkv.pages import KVPages
from pagedkv.spec import Scales

DEVICE = torch.device(os.environ.get("BENCH_DEVICE", "cpu"))
TIME = limits.timer(DEVICE)
TORCH_DTYPE = limits.torch_dtype(DEVICE)
IS_BF16 = TORCH_DTYPE is torch.bfloat16
GEMM_DTYPE = limits.gemm_dtype(DEVICE)
THE_GEMM = GEMM if GEMM_DTYPE is torch.bfloat16 else F32_GEMM

Calls = dict[str, Callable[[], float]]


def in_turns(calls: Calls, num_samples: int) -> Source:
    """Time each once, again and again; a first call of each warms up."""
    for call in calls.values():
        call()
    quiesce()
    while True:
        times: Round = {series: [] for series in calls}
        for _ in range(num_samples):
            for series, call in calls.items():
                times[series].append(call())
        yield times


class Paged:
    """A batch whose pages lie in any order, and what attends to it."""

    def __init__(self, batch: Batch, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        self.batch = batch
        num_shared = batch.num_shared // BLOCK_SIZE
        num_own = batch.num_blocks - num_shared
        num_blocks = num_shared + batch.num_seqs * num_own
        name = str(dtype).removeprefix("torch.")
        scales: Scales | None = "token_head" if dtype.itemsize == 1 else None
        spec = KVCacheSpec.uniform(1, batch.num_kv_heads, batch.head_dim, name, BLOCK_SIZE, scales=scales)
        self.storage = KVPages(spec, num_blocks, device=DEVICE)
        self.pages = self.storage[0]
        self.scales = self.storage.scales(0)
        ids = torch.randperm(num_blocks, dtype=torch.int32)
        own = ids[num_shared:].view(batch.num_seqs, num_own)
        shared = ids[:num_shared].expand(batch.num_seqs, num_shared)
        self.block_table = torch.cat([shared, own], 1).to(DEVICE).contiguous()
        self.seq_lens = torch.full((batch.num_seqs,), batch.num_keys, dtype=torch.int32, device=DEVICE)
        self.query_start_loc = (
            torch.arange(batch.num_seqs + 1, dtype=torch.int32, device=DEVICE) * batch.num_queries
        )
        self.query = torch.randn(
            batch.num_seqs * batch.num_queries, batch.num_heads, batch.head_dim, device=DEVICE
        ).bfloat16()
        self.out = torch.empty_like(self.query)
        self.fill()

    def fill(self) -> None:
        """Write numbers into all pages, a piece at a time."""
        num_slots = self.storage.num_blocks * BLOCK_SIZE
        for start in range(0, num_slots, 2**15):
            slots = torch.arange(start, min(start + 2**15, num_slots), device=DEVICE)
            shape = len(slots), self.batch.num_kv_heads, self.batch.head_dim
            key, value = (torch.randn(shape, device=DEVICE).bfloat16() for _ in range(2))
            ops.write_kv(
                key, value, *self.pages, slots, key_scales=self.scales[0], value_scales=self.scales[1]
            )

    @property
    def prefixes(self) -> SharedPrefixes:
        """All sequences, over the pages that they share."""
        last = self.batch.num_shared // BLOCK_SIZE
        groups = torch.tensor([[0, self.batch.num_seqs, 0, last]], dtype=torch.int32, device=DEVICE)
        return SharedPrefixes(groups, torch.arange(self.batch.num_seqs, dtype=torch.int32, device=DEVICE))

    def attend(self, prefixes: SharedPrefixes | None = None) -> torch.Tensor:
        """Attend over the pages."""
        return ops.paged_attention(
            self.query,
            *self.pages,
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            key_scales=self.scales[0],
            value_scales=self.scales[1],
            shared_prefixes=prefixes,
            out=self.out,
        )

    def sample(self) -> float:
        """Microseconds of `attend`."""
        return TIME(self.attend)

    def contiguous(self) -> dict[str, Any]:
        """Give torch's attention the same numbers, each sequence's K and V in one piece."""
        batch = self.batch
        query = self.query.view(batch.num_seqs, batch.num_queries, batch.num_heads, batch.head_dim)
        rows = [pages[self.block_table.long()].flatten(1, 2)[:, : batch.num_keys] for pages in self.pages]
        query, key, value = (t.transpose(1, 2).to(TORCH_DTYPE).contiguous() for t in (query, *rows))
        return {"query": query, "key": key, "value": value, "enable_gqa": True}

    def reading(self) -> Callable[[], float]:
        """Time the reading of every page once."""
        return limits.reading(self.storage.extents[0], self.block_table, TIME)

    def multiplying(self) -> Callable[[], float]:
        """Time as many operations as the batch needs, in a product of large matrices."""
        return limits.multiplying(self.batch.num_operations, GEMM_DTYPE, DEVICE, TIME)


def in_dtype(series: str) -> str:
    """Name a series of torch's by its dtype, unless that is ours."""
    return series if IS_BF16 else f"{series}, float32"


def torch_attention(paged: Paged, **options: Any) -> Callable[[], float]:
    """Time torch's attention; it allocates its result, as it always does."""
    arguments = paged.contiguous() | options
    return lambda: TIME(lambda: scaled_dot_product_attention(**arguments))


def decode(batch: Batch) -> Source:
    """Compute one new token of each sequence."""
    paged = Paged(batch)
    return in_turns(
        {"pagedkv": paged.sample, in_dtype(SDPA): torch_attention(paged), READ: paged.reading()}, 6
    )


def decode_int8() -> Source:
    """Attend to the same from pages of 8 bits with a scale for each token and head."""
    paged, plain = Paged(shapes.DECODE, torch.int8), Paged(shapes.DECODE)
    return in_turns({"pagedkv": paged.sample, BF16_PAGES: plain.sample, READ: paged.reading()}, 6)


def prefill_cached(batch: Batch) -> Source:
    """Compute new tokens behind cached ones; torch with a mask, or without one what nobody may see too."""
    paged = Paged(batch)
    positions = torch.arange(batch.num_keys, device=DEVICE)
    mask = positions <= positions[-batch.num_queries :, None]
    calls = {
        "pagedkv": paged.sample,
        in_dtype(UNMASKED): torch_attention(paged),
        in_dtype(MASKED): torch_attention(paged, attn_mask=mask),
        THE_GEMM: paged.multiplying(),
    }
    return in_turns(calls, 2)


def prefill(batch: Batch) -> Source:
    """Compute a whole prompt."""
    paged = Paged(batch)
    calls = {
        "pagedkv": paged.sample,
        in_dtype(SDPA): torch_attention(paged, is_causal=True),
        THE_GEMM: paged.multiplying(),
    }
    return in_turns(calls, 1)


def shared(batch: Batch) -> Source:
    """Decode with a long beginning in common, each page of it read once, or by each sequence."""
    paged = Paged(batch)
    prefixes = paged.prefixes
    read, multiply = paged.reading(), paged.multiplying()
    ratio = batch.kv_bytes(once=False) / batch.kv_bytes()
    calls = {
        "pagedkv": lambda: TIME(lambda: paged.attend(prefixes)),
        UNGROUPED: paged.sample,
        ROOF: lambda: max(read(), multiply()),
        READ_ALL: lambda: read() * ratio,
    }
    return in_turns(calls, 3)


def unshared(batch: Batch) -> Source:
    """Decode with nothing in common, looking for shared pages or not; `prepare` included."""
    paged = Paged(batch)
    pool = BlockPool(batch.num_seqs * batch.num_blocks, block_size=BLOCK_SIZE)
    seqs = [pool.open([i] * batch.num_keys) for i in range(batch.num_seqs)]
    step = pool.reserve(seqs, [batch.num_keys] * batch.num_seqs)

    def run(share: bool) -> None:
        tables = pool.prepare(step, share_prefixes=share)
        arrays = (tables.prefix_groups, tables.prefix_rows) if len(tables.prefix_groups) else ()
        paged.attend(SharedPrefixes._make(map(torch.tensor, arrays)) if arrays else None)

    calls = {"pagedkv": lambda: TIME(lambda: run(True)), OFF: lambda: TIME(lambda: run(False))}
    return in_turns(calls, 12)


def write_kv() -> Source:
    """Write the K and V of 8,192 tokens into slots in any order of blocks."""
    num_tokens, num_heads, head_dim = 8_192, 8, 128
    spec = KVCacheSpec.uniform(1, num_heads, head_dim, "bfloat16", BLOCK_SIZE)
    storage = KVPages(spec, 2 * num_tokens // BLOCK_SIZE, device=DEVICE)
    blocks = torch.randperm(storage.num_blocks)[: num_tokens // BLOCK_SIZE]
    slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten().to(DEVICE)
    key, value = (torch.randn(num_tokens, num_heads, head_dim, device=DEVICE).bfloat16() for _ in range(2))
    calls = {
        "pagedkv": lambda: TIME(lambda: ops.write_kv(key, value, *storage[0], slots)),
        COPY: limits.copying(2 * key.numel() * key.element_size(), DEVICE, TIME),
    }
    return in_turns(calls, 6)


def block_storage() -> tuple[KVPages, torch.Tensor, int]:
    """Pages of 8 layers, 512 kB a block; some of them in any order, and their bytes."""
    storage = KVPages(KVCacheSpec.uniform(8, 8, 128, "bfloat16", BLOCK_SIZE), 256, device=DEVICE)
    storage.blocks.zero_()
    ids = torch.randperm(storage.num_blocks, device=DEVICE)
    return storage, ids, storage.size_bytes // 2


def copy_blocks() -> Source:
    """Copy 128 blocks over 128 others, all layers at once."""
    storage, ids, num_bytes = block_storage()
    calls = {
        "pagedkv": lambda: TIME(lambda: ops.copy_blocks(storage.extents[0], ids[:128], ids[128:])),
        COPY: limits.copying(num_bytes, DEVICE, TIME),
    }
    return in_turns(calls, 6)


def gather_blocks() -> Source:
    """Copy 128 blocks, all layers at once, into one buffer."""
    storage, ids, num_bytes = block_storage()
    buffer = torch.zeros_like(storage.blocks[:128])
    calls = {
        "pagedkv": lambda: TIME(lambda: ops.gather_blocks(storage.blocks, ids[:128], buffer=buffer)),
        COPY: limits.copying(num_bytes, DEVICE, TIME),
    }
    return in_turns(calls, 6)


def overhead() -> Source:
    """Go from Python to the kernel and back: one query, one key, the mean of 200 calls."""
    paged = Paged(shapes.ONE_TOKEN)
    while True:
        yield {"pagedkv": harness.repeated(paged.attend, 5, 200)}


def machine() -> Source:
    """Time a million operations of each kind of product, and the reading of a megabyte."""
    size = 2**26
    pages = torch.ones(size // 2**16, 2**16, dtype=torch.uint8, device=DEVICE)
    read = limits.reading(pages, torch.arange(len(pages), dtype=torch.int32), TIME)
    calls: Calls = {
        READ: lambda: read() * 1e6 / size,
        GEMM: limits.multiplying(10**6, torch.bfloat16, DEVICE, TIME),
        F32_GEMM: limits.multiplying(10**6, torch.float32, DEVICE, TIME),
    }
    return in_turns(calls, 2)


WORKS: dict[str, Callable[[], Source]] = {
    "machine": machine,
    "decode": partial(decode, shapes.DECODE),
    "decode_int8": decode_int8,
    "decode_small": partial(decode, shapes.DECODE_SMALL),
    "prefill_cached": partial(prefill_cached, shapes.PREFILL_CACHED),
    "prefill": partial(prefill, shapes.PREFILL),
    "shared": partial(shared, shapes.SHARED),
    "unshared": partial(unshared, shapes.UNSHARED),
    "write_kv": write_kv,
    "copy_blocks": copy_blocks,
    "gather_blocks": gather_blocks,
    "overhead": overhead,
}


def on_threads(work: Callable[[], Source], num_threads: int) -> Source:
    """Do it on so many threads, and as many cores."""
    cores = sorted(ALL_CORES)[-num_threads:]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(num_threads)
    yield from work()


ALL_CORES = os.sched_getaffinity(0)

ROWS: harness.Rows = {
    shapes.with_threads(name, num_threads): partial(on_threads, work, num_threads)
    for name, work in WORKS.items()
    for num_threads in shapes.THREADS
}


if __name__ == "__main__":
    harness.main({"library": "pagedkv", "version": __version__, "device": str(DEVICE)}, ROWS)
