"""flash-attn's kernels over this library's pages.

::

    cache.write(layer, key, value, meta)
    out = flash_attn(cache, layer, query, meta)     # prefill, decode and what lies between

`varlen_arguments` and `kvcache_arguments` are the exact arguments of ``flash_attn_varlen_func`` and
``flash_attn_with_kvcache``, for who calls these himself; they need neither flash-attn nor a GPU. The cache
needs ``arrangement="layer"``, and flash-attn 2 blocks of a multiple of 256 tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from pagedkv.batch import AttentionMetadata
from pagedkv.cache import PagedKVCache
from pagedkv.contrib.tables import check_cache, check_step, load, query_lens
from pagedkv.errors import SpecError, UsageError

BLOCK_MULTIPLE = 256
"""Of flash-attn 2; flash-attn 3 takes any block size."""


def flash_attn(
    cache: PagedKVCache,
    layer: int,
    query: torch.Tensor,
    meta: AttentionMetadata,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to a layer's pages with flash-attn: by ``flash_attn_with_kvcache`` where all rows decode alike.

    Parameters
    ----------
    cache : PagedKVCache
    layer : int
    query : Tensor [num_tokens, num_heads, head_dim]
    meta : AttentionMetadata
    causal, scale, window, soft_cap, alibi_slopes
        As for :func:`pagedkv.ops.paged_attention`.

    Returns
    -------
    Tensor [num_tokens, num_heads, head_dim]

    Raises
    ------
    SpecError
        For pages that flash-attn can't read.
    BackendUnavailableError
        When flash-attn is not installed.
    """
    options = {
        "causal": causal,
        "scale": scale,
        "window": window,
        "soft_cap": soft_cap,
        "alibi_slopes": alibi_slopes,
    }
    module = load("flash_attn", "flash-attn")
    if meta.num_tokens == meta.num_seqs:
        out: torch.Tensor = module.flash_attn_with_kvcache(
            **kvcache_arguments(cache, layer, query, meta, **options)
        )
        return out.flatten(0, 1)
    out = module.flash_attn_varlen_func(**varlen_arguments(cache, layer, query, meta, **options))
    return out


def kvcache_arguments(
    cache: PagedKVCache, layer: int, query: torch.Tensor, meta: AttentionMetadata, **options: Any
) -> dict[str, Any]:
    """Return the arguments of ``flash_attn_with_kvcache``, for a step with equally many tokens of each row.

    K and V are in the pages already: `cache.write` comes first, which alone knows what not to write.

    Parameters
    ----------
    cache, layer, query, meta, options
        As for `flash_attn`.

    Returns
    -------
    dict
        With ``q`` [num_seqs, num_tokens // num_seqs, num_heads, head_dim].

    Raises
    ------
    UsageError
        For rows of several lengths: take `varlen_arguments`.
    SpecError
    """
    lens = query_lens(_checked(cache, meta))
    if meta.num_tokens != meta.num_seqs * meta.max_query_len or not bool((lens == lens[:1]).all()):
        raise UsageError(f"meta: expected as many new tokens of each row, got {lens.tolist()}")
    key_pages, value_pages = cache.pages[layer]
    return {
        "q": query.view(meta.num_seqs, meta.max_query_len, *query.shape[1:]),
        "k_cache": key_pages,
        "v_cache": value_pages,
        "cache_seqlens": meta.seq_lens,
        "block_table": meta.block_table,
        **_options(**options),
    }


def varlen_arguments(
    cache: PagedKVCache, layer: int, query: torch.Tensor, meta: AttentionMetadata, **options: Any
) -> dict[str, Any]:
    """Return the arguments of ``flash_attn_varlen_func`` with a block table, for any step.

    Parameters
    ----------
    cache, layer, query, meta, options
        As for `flash_attn`.

    Raises
    ------
    SpecError
    """
    meta = _checked(cache, meta)
    key_pages, value_pages = cache.pages[layer]
    starts = torch.zeros_like(meta.query_start_loc)
    torch.cumsum(meta.seq_lens, 0, dtype=torch.int32, out=starts[1:])
    return {
        "q": query,
        "k": key_pages,
        "v": value_pages,
        "cu_seqlens_q": meta.query_start_loc,
        "cu_seqlens_k": starts,
        "max_seqlen_q": meta.max_query_len,
        "max_seqlen_k": meta.max_seq_len,
        "block_table": meta.block_table,
        **_options(**options),
    }


def _checked(cache: PagedKVCache, meta: AttentionMetadata) -> AttentionMetadata:
    size = check_cache(cache, "flash-attn").spec.block_size
    if cache.spec.layout != "NHD" or size % BLOCK_MULTIPLE:
        raise SpecError(
            f"cache: expected layout NHD and a block_size of a multiple of {BLOCK_MULTIPLE} for flash-attn, "
            f"got {cache.spec.layout} and {size}"
        )
    return check_step(cache, meta, "flash_attn")


def _options(
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Return options by flash-attn's names, where a window counts the tokens beside a query's own."""
    return {
        "causal": causal,
        "softmax_scale": scale,
        "window_size": (-1, -1) if window is None else (window - 1, 0 if causal else window - 1),
        "softcap": soft_cap or 0.0,
        "alibi_slopes": alibi_slopes,
    }
