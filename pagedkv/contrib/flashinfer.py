"""FlashInfer's kernels over this library's pages: append, plan, run.

::

    attention = FlashInferAttention(cache, num_heads=32)
    meta = cache.prepare(step)
    attention.plan(meta)                       # once a step
    attention.append(layer, key, value, meta)  # once a layer; or cache.write, which stores the same
    out = attention.run(layer, query)          # once a layer

The cache needs ``arrangement="layer"``. `flashinfer_tables` alone needs neither FlashInfer nor a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pagedkv.batch import AttentionMetadata
from pagedkv.cache import PagedKVCache
from pagedkv.contrib.tables import check_cache, check_step, load

WORKSPACE_BYTES = 128 * 1024**2
"""What FlashInfer recommends for its work between plan and run."""


class FlashInferTables(NamedTuple):
    """A step as FlashInfer takes it; all int32 on the cache's device.

    Attributes
    ----------
    qo_indptr : Tensor [num_seqs + 1]
        Sequence i has the queries ``[qo_indptr[i], qo_indptr[i + 1])``.
    kv_indptr : Tensor [num_seqs + 1]
    kv_indices : Tensor [num_pages]
        Sequence i has the pages ``kv_indices[kv_indptr[i]:kv_indptr[i + 1]]``.
    kv_last_page_len : Tensor [num_seqs]
        Tokens in each last page; 0 for a sequence without any.
    rows : Tensor [num_written] int64
        Which of the step's tokens have K and V to write; the others' are in a page that others share.
    batch_indices, positions : Tensor [num_written]
        Sequence and position of each of these.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    rows: torch.Tensor
    batch_indices: torch.Tensor
    positions: torch.Tensor


def flashinfer_tables(meta: AttentionMetadata) -> FlashInferTables:
    """Return a step's tables as FlashInfer takes them.

    Valid until the step ends. Waits for the device.
    """
    kv_indptr, kv_indices, kv_last_page_len = meta.csr()
    rows = torch.nonzero(meta.slot_mapping >= 0).flatten()
    sequence = torch.searchsorted(meta.query_start_loc[1:].contiguous(), rows.int(), right=True)
    return FlashInferTables(
        meta.query_start_loc,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        rows,
        sequence.int(),
        meta.positions[rows].int(),
    )


class FlashInferAttention:
    """One wrapper of FlashInfer for prefill, decode and what lies between, over a cache's pages.

    Parameters
    ----------
    cache : PagedKVCache
        On a GPU, with ``arrangement="layer"`` and pages of bfloat16 or float16.
    num_heads : int
        Of queries.
    workspace : Tensor [num_bytes] uint8, optional
        Shared by wrappers that never run at the same time; by default one of 128 MiB.

    Raises
    ------
    SpecError
        For pages that FlashInfer can't read.
    BackendUnavailableError
        When FlashInfer is not installed.
    """

    def __init__(self, cache: PagedKVCache, num_heads: int, *, workspace: torch.Tensor | None = None) -> None:
        self.cache = check_cache(cache, "FlashInfer")
        self.num_heads = num_heads
        self._flashinfer = load("flashinfer", "flashinfer-python")
        if workspace is None:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=cache.device)
        self._wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, cache.spec.layout)
        self._tables: tuple[AttentionMetadata, FlashInferTables] | None = None

    def plan(
        self,
        meta: AttentionMetadata,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        """Plan a step, for all layers that attend alike.

        Parameters
        ----------
        meta : AttentionMetadata
        causal, scale, window, soft_cap
            As for :func:`pagedkv.ops.paged_attention`.
        """
        tables = self._tables_of(check_step(self.cache, meta, "plan"))
        group = self.cache.spec.groups[0]
        dtype = getattr(torch, group.dtype)
        self._wrapper.plan(
            tables.qo_indptr,
            tables.kv_indptr,
            tables.kv_indices,
            tables.kv_last_page_len,
            self.num_heads,
            group.num_kv_heads,
            group.head_dim,
            self.cache.spec.block_size,
            causal=causal,
            sm_scale=scale,
            window_left=window_left(window),
            logits_soft_cap=soft_cap,
            q_data_type=dtype,
            kv_data_type=dtype,
        )

    def run(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attend from the planned step's queries to a layer's pages.

        Parameters
        ----------
        layer : int
        query : Tensor [num_tokens, num_heads, head_dim]

        Returns
        -------
        Tensor [num_tokens, num_heads, head_dim]
        """
        out: torch.Tensor = self._wrapper.run(query, paged_kv_cache(self.cache, layer))
        return out

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor, meta: AttentionMetadata) -> None:
        """Write the step's K and V of one layer into its pages; skips what is there already.

        Parameters
        ----------
        layer : int
        key, value : Tensor [num_tokens, num_kv_heads, head_dim]
        meta : AttentionMetadata
        """
        tables = self._tables_of(check_step(self.cache, meta, "append"))
        if len(tables.rows) < len(key):
            key, value = key[tables.rows], value[tables.rows]
        self._flashinfer.append_paged_kv_cache(
            key,
            value,
            tables.batch_indices,
            tables.positions,
            paged_kv_cache(self.cache, layer),
            tables.kv_indices,
            tables.kv_indptr,
            tables.kv_last_page_len,
            kv_layout=self.cache.spec.layout,
        )

    def _tables_of(self, meta: AttentionMetadata) -> FlashInferTables:
        if self._tables is None or self._tables[0] is not meta:
            self._tables = meta, flashinfer_tables(meta)
        return self._tables[1]


def paged_kv_cache(cache: PagedKVCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's K and V pages in the layout that FlashInfer is told.

    Returns
    -------
    tuple of two Tensor
        ``[num_blocks, block_size, num_kv_heads, head_dim]`` each for NHD, dense; for HND
        ``[num_blocks, num_kv_heads, block_size, head_dim]``.
    """
    pages: Any = check_cache(cache, "FlashInfer").pages[layer]
    key, value = pages
    return (key, value) if cache.spec.layout == "NHD" else (key.transpose(1, 2), value.transpose(1, 2))


def window_left(window: int | None) -> int:
    """Return how many tokens before its own a query sees; −1 for all."""
    return -1 if window is None else window - 1
