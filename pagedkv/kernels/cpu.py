"""Every operation by the C++ kernels, which are given the tensors; only what tables hold is checked there.

The instruction set is that of PAGEDKV_CPU_ISA, or the fastest that the processor has; it is chosen once.
A call works on as many threads as torch's own.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import get_num_threads

from pagedkv import _core
from pagedkv.config import CPU_ISA, read_cpu_isa


@cache
def chosen_isa() -> int:
    """Return the number of the instruction set in use.

    Raises
    ------
    UsageError
        PAGEDKV_CPU_ISA asks for one that this machine or this build does not have.
    """
    return _core.cpu_find_isa(read_cpu_isa() or "", CPU_ISA.name)


def isa_name() -> str:
    """Return the name of the instruction set in use."""
    return _core.cpu_isa_name(chosen_isa())


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    """Write each token's K and V to its slot; a slot of −1 is skipped."""
    _core.cpu_write_kv(
        chosen_isa(),
        get_num_threads(),
        key,
        value,
        key_pages,
        value_pages,
        slot_mapping,
        key_scales,
        value_scales,
    )


def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    prefix_groups: torch.Tensor | None,
    prefix_rows: torch.Tensor | None,
) -> None:
    """Attend from every new token to the keys of its sequence that it sees."""
    _core.cpu_paged_attention(
        chosen_isa(),
        get_num_threads(),
        query,
        key_pages,
        value_pages,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        lse,
        scale,
        causal,
        window,
        soft_cap,
        alibi_slopes,
        sinks,
        mask,
        key_scales,
        value_scales,
        prefix_groups,
        prefix_rows,
    )


def copy_blocks(blocks: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy whole blocks, all layers at once; every source is read before any destination is written."""
    _core.cpu_copy_blocks(chosen_isa(), get_num_threads(), blocks, sources, destinations)


def gather_blocks(blocks: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy blocks into a buffer, one after the other."""
    _core.cpu_gather_blocks(chosen_isa(), get_num_threads(), blocks, block_ids, buffer)


def scatter_blocks(buffer: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor) -> None:
    """Copy a buffer into blocks."""
    _core.cpu_scatter_blocks(chosen_isa(), get_num_threads(), blocks, block_ids, buffer)


def merge_attention_states(
    outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Put results over disjoint keys together, weighted by what they saw."""
    _core.cpu_merge_attention_states(chosen_isa(), get_num_threads(), outs, lses, out, lse)
