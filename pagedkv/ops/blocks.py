"""Whole blocks: onto other blocks, out of the pages and back into them."""

from __future__ import annotations

from typing import Any

import torch

import pagedkv.torch_library  # noqa: F401  (registers torch.ops.pagedkv)
from pagedkv.config import Backend
from pagedkv.kernels import check_backend
from pagedkv.ops.checks import check_tensor, check_written, kind, refuse, size

_copy_blocks = torch.ops.pagedkv.copy_blocks.default
_gather_blocks = torch.ops.pagedkv.gather_blocks.default
_scatter_blocks = torch.ops.pagedkv.scatter_blocks.default


def copy_blocks(
    blocks: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor, *, backend: Backend | None = None
) -> None:
    """Copy blocks onto others, all layers at once. Every source is read before any destination is written.

    Means::

        blocks[destinations] = [blocks[source].clone() for source in sources]

    Parameters
    ----------
    blocks : Tensor [num_blocks, …]
        Of any dtype and strides, such as ``KVPages.extents``. Modified.
    sources, destinations : Tensor [num_copies] int64
        A source may occur several times, a destination only once.
    backend : str, optional
        As in `paged_attention`.

    Raises
    ------
    ShapeError
    UsageError
        By the backends "reference" and "cpu" for a block that there is not; nothing is copied then.
    BackendUnavailableError
    """
    _check_blocks("blocks", blocks, "copy_blocks")
    check_written("blocks", blocks, "copy_blocks")
    num_copies = size(sources, 0, 1)
    check_tensor("sources", sources, (num_copies,), torch.int64, blocks.device, "copy_blocks")
    check_tensor("destinations", destinations, (num_copies,), torch.int64, blocks.device, "copy_blocks")
    _copy_blocks(blocks, sources, destinations, "" if backend is None else check_backend(backend))


def gather_blocks(
    blocks: torch.Tensor,
    block_ids: torch.Tensor,
    *,
    buffer: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Copy blocks into one buffer, one after the other.

    Means::

        for i, block_id in enumerate(block_ids):
            buffer[i] = blocks[block_id]

    Parameters
    ----------
    blocks : Tensor [num_blocks, …]
        Of any dtype and strides, such as ``KVPages.extents``.
    block_ids : Tensor [num_copies] int64
    buffer : Tensor [num_copies, …], optional
        Of the dtype and device of `blocks`. Overwritten and returned; a new, contiguous one by default.
    backend : str, optional
        As in `paged_attention`.

    Returns
    -------
    Tensor [num_copies, …]

    Raises
    ------
    ShapeError
    UsageError
        By the backends "reference" and "cpu" for a block that there is not.
    BackendUnavailableError
    """
    _check_blocks("blocks", blocks, "gather_blocks")
    check_tensor(
        "block_ids", block_ids, (size(block_ids, 0, 1),), torch.int64, blocks.device, "gather_blocks"
    )
    shape = (block_ids.shape[0], *blocks.shape[1:])
    if buffer is None:
        buffer = blocks.new_empty(shape)
    else:
        check_tensor("buffer", buffer, shape, blocks.dtype, blocks.device, "gather_blocks")
        check_written("buffer", buffer, "gather_blocks")
    _gather_blocks(blocks, block_ids, buffer, "" if backend is None else check_backend(backend))
    return buffer


def scatter_blocks(
    buffer: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor, *, backend: Backend | None = None
) -> None:
    """Copy what a buffer holds into blocks.

    Means::

        for i, block_id in enumerate(block_ids):
            blocks[block_id] = buffer[i]

    Parameters
    ----------
    buffer : Tensor [num_copies, …]
        Of the dtype and device of `blocks`, and any strides.
    block_ids : Tensor [num_copies] int64
        None of them twice.
    blocks : Tensor [num_blocks, …]
        Of any dtype and strides, such as ``KVPages.extents``. Modified.
    backend : str, optional
        As in `paged_attention`.

    Raises
    ------
    ShapeError
    UsageError
        By the backends "reference" and "cpu" for a block that there is not; nothing is copied then.
    BackendUnavailableError
    """
    _check_blocks("blocks", blocks, "scatter_blocks")
    check_written("blocks", blocks, "scatter_blocks")
    check_tensor(
        "block_ids", block_ids, (size(block_ids, 0, 1),), torch.int64, blocks.device, "scatter_blocks"
    )
    shape = (block_ids.shape[0], *blocks.shape[1:])
    check_tensor("buffer", buffer, shape, blocks.dtype, blocks.device, "scatter_blocks")
    _scatter_blocks(buffer, block_ids, blocks, "" if backend is None else check_backend(backend))


def _check_blocks(name: str, blocks: Any, where: str) -> None:
    if not isinstance(blocks, torch.Tensor) or blocks.ndim == 0:
        refuse(name, "a tensor [num_blocks, …]", kind(blocks), where)
