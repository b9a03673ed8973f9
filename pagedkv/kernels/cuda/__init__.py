"""The operations in CUDA C++ (``csrc/cuda``), on the current stream and without waiting for it.

Nothing is opened at import. Ids and slots that are wrong are not reported, since nobody waits for the device:
a slot outside of the pages is skipped, and a page that there is not reads as zeros.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from pagedkv.errors import BackendUnavailableError
from pagedkv.kernels.cuda import calls
from pagedkv.kernels.cuda.library import CudaLibrary


@cache
def load_library() -> CudaLibrary:
    """Open the library once, for the first operation.

    Raises
    ------
    BackendUnavailableError
        Says what is missing.
    """
    library = CudaLibrary()
    reason = library.why_unavailable()
    if reason is not None:
        raise BackendUnavailableError(f"backend: expected a device for 'cuda', got none: {reason}")
    return library


def why_unavailable() -> str | None:
    """Say what is missing here; None when nothing is."""
    try:
        load_library()
    except BackendUnavailableError as error:
        return str(error).removeprefix("backend: ")
    return None


def write_kv(*arguments: Any) -> None:
    """Write each token's K and V to its slot."""
    calls.write_kv(load_library(), *arguments)


def paged_attention(*arguments: Any) -> None:
    """Attend from new tokens to the pages of their sequences."""
    calls.paged_attention(load_library(), *arguments)


def copy_blocks(blocks: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy whole blocks, all layers at once."""
    calls.copy_blocks(load_library(), blocks, sources, destinations)


def gather_blocks(blocks: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy blocks into a buffer, one after the other."""
    calls.transfer_blocks(load_library(), "gather_blocks", blocks, block_ids, buffer)


def scatter_blocks(buffer: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor) -> None:
    """Copy a buffer into blocks."""
    calls.transfer_blocks(load_library(), "scatter_blocks", blocks, block_ids, buffer)


def merge_attention_states(*arguments: Any) -> None:
    """Merge states of disjoint keys."""
    calls.merge_attention_states(load_library(), *arguments)
