"""Attention as its definition says, in float64 and one query at a time; shares no code with the package."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def attend(query: Array, keys: Array, values: Array, scale: float | None = None) -> Array:
    """Causal attention of the last ``len(query)`` positions over all tokens of one sequence.

    Shapes: query [num_queries, num_heads, head_dim]; keys, values [num_tokens, num_kv_heads, head_dim].
    """
    return attend_with_lse(query, keys, values, scale=scale)[0]


def attend_with_lse(
    query: Array,
    keys: Array,
    values: Array,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    mask: npt.NDArray[Any] | None = None,
) -> tuple[Array, Array]:
    """The same with every option; also the logarithm of each sum, [num_queries, num_heads].

    `mask` is [num_queries, at least num_queries], of bool or of numbers.
    """
    num_queries, num_heads, head_dim = query.shape
    num_tokens, num_kv_heads, _ = keys.shape
    scale = head_dim**-0.5 if scale is None else scale
    out, lse = np.zeros(query.shape), np.full((num_queries, num_heads), -np.inf)
    first_new = num_tokens - num_queries
    for i in range(num_queries):
        position = first_new + i
        seen = list(range(num_tokens))
        if causal:
            seen = [p for p in seen if p <= position]
        if window is not None:
            seen = [p for p in seen if abs(p - position) <= window - 1]
        added = np.zeros(num_tokens)
        if mask is not None:
            new = np.asarray(mask[i, :num_queries])
            added[first_new:] = np.where(new, 0.0, -np.inf) if new.dtype == bool else new
            seen = [p for p in seen if added[p] > -np.inf]
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            logits = scale * (keys[seen, kv_head] @ query[i, head])
            if soft_cap is not None:
                logits = soft_cap * np.tanh(logits / soft_cap)
            if alibi_slopes is not None:
                logits = logits + alibi_slopes[head] * (np.array(seen, float) - position)
            logits = logits + added[seen]
            entering = logits if sinks is None else np.append(logits, sinks[head])
            if not len(entering) or entering.max() == -np.inf:
                continue
            largest = entering.max()
            lse[i, head] = largest + np.log(np.exp(entering - largest).sum())
            out[i, head] = np.exp(logits - lse[i, head]) @ values[seen, kv_head]
    return out, lse
