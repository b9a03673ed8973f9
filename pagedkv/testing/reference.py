"""Attention over pages in float64, for tests of kernels: the backend "reference" in other precision."""

from __future__ import annotations

import torch

from pagedkv.kernels import reference
from pagedkv.ops.checks import expand_scales


def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float64,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what :func:`pagedkv.ops.paged_attention` means, rounded to `dtype` only.

    Parameters
    ----------
    query, key_pages, value_pages, block_table, seq_lens, query_start_loc, scale, causal, window, soft_cap
    alibi_slopes, sinks, mask, key_scales, value_scales
        As there; not checked.
    dtype : torch.dtype
        Of all arithmetic and of the result.

    Returns
    -------
    out : Tensor [num_tokens, num_heads, head_dim]
    lse : Tensor [num_tokens, num_heads]
    """
    out = torch.empty(query.shape, dtype=dtype, device=query.device)
    lse = torch.empty(query.shape[:2], dtype=dtype, device=query.device)
    reference.paged_attention(
        query,
        key_pages,
        value_pages,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        lse,
        query.shape[2] ** -0.5 if scale is None else scale,
        causal,
        window or 0,
        soft_cap or 0.0,
        alibi_slopes,
        sinks,
        mask,
        expand_scales(key_scales, key_pages),
        expand_scales(value_scales, value_pages),
        dtype=dtype,
    )
    return out, lse


def merge_attention_states(
    outs: torch.Tensor, lses: torch.Tensor, *, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what :func:`pagedkv.ops.merge_attention_states` means, rounded to `dtype` only.

    Returns
    -------
    out : Tensor [num_tokens, num_heads, head_dim]
    lse : Tensor [num_tokens, num_heads]
    """
    out = torch.empty(outs.shape[1:], dtype=dtype, device=outs.device)
    lse = torch.empty(outs.shape[1:3], dtype=dtype, device=outs.device)
    reference.merge_attention_states(outs, lses, out, lse, dtype=dtype)
    return out, lse
