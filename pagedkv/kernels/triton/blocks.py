"""copy_blocks, gather_blocks and scatter_blocks: numbers moved as bits, whatever their dtype and strides."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from triton import next_power_of_2

from pagedkv.kernels.triton.launching import Launch, target_of

MAX_ELEMENTS = 4096
"""That one program moves."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["num_blocks", "num_outer", "num_inner"])
def move_blocks(
    blocks, block_stride, block_inner_stride,
    buffer, buffer_stride, buffer_inner_stride,
    block_ids, num_blocks, num_outer, num_inner,
    block_stride_0, block_stride_1, block_stride_2, block_stride_3,
    buffer_stride_0, buffer_stride_1, buffer_stride_2, buffer_stride_3,
    SIZE_1: tl.constexpr, SIZE_2: tl.constexpr, SIZE_3: tl.constexpr,
    ELEMENTS: tl.constexpr, INTO_BUFFER: tl.constexpr,
):  # fmt: skip
    """Move a run of one block; an id that is no block's is skipped. Grid: (blocks × positions, runs)."""
    copy = (tl.program_id(0) // num_outer).to(tl.int64)
    outer = (tl.program_id(0) % num_outer).to(tl.int64)
    block = tl.load(block_ids + copy)
    at_3 = outer % SIZE_3
    outer = outer // SIZE_3
    at_2 = outer % SIZE_2
    outer = outer // SIZE_2
    at_1 = outer % SIZE_1
    at_0 = outer // SIZE_1
    inner = tl.program_id(1).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_element = inner < tl.where((block >= 0) & (block < num_blocks), num_inner, 0)
    in_blocks = block * block_stride + at_0 * block_stride_0 + at_1 * block_stride_1
    in_blocks = (
        blocks + in_blocks + at_2 * block_stride_2 + at_3 * block_stride_3 + inner * block_inner_stride
    )
    in_buffer = copy * buffer_stride + at_0 * buffer_stride_0 + at_1 * buffer_stride_1
    in_buffer = (
        buffer + in_buffer + at_2 * buffer_stride_2 + at_3 * buffer_stride_3 + inner * buffer_inner_stride
    )
    if INTO_BUFFER:
        tl.store(in_buffer, tl.load(in_blocks, mask=is_element), mask=is_element)
    else:
        tl.store(in_blocks, tl.load(in_buffer, mask=is_element), mask=is_element)


def copy_blocks_launches(
    blocks: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor, *, target: str | None = None
) -> list[Launch]:
    """Return what copies blocks by way of a buffer: a source may be another copy's destination."""
    buffer = blocks.new_empty((len(sources), *blocks.shape[1:]))
    return [
        *move_launches(blocks, sources, buffer, into_buffer=True, target=target),
        *move_launches(blocks, destinations, buffer, into_buffer=False, target=target),
    ]


def move_launches(
    blocks: torch.Tensor,
    block_ids: torch.Tensor,
    buffer: torch.Tensor,
    *,
    into_buffer: bool,
    target: str | None = None,
) -> list[Launch]:
    """Return what moves blocks into a buffer, or out of it."""
    target = target or target_of(blocks.device)
    if len(block_ids) == 0 or blocks.numel() == 0:
        return []
    blocks, buffer = _bits(blocks), _bits(buffer)
    *outer, (num_inner, block_inner_stride, buffer_inner_stride) = _merge(
        blocks.shape[1:], blocks.stride()[1:], buffer.stride()[1:]
    )
    if len(outer) > 4:  # rarely is more than one left
        pairs = zip(blocks.unbind(1), buffer.unbind(1), strict=True)
        moves = (move_launches(a, block_ids, b, into_buffer=into_buffer, target=target) for a, b in pairs)
        return [launch for launches in moves for launch in launches]
    outer = [(1, 0, 0)] * (4 - len(outer)) + outer
    elements = min(MAX_ELEMENTS, next_power_of_2(num_inner))
    arguments: dict[str, Any] = {
        "blocks": blocks,
        "block_stride": blocks.stride(0),
        "block_inner_stride": block_inner_stride,
        "buffer": buffer,
        "buffer_stride": buffer.stride(0),
        "buffer_inner_stride": buffer_inner_stride,
        "block_ids": block_ids.contiguous(),
        "num_blocks": len(blocks),
        "num_inner": num_inner,
        **{f"SIZE_{i}": outer[i][0] for i in (1, 2, 3)},
        **{f"block_stride_{i}": outer[i][1] for i in range(4)},
        **{f"buffer_stride_{i}": outer[i][2] for i in range(4)},
        "ELEMENTS": elements,
        "INTO_BUFFER": into_buffer,
    }
    num_outer = prod(size for size, _, _ in outer)
    arguments["num_outer"] = num_outer
    grid = (len(block_ids) * num_outer, -(-num_inner // elements))
    return [Launch(move_blocks, grid, arguments)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View numbers as integers of their size, since Triton lacks some of torch's dtypes."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.dtype.itemsize])


def _merge(
    sizes: tuple[int, ...], strides: tuple[int, ...], other_strides: tuple[int, ...]
) -> list[tuple[int, int, int]]:
    """Return the dimensions as (size, stride, other stride), as few as walk both; the densest comes last."""
    dims = sorted(zip(sizes, strides, other_strides, strict=True), key=lambda dim: dim[1:], reverse=True)
    merged = [(1, 1, 1)]
    for size, stride, other in dims:
        before, *spans = merged[-1]
        if before == 1:
            merged[-1] = (size, stride, other)
        elif size > 1 and spans == [stride * size, other * size]:
            merged[-1] = (before * size, stride, other)
        elif size > 1:
            merged.append((size, stride, other))
    return merged
