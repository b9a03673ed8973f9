"""The operations on pages: one checked entry for each.

This is the only place that checks shapes, dtypes and devices. Nothing here is differentiated: pages outlive
every graph. Every entry may be traced by ``torch.compile(fullgraph=True)`` and captured in a CUDA graph.
"""

from pagedkv.kernels import resolve_backend, why_unavailable
from pagedkv.ops.attention import paged_attention
from pagedkv.ops.blocks import copy_blocks, gather_blocks, scatter_blocks
from pagedkv.ops.merging import merge_attention_states
from pagedkv.ops.writing import write_kv

__all__ = [
    "copy_blocks",
    "gather_blocks",
    "merge_attention_states",
    "paged_attention",
    "resolve_backend",
    "scatter_blocks",
    "why_unavailable",
    "write_kv",
]
