"""From tensors to the structs that the library takes. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from typing import Protocol

import torch

from pagedkv.errors import UsageError
from pagedkv.kernels.cuda import abi


class Runner(Protocol):
    """What starts an operation: :class:`pagedkv.kernels.cuda.library.CudaLibrary`."""

    def run(self, name: str, params: Structure, device: torch.device) -> None:
        """Start it."""


def write_kv(
    runner: Runner,
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    """Write each token's K and V to its slot; slots outside of the pages are skipped."""
    num_blocks, block_size, num_kv_heads, head_dim = key_pages.shape
    slots = slot_mapping.contiguous()
    params = abi.WriteKvParams(
        key=_tokens(key),
        value=_tokens(value),
        key_pages=_pages(key_pages),
        value_pages=_pages(value_pages),
        key_scales=_scales(key_scales),
        value_scales=_scales(value_scales),
        slot_mapping=slots.data_ptr(),
        num_tokens=len(slots),
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        token_dtype=abi.DTYPES[key.dtype],
        page_dtype=abi.DTYPES[key_pages.dtype],
    )
    runner.run("write_kv", params, key_pages.device)


def paged_attention(
    runner: Runner,
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
    """Attend; what sequences share is read for each of them, so the groups of prefixes are not looked at."""
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, block_size, num_kv_heads, _ = key_pages.shape
    # Bound to names until the kernels are started: each may be a copy.
    table, lens, starts = _dense_rows(block_table), seq_lens.contiguous(), query_start_loc.contiguous()
    slopes, logits, masked = (_optional(tensor) for tensor in (alibi_slopes, sinks, mask))
    params = abi.AttentionParams(
        query=_tokens(query),
        out=_tokens(out),
        key_pages=_pages(key_pages),
        value_pages=_pages(value_pages),
        key_scales=_scales(key_scales),
        value_scales=_scales(value_scales),
        block_table=table.data_ptr(),
        block_table_stride=table.stride(0),
        seq_lens=lens.data_ptr(),
        query_start_loc=starts.data_ptr(),
        num_tokens=num_tokens,
        num_seqs=len(lens),
        max_blocks=table.shape[1],
        num_blocks=num_blocks,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        causal=causal,
        query_dtype=abi.DTYPES[query.dtype],
        page_dtype=abi.DTYPES[key_pages.dtype],
    )
    if lse is not None:
        params.lse = lse.data_ptr()
        params.lse_token_stride, params.lse_head_stride = lse.stride()
    if slopes is not None:
        params.alibi_slopes = slopes.data_ptr()
    if logits is not None:
        params.sinks = logits.data_ptr()
    if masked is not None:
        params.mask_stride, params.max_new = masked.stride(0), masked.shape[1]
        setattr(params, "bool_mask" if masked.dtype == torch.bool else "float_mask", masked.data_ptr())
    runner.run("paged_attention", params, query.device)


def copy_blocks(
    runner: Runner, blocks: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor
) -> None:
    """Copy whole blocks; every source is read before any destination is written."""
    loops = _Loops([blocks], "copy_blocks")
    sources, destinations = sources.contiguous(), destinations.contiguous()
    params = abi.CopyBlocksParams(
        blocks=loops.view(0),
        sources=sources.data_ptr(),
        destinations=destinations.data_ptr(),
        num_copies=len(sources),
    )
    runner.run("copy_blocks", params, blocks.device)


def transfer_blocks(
    runner: Runner, name: str, blocks: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor
) -> None:
    """Gather blocks into a buffer or scatter it into them, whichever `name` says."""
    loops = _Loops([blocks, buffer], name)
    ids = block_ids.contiguous()
    params = abi.MoveBlocksParams(
        blocks=loops.view(0),
        buffer=loops.view(1),
        block_ids=ids.data_ptr(),
    )
    runner.run(name, params, blocks.device)


def merge_attention_states(
    runner: Runner, outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Fold states that were computed from disjoint keys."""
    num_states, num_tokens, num_heads, head_dim = outs.shape
    params = abi.MergeStatesParams(
        outs=outs.data_ptr(),
        lses=lses.data_ptr(),
        out=_tokens(out),
        num_states=num_states,
        num_tokens=num_tokens,
        num_heads=num_heads,
        head_dim=head_dim,
        dtype=abi.DTYPES[outs.dtype],
    )
    params.outs_state_stride, params.outs_token_stride, params.outs_head_stride, _ = outs.stride()
    params.lses_state_stride, params.lses_token_stride, params.lses_head_stride = lses.stride()
    if lse is not None:
        params.lse = lse.data_ptr()
        params.lse_token_stride, params.lse_head_stride = lse.stride()
    runner.run("merge_attention_states", params, outs.device)


class _Loops:
    """The inside of blocks, [any, …] tensors of one shape: runs of contiguous bytes and loops over them."""

    def __init__(self, tensors: Sequence[torch.Tensor], where: str) -> None:
        size = tensors[0].element_size()
        self._tensors = tensors
        self.run_bytes = size
        # (size, stride of each tensor) of every dimension; the innermost of the last tensor goes last.
        strides = zip(*(tensor.stride()[1:] for tensor in tensors), strict=True)
        dims = [
            (length, [stride * size for stride in each])
            for length, each in zip(tensors[0].shape[1:], strides, strict=True)
            if length != 1
        ]
        dims.sort(key=lambda dim: dim[1][-1], reverse=True)
        loops: list[tuple[int, list[int]]] = []
        for length, each in reversed(dims):
            if not loops and all(stride == self.run_bytes for stride in each):
                self.run_bytes *= length
            elif loops and each == [stride * loops[-1][0] for stride in loops[-1][1]]:
                loops[-1] = loops[-1][0] * length, loops[-1][1]
            else:
                loops.append((length, each))
        if len(loops) > abi.MAX_DIMS:
            what = f"blocks of at most {abi.MAX_DIMS} dimensions that do not lie one after the other"
            raise UsageError(f"blocks: expected {what}, got {len(loops)}, in {where}")
        self._loops = loops[::-1]

    def view(self, index: int) -> abi.BlocksView:
        tensor = self._tensors[index]
        return abi.BlocksView(
            data=tensor.data_ptr(),
            num_blocks=len(tensor),
            block_stride=tensor.stride(0) * tensor.element_size(),
            run_bytes=self.run_bytes,
            num_dims=len(self._loops),
            sizes=tuple(length for length, _ in self._loops),
            strides=tuple(strides[index] for _, strides in self._loops),
        )


def _tokens(tensor: torch.Tensor) -> abi.TokensView:
    return abi.TokensView(tensor.data_ptr(), *tensor.stride()[:2])


def _pages(tensor: torch.Tensor) -> abi.PagesView:
    return abi.PagesView(tensor.data_ptr(), *tensor.stride()[:3])


def _scales(tensor: torch.Tensor | None) -> abi.ScalesView:
    return abi.ScalesView() if tensor is None else abi.ScalesView(tensor.data_ptr(), *tensor.stride())


def _optional(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else _dense_rows(tensor)


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
