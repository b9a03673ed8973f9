"""The operations as Triton kernels, for GPUs of NVIDIA and AMD, and for the CPU under TRITON_INTERPRET=1.

Every operation is a list of launches, made from sizes alone: nothing waits for the GPU or reads from it, and
all memory is torch's, so a CUDA graph may hold any of them. A slot or a block id that is none is skipped, not
reported, and nothing outside of the pages is touched for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pagedkv.kernels.triton.attention import paged_attention_launches
from pagedkv.kernels.triton.blocks import copy_blocks_launches, move_launches
from pagedkv.kernels.triton.launching import Launch, run, why_unavailable
from pagedkv.kernels.triton.merging import merge_launches
from pagedkv.kernels.triton.writing import write_kv_launches

__all__ = [
    "copy_blocks",
    "gather_blocks",
    "merge_attention_states",
    "paged_attention",
    "scatter_blocks",
    "why_unavailable",
    "write_kv",
]


def _launch(prepare: Callable[..., list[Launch]], *arguments: Any, **options: Any) -> None:
    with torch.cuda.device_of(arguments[0]):  # nothing for a tensor of the CPU
        for launch in prepare(*arguments, **options):
            run(launch)


def write_kv(*arguments: Any) -> None:
    """Write tokens into pages; a slot outside of them is skipped."""
    _launch(write_kv_launches, *arguments)


def paged_attention(*arguments: Any) -> None:
    """Attend over pages; a page that there is not holds nothing."""
    _launch(paged_attention_launches, *arguments)


def copy_blocks(blocks: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy blocks onto others; a source that there is not copies nothing in particular."""
    _launch(copy_blocks_launches, blocks, sources, destinations)


def gather_blocks(blocks: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy blocks into a buffer."""
    _launch(move_launches, blocks, block_ids, buffer, into_buffer=True)


def scatter_blocks(buffer: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor) -> None:
    """Copy a buffer into blocks."""
    _launch(move_launches, blocks, block_ids, buffer, into_buffer=False)


def merge_attention_states(
    outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Fold the states one after the other."""
    _launch(merge_launches, outs, lses, out, lse)
