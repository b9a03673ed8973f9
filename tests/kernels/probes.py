"""Probes whose output is the attention weights: V of token j is the j-th unit vector, K its logit."""

from __future__ import annotations

from typing import Any

import torch

from pagedkv.ops import paged_attention

HEAD_DIM = 64
"""So many tokens can be told apart; the default scale is 1/8."""


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def identity_pages(
    logits: list[float],
    table: list[int],
    *,
    block_size: int = 16,
    num_blocks: int = 4,
    garbage: float = float("nan"),
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """K and V pages of one head, [2, num_blocks, block_size, 1, HEAD_DIM]."""
    pages = torch.full((2, num_blocks, block_size, 1, HEAD_DIM), garbage, dtype=dtype)
    for j, logit in enumerate(logits):
        pages[:, table[j // block_size], j % block_size] = 0
        pages[0, table[j // block_size], j % block_size, 0, 0] = logit
        pages[1, table[j // block_size], j % block_size, 0, j] = 1
    return pages


def identity_query(num_queries: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    query = torch.zeros(num_queries, 1, HEAD_DIM, dtype=dtype)
    query[..., 0] = 8
    return query


def probe(
    logits: list[float],
    table: list[int] | None = None,
    *,
    num_queries: int = 1,
    block_size: int = 16,
    num_blocks: int = 4,
    backend: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of each query on each token, [num_queries, HEAD_DIM], and its lse, [num_queries]."""
    table = list(range(-(-len(logits) // block_size))) if table is None else table
    pages = identity_pages(logits, table, block_size=block_size, num_blocks=num_blocks)
    lse = torch.full((num_queries, 1), float("nan"))
    out = paged_attention(
        identity_query(num_queries),
        *pages,
        int32(table),
        int32(len(logits)),
        int32(0, num_queries),
        lse=lse,
        backend=backend,
        **options,
    )
    return out[:, 0], lse[:, 0]
