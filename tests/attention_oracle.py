"""Attention as its definition says, in float64 and one query at a time; shares no code with the package."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def attend(query: Array, keys: Array, values: Array, scale: float | None = None) -> Array:
    """Causal attention of the last ``len(query)`` positions over all tokens of one sequence.

    Shapes: query [num_queries, num_heads, head_dim]; keys, values [num_tokens, num_kv_heads, head_dim].
    """
    num_queries, num_heads, head_dim = query.shape
    group = num_heads // keys.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    out = np.zeros(query.shape)
    for i in range(num_queries):
        num_seen = len(keys) - num_queries + i + 1
        for head in range(num_heads):
            logits = scale * (keys[:num_seen, head // group] @ query[i, head])
            weights = np.exp(logits - logits.max())
            out[i, head] = weights @ values[:num_seen, head // group] / weights.sum()
    return out
