"""vLLM's attention for CPUs, without a model: its kernel over its own pages, as its backend calls it.

    python -m benchmarks.peers.vllm_attention > vllm_attention.json

Blocks have 32 tokens, the fewest that the kernel takes. How it divides the work is decided once a step, not
once a layer, and is not timed.
"""

from __future__ import annotations

import os

# Before torch is imported: its idle workers would otherwise spin on the cores that others are timed on.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from functools import partial

import torch
import vllm
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from benchmarks import harness, shapes
from benchmarks.harness import Source, quiesce, timed
from benchmarks.shapes import Batch

BLOCK_SIZE = 32

ALL_CORES = sorted(os.sched_getaffinity(0))


def best_isa(head_dim: int) -> str:
    """Choose as its backend does, whose module needs more than this environment holds."""
    if head_dim % 32:
        return "vec16"
    return "amx" if torch.cpu._is_amx_tile_supported() else "vec"


def attend(batch: Batch, num_threads: int) -> Source:
    """Attend to a batch; its pages lie in any order."""
    os.sched_setaffinity(0, ALL_CORES[-num_threads:])
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    num_blocks = -(-batch.num_keys // BLOCK_SIZE)
    isa = best_isa(batch.head_dim)
    shape = batch.num_seqs * num_blocks, batch.num_kv_heads, 2 * BLOCK_SIZE, batch.head_dim
    key_cache, value_cache = torch.zeros(shape, dtype=torch.bfloat16).chunk(2, dim=2)
    block_table = torch.randperm(shape[0], dtype=torch.int32).view(batch.num_seqs, num_blocks)
    for row in block_table:
        kv_shape = batch.num_keys, batch.num_kv_heads, batch.head_dim
        key, value = (torch.randn(kv_shape).bfloat16() for _ in range(2))
        positions = torch.arange(batch.num_keys)
        slots = row[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
    query = torch.randn(batch.num_seqs * batch.num_queries, batch.num_heads, batch.head_dim).bfloat16()
    out = torch.empty_like(query)
    seq_lens = torch.full((batch.num_seqs,), batch.num_keys, dtype=torch.int32)
    query_start_loc = torch.arange(batch.num_seqs + 1, dtype=torch.int32) * batch.num_queries
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=batch.num_seqs,
        num_heads=batch.num_heads,
        num_kv_heads=batch.num_kv_heads,
        head_dim=batch.head_dim,
        seq_lens=seq_lens,
        dtype=torch.bfloat16,
        query_start_loc=query_start_loc,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )

    def call() -> None:
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=out,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            scale=batch.head_dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=block_table,
            softcap=0,
            scheduler_metadata=schedule,
            s_aux=None,
        )

    call()
    quiesce()
    while True:
        yield {"vLLM": [timed(call) for _ in range(2)]}


ROWS: harness.Rows = {
    shapes.with_threads(name, num_threads): partial(attend, batch, num_threads)
    for name, batch in shapes.PEER_BATCHES.items()
    for num_threads in shapes.THREADS
}


if __name__ == "__main__":
    current_platform.import_kernels()
    harness.main({"peer": "vLLM", "version": vllm.__version__}, ROWS)
