"""``attn_implementation="pagedkv"``: attention that reads pages where they lie."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pagedkv.contrib.hf.eagerly import uncompiled
from pagedkv.contrib.hf.forward import current_forward, heard_keys


@uncompiled
def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as a model asks for it, from pages where its cache is a PagedSession, else as sdpa does.

    Parameters
    ----------
    query : Tensor [batch, num_heads, length, head_dim]
    key, value : Tensor [batch, num_kv_heads, columns, head_dim]
        Where pages are read, the new columns only.
    attention_mask : Tensor [batch, 1, length, columns] bool, optional
        None where pages are read.
    scaling, sliding_window, softcap, s_aux, position_bias, is_causal, dropout
        What models pass; see :func:`pagedkv.ops.paged_attention` for the first four.

    Returns
    -------
    Tensor [batch, length, num_heads, head_dim], and None for the weights
    """
    heard = heard_keys.get()
    if heard is not None:
        heard.append(key)
    forward = current_forward.get()
    layer = None if forward is None else forward.layer_of(key)
    if forward is not None and layer is not None:
        window = sliding_window if sliding_window is not None else forward.store.layers[layer].window
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if position_bias is None and causal and not (dropout and module.training):
            attended = forward.attend(
                layer, query, scale=scaling, window=window, soft_cap=softcap or None, sinks=s_aux
            )
            return attended.contiguous(), None
        key, value = forward.gather(layer)
        attention_mask = forward.mask(query.shape[2], window, key.device)
    if attention_mask is not None and attention_mask.shape[-1] > key.shape[2]:
        attention_mask = attention_mask[..., : key.shape[2]]  # some models make room for more
    if softcap or s_aux is not None:
        return _softmax_attention(query, key, value, attention_mask, scaling, softcap, s_aux), None
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    options = {"position_bias": position_bias} if position_bias is not None else {}
    attended, weights = attend(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **options,
    )
    return attended, weights


def _softmax_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with what sdpa lacks, in plain torch: a soft cap and sinks."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    logits = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if mask is None:
        length, columns = logits.shape[2:]
        mask = logits.new_ones(length, columns, dtype=torch.bool).tril(columns - length)
    logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    if sinks is not None:
        sink = sinks.reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1).to(logits.dtype)
        logits = torch.cat([logits, sink], dim=3)
    weights = torch.softmax(logits, dim=3, dtype=torch.float32).to(value.dtype)
    return (weights[..., : value.shape[2]] @ value).transpose(1, 2).contiguous()
