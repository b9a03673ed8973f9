"""The operations on pages: one checked entry for each, and the choice of backend.

This is the only place that checks shapes, dtypes and devices. Nothing here is differentiated: pages outlive
every graph.
"""

from __future__ import annotations

from math import isfinite
from numbers import Real
from types import ModuleType
from typing import Any

import torch

from pagedkv.checks import show
from pagedkv.config import Backend, read_backend
from pagedkv.errors import BackendUnavailableError, ShapeError, UsageError
from pagedkv.kernels import reference

BACKENDS: dict[str, ModuleType] = {"reference": reference}
"""What this version has. Every backend holds every operation."""


def resolve_backend(name: Backend | None = None) -> Backend:
    """Return the name of the backend that `name` asks for, or else PAGEDKV_BACKEND, or the only one there is.

    Raises
    ------
    BackendUnavailableError
        For one that this version does not have.
    UsageError
        When PAGEDKV_BACKEND holds no backend's name.
    """
    if name is None:
        name = read_backend() or "reference"
    if not isinstance(name, str) or name not in BACKENDS:
        raise BackendUnavailableError(f"backend: expected one of {', '.join(BACKENDS)}, got {name!r}")
    return name


def choose_backend(name: Backend | None = None) -> ModuleType:
    """Return the backend that :func:`resolve_backend` names."""
    return BACKENDS[resolve_backend(name)]


@torch.no_grad()
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
    _check_pages(key_pages, value_pages, "write_kv")
    heads = tuple(key_pages.shape[2:])
    num_tokens = _size(slot_mapping, 0, 1)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, key_pages.device, "write_kv")
    check_tensor("key", key, (num_tokens, *heads), key_pages.dtype, key_pages.device, "write_kv")
    check_tensor("value", value, (num_tokens, *heads), key_pages.dtype, key_pages.device, "write_kv")
    choose_backend(backend).write_kv(key, value, key_pages, value_pages, slot_mapping)


@torch.no_grad()
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
    if not isinstance(blocks, torch.Tensor) or blocks.ndim == 0:
        _refuse("blocks", "a tensor [num_blocks, …]", _kind(blocks), "copy_blocks")
    num_copies = _size(sources, 0, 1)
    for name, ids in (("sources", sources), ("destinations", destinations)):
        check_tensor(name, ids, (num_copies,), torch.int64, blocks.device, "copy_blocks")
    choose_backend(backend).copy_blocks(blocks, sources, destinations)


@torch.no_grad()
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

        pages = [(block_table[i, p // block_size], p % block_size) for p in range(position + 1)]
        keys = [key_pages[page, offset, head // group] for page, offset in pages]
        values = [value_pages[page, offset, head // group] for page, offset in pages]
        out = softmax(scale * query @ keys.T) @ values

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
        For a tensor.
    UsageError
        For `scale`.

    Notes
    -----
    Page tables as in Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention" (2023).
    """
    _check_pages(key_pages, value_pages, "paged_attention")
    num_kv_heads, head_dim = key_pages.shape[2:]
    device, dtype = key_pages.device, key_pages.dtype
    num_tokens, num_heads = _size(query, 0, 3), _size(query, 1, 3)
    check_tensor("query", query, (num_tokens, num_heads, head_dim), dtype, device, "paged_attention")
    if num_heads == 0 or num_heads % num_kv_heads:
        _refuse("query", f"a multiple of {num_kv_heads} heads", f"{num_heads}", "paged_attention")
    num_seqs, max_blocks = _size(seq_lens, 0, 1), _size(block_table, 1, 2)
    check_tensor("seq_lens", seq_lens, (num_seqs,), torch.int32, device, "paged_attention")
    check_tensor("block_table", block_table, (num_seqs, max_blocks), torch.int32, device, "paged_attention")
    check_tensor("query_start_loc", query_start_loc, (num_seqs + 1,), torch.int32, device, "paged_attention")
    if out is None:
        out = torch.empty_like(query)
    else:
        check_tensor("out", out, tuple(query.shape), dtype, device, "paged_attention")
    if scale is None:
        scale = head_dim**-0.5
    elif not isinstance(scale, Real) or isinstance(scale, bool) or not isfinite(scale):
        raise UsageError(f"scale: expected a finite number, got {show(scale)}, in paged_attention")
    scale = float(scale)
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
        _refuse(name, f"a tensor {_describe(shape, dtype, device)}", _kind(tensor), where)
    fits = len(shape) == tensor.ndim and all(map(_fits, shape, tensor.shape))
    if not (fits and tensor.dtype == dtype and tensor.device == device):
        _refuse(name, _describe(shape, dtype, device), _kind(tensor), where)


def _check_pages(key_pages: Any, value_pages: Any, where: str) -> None:
    """Check that K and V are pages, and alike."""
    if not isinstance(key_pages, torch.Tensor) or key_pages.ndim != 4 or key_pages.numel() == 0:
        expected = "a tensor [num_blocks, block_size, num_kv_heads, head_dim], none of them 0"
        _refuse("key_pages", expected, _kind(key_pages), where)
    shape = tuple(key_pages.shape)
    check_tensor("value_pages", value_pages, shape, key_pages.dtype, key_pages.device, where)


def _size(tensor: Any, dim: int, ndim: int) -> int:
    """Return a size that others are checked against; −1 (any) if `tensor` will be refused anyway."""
    return tensor.shape[dim] if isinstance(tensor, torch.Tensor) and tensor.ndim == ndim else -1


def _fits(want: int, got: int) -> bool:
    return want in (-1, got)


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return _describe(tuple(value.shape), value.dtype, value.device)


def _describe(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    sizes = ", ".join("any" if size == -1 else str(size) for size in shape)
    return f"[{sizes}] {str(dtype).removeprefix('torch.')} on {device}"


def _refuse(name: str, expected: str, got: str, where: str) -> None:
    raise ShapeError(f"{name}: expected {expected}, got {got}, in {where}", name, expected, got)
