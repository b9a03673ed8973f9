"""Every operation by the C++ kernels: addresses and strides go over; only what tables hold is checked.

The instruction set is that of PAGEDKV_CPU_ISA, or the fastest that the processor has; it is chosen once.
A call works on as many threads as torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import get_num_threads

from pagedkv import _core
from pagedkv.config import CPU_ISA, read_cpu_isa

_DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.int8: 4,
}  # as in csrc/include/pagedkv/kernels.h


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
    slot_mapping = slot_mapping.contiguous()
    _core.cpu_write_kv(
        chosen_isa(),
        get_num_threads(),
        key.data_ptr(),
        key.stride(),
        value.data_ptr(),
        value.stride(),
        _DTYPES[key.dtype],
        key_pages.data_ptr(),
        key_pages.stride(),
        value_pages.data_ptr(),
        value_pages.stride(),
        key_pages.shape,
        _DTYPES[key_pages.dtype],
        slot_mapping.data_ptr(),
        len(slot_mapping),
        *_address_and_strides(key_scales),
        *_address_and_strides(value_scales),
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
    # Copies, if any are made, live until the kernel has returned.
    if block_table.stride(-1) != 1:
        block_table = block_table.contiguous()
    seq_lens = seq_lens.contiguous()
    query_start_loc = query_start_loc.contiguous()
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.contiguous()
    if sinks is not None:
        sinks = sinks.contiguous()
    if mask is not None:
        mask = mask.contiguous()
    if prefix_groups is not None and prefix_rows is not None:
        prefix_groups, prefix_rows = prefix_groups.contiguous(), prefix_rows.contiguous()
        groups = (prefix_groups.data_ptr(), len(prefix_groups), prefix_rows.data_ptr(), len(prefix_rows))
    else:
        groups = (0, 0, 0, 0)
    _core.cpu_paged_attention(
        chosen_isa(),
        get_num_threads(),
        query.data_ptr(),
        query.shape,
        query.stride(),
        _DTYPES[query.dtype],
        key_pages.data_ptr(),
        key_pages.stride(),
        value_pages.data_ptr(),
        value_pages.stride(),
        key_pages.shape,
        _DTYPES[key_pages.dtype],
        block_table.data_ptr(),
        block_table.shape,
        block_table.stride(0),
        seq_lens.data_ptr(),
        query_start_loc.data_ptr(),
        out.data_ptr(),
        out.stride(),
        *_address_and_strides(lse),
        scale,
        causal,
        window,
        soft_cap,
        0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        mask is not None and mask.dtype == torch.bool,
        0 if mask is None else mask.stride(0),
        0 if mask is None else mask.shape[1],
        *_address_and_strides(key_scales),
        *_address_and_strides(value_scales),
        *groups,
    )


def copy_blocks(blocks: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy whole blocks, all layers at once; every source is read before any destination is written."""
    sources, destinations = sources.contiguous(), destinations.contiguous()
    _core.cpu_copy_blocks(
        chosen_isa(),
        get_num_threads(),
        blocks.data_ptr(),
        blocks.shape,
        blocks.stride(),
        blocks.element_size(),
        sources.data_ptr(),
        destinations.data_ptr(),
        len(sources),
    )


def gather_blocks(blocks: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy blocks into a buffer, one after the other."""
    _move_blocks(_core.cpu_gather_blocks, blocks, block_ids, buffer)


def scatter_blocks(buffer: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor) -> None:
    """Copy a buffer into blocks."""
    _move_blocks(_core.cpu_scatter_blocks, blocks, block_ids, buffer)


def merge_attention_states(
    outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Put results over disjoint keys together, weighted by what they saw."""
    _core.cpu_merge_attention_states(
        chosen_isa(),
        get_num_threads(),
        outs.data_ptr(),
        outs.shape,
        outs.stride(),
        _DTYPES[outs.dtype],
        lses.data_ptr(),
        lses.stride(),
        out.data_ptr(),
        out.stride(),
        *_address_and_strides(lse),
    )


def _move_blocks(
    move: Callable[..., None], blocks: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor
) -> None:
    block_ids = block_ids.contiguous()
    move(
        chosen_isa(),
        get_num_threads(),
        blocks.data_ptr(),
        blocks.shape,
        blocks.stride(),
        blocks.element_size(),
        buffer.data_ptr(),
        buffer.stride(),
        block_ids.data_ptr(),
        len(block_ids),
    )


def _address_and_strides(tensor: torch.Tensor | None) -> tuple[int, tuple[int, ...]]:
    return (0, ()) if tensor is None else (tensor.data_ptr(), tensor.stride())
