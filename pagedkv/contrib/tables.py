"""What adapters of attention kernels check before they hand pages over."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from pagedkv.batch import AttentionMetadata
from pagedkv.cache import PagedKVCache
from pagedkv.checks import show
from pagedkv.errors import BackendUnavailableError, SpecError, StateError, UsageError

HALF = ("bfloat16", "float16")


def check_cache(cache: PagedKVCache, whose: str) -> PagedKVCache:
    """Check that kernels which want each layer's pages dense, in 16 bits, can read a cache's.

    Raises
    ------
    UsageError, SpecError
    """
    if not isinstance(cache, PagedKVCache):
        raise UsageError(f"cache: expected a PagedKVCache, got {show(cache)}")
    if cache.pages.arrangement != "layer":
        raise SpecError(
            f'cache: expected PagedKVCache(…, arrangement="layer") for {whose}, whose kernels take one dense '
            f'tensor of pages a layer, got arrangement="{cache.pages.arrangement}"'
        )
    dtype = cache.spec.groups[0].dtype
    if cache.device.type == "cuda" and dtype not in HALF:
        raise SpecError(f"cache: expected pages of {' or '.join(HALF)} for {whose}, got {dtype}")
    return cache


def check_step(cache: PagedKVCache, meta: AttentionMetadata, where: str) -> AttentionMetadata:
    """Check that a step's tables are of this cache, and true.

    Raises
    ------
    UsageError, StateError
    """
    if not isinstance(meta, AttentionMetadata):
        raise UsageError(f"{where}: expected an AttentionMetadata, got {show(meta)}")
    if meta.step.pool is not cache.pool:
        raise UsageError(f"{where}: expected metadata of this cache, got those of another")
    if meta.step.state != "prepared":
        raise StateError(f"{where}: expected metadata of an open step, got one that is {meta.step.state}")
    return meta


def load(module: str, package: str) -> Any:
    """Import an optional package.

    Raises
    ------
    BackendUnavailableError
        With what to install.
    """
    try:
        return import_module(module)
    except ImportError as error:
        message = f"{module}: expected the package {package}, got none; pip install {package} (needs a GPU)"
        raise BackendUnavailableError(message) from error


def query_lens(meta: AttentionMetadata) -> torch.Tensor:
    """Return how many new tokens each sequence has, [num_seqs] int32."""
    return meta.query_start_loc[1:] - meta.query_start_loc[:-1]
