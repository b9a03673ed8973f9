"""The operations on pages: one checked entry for each, and the choice of backend.

This is the only place that checks tensors; the kernels trust their arguments.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from pagedkv.config import Backend, read_backend
from pagedkv.errors import BackendUnavailableError, ShapeError
from pagedkv.kernels import reference

BACKENDS: dict[str, ModuleType] = {"reference": reference}
"""What this version has. Every backend holds every operation."""


def choose_backend(name: Backend | None = None) -> ModuleType:
    """Return the backend asked for by `name` or else by PAGEDKV_BACKEND, or the only one there is.

    Raises
    ------
    BackendUnavailableError
        For one that this version does not have.
    UsageError
        When PAGEDKV_BACKEND holds no backend's name.
    """
    name = name or read_backend() or "reference"
    if name not in BACKENDS:
        raise BackendUnavailableError(f"backend: expected one of {', '.join(BACKENDS)}, got {name!r}")
    return BACKENDS[name]


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Write the K and V of new tokens into one layer's pages.

    Means::

        for token, slot in enumerate(slot_mapping):
            if slot >= 0:
                key_pages[slot // block_size, slot % block_size] = key[token]
                value_pages[slot // block_size, slot % block_size] = value[token]

    Parameters
    ----------
    key, value : Tensor [num_tokens, num_kv_heads, head_dim]
        Of the pages' dtype and device.
    key_pages, value_pages : Tensor [num_blocks, block_size, num_kv_heads, head_dim]
        Any strides. Modified.
    slot_mapping : Tensor [num_tokens] int64
        −1 skips a token.

    Raises
    ------
    ShapeError
    """
    heads = tuple(key_pages.shape[2:])
    num_tokens = slot_mapping.shape[0] if slot_mapping.ndim == 1 else -1
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, key_pages.device, "write_kv")
    check_tensor("key", key, (num_tokens, *heads), key_pages.dtype, key_pages.device, "write_kv")
    check_tensor("value", value, (num_tokens, *heads), key_pages.dtype, key_pages.device, "write_kv")
    choose_backend(backend).write_kv(key, value, key_pages, value_pages, slot_mapping)


def copy_blocks(
    blocks: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor, *, backend: Backend | None = None
) -> None:
    """Copy blocks onto others, all layers at once. Every source is read before any destination is written.

    Parameters
    ----------
    blocks : Tensor [num_blocks, …]
        Such as ``KVPages.blocks``. Modified.
    sources, destinations : Tensor [num_copies] int64

    Raises
    ------
    ShapeError
    """
    num_copies = sources.shape[0] if sources.ndim == 1 else -1
    for name, ids in (("sources", sources), ("destinations", destinations)):
        check_tensor(name, ids, (num_copies,), torch.int64, blocks.device, "copy_blocks")
    choose_backend(backend).copy_blocks(blocks, sources, destinations)


def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Causal attention of new tokens over the pages of their sequences; prefill and decode in one batch.

    Sequence i has the queries ``[query_start_loc[i], query_start_loc[i + 1])``; they stand at its last
    positions, and each sees every key up to its own. Means, for one query at `position` of sequence i and one
    head::

        keys = [key_pages[block_table[i, p // block_size], p % block_size, head // group] for p in
        range(position + 1)] out = softmax(scale * query @ keys.T) @ values

    Parameters
    ----------
    query : Tensor [num_tokens, num_heads, head_dim]
        `num_heads` is a multiple of `num_kv_heads`; ``group`` is the quotient.
    key_pages, value_pages : Tensor [num_blocks, block_size, num_kv_heads, head_dim]
        Any strides. What lies behind a sequence's length is never read.
    block_table : Tensor [num_seqs, max_blocks] int32
    seq_lens : Tensor [num_seqs] int32
        A length of 0 gives rows of zeros.
    query_start_loc : Tensor [num_seqs + 1] int32
    scale : float, optional
        ``head_dim ** −0.5`` by default.
    out : Tensor [num_tokens, num_heads, head_dim], optional
        Overwritten and returned; a new tensor by default.

    Returns
    -------
    Tensor [num_tokens, num_heads, head_dim]

    Raises
    ------
    ShapeError

    Notes
    -----
    Page tables as in Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention" (2023).
    """
    num_kv_heads, head_dim = key_pages.shape[2:]
    device, dtype = key_pages.device, key_pages.dtype
    num_tokens, num_heads = query.shape[:2] if query.ndim == 3 else (-1, num_kv_heads)
    check_tensor("query", query, (num_tokens, num_heads, head_dim), dtype, device, "paged_attention")
    if num_heads == 0 or num_heads % num_kv_heads:
        _refuse("query", f"a multiple of {num_kv_heads} heads", f"{num_heads}", "paged_attention")
    num_seqs = seq_lens.shape[0] if seq_lens.ndim == 1 else -1
    max_blocks = block_table.shape[1] if block_table.ndim == 2 else -1
    check_tensor("seq_lens", seq_lens, (num_seqs,), torch.int32, device, "paged_attention")
    check_tensor("block_table", block_table, (num_seqs, max_blocks), torch.int32, device, "paged_attention")
    check_tensor("query_start_loc", query_start_loc, (num_seqs + 1,), torch.int32, device, "paged_attention")
    if out is None:
        out = torch.empty_like(query)
    else:
        check_tensor("out", out, tuple(query.shape), dtype, device, "paged_attention")
    scale = head_dim**-0.5 if scale is None else scale
    attention = choose_backend(backend).paged_attention
    attention(query, key_pages, value_pages, block_table, seq_lens, query_start_loc, scale, out)
    return out


def check_tensor(
    name: str, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, where: str
) -> None:
    """Check shape (−1: any size), dtype and device.

    Raises
    ------
    ShapeError
    """
    if not isinstance(tensor, torch.Tensor):
        _refuse(name, f"a tensor {_describe(shape, dtype, device)}", type(tensor).__name__, where)
    fits = len(shape) == tensor.ndim and all(map(_fits, shape, tensor.shape))
    if not (fits and tensor.dtype == dtype and tensor.device == device):
        got = _describe(tuple(tensor.shape), tensor.dtype, tensor.device)
        _refuse(name, _describe(shape, dtype, device), got, where)


def _fits(want: int, got: int) -> bool:
    return want in (-1, got)


def _describe(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    sizes = ", ".join("any" if size == -1 else str(size) for size in shape)
    return f"[{sizes}] {str(dtype).removeprefix('torch.')} on {device}"


def _refuse(name: str, expected: str, got: str, where: str) -> None:
    raise ShapeError(f"{name}: expected {expected}, got {got}, in {where}", name, expected, got)
