"""The meaning of every operation, in plain torch, on any device that torch has."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write each token's K and V to its slot; a slot of −1 is skipped."""
    block_size = key_pages.shape[1]
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        slot_mapping, key, value = slot_mapping[kept], key[kept], value[kept]
    index = (slot_mapping // block_size, slot_mapping % block_size)
    key_pages.index_put_(index, key)
    value_pages.index_put_(index, value)


def copy_blocks(blocks: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy whole blocks, all layers at once; every source is read before any destination is written."""
    blocks[destinations] = blocks[sources]


def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attend sequence by sequence over the keys that its pages hold, gathered for the length of this call."""
    block_size = key_pages.shape[1]
    starts = query_start_loc.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[row], starts[row + 1])
        num_queries = rows.stop - rows.start
        if num_queries == 0:
            continue
        if seq_len == 0:
            out[rows] = 0
            continue
        pages = block_table[row, : -(-seq_len // block_size)].long()
        # [num_pages, block_size, heads, head_dim] -> [heads, seq_len, head_dim]; what lies behind seq_len in
        # the last page was never written and must not be read.
        k, v = (p[pages].flatten(0, 1)[:seq_len].transpose(0, 1) for p in (key_pages, value_pages))
        q = query[rows].transpose(0, 1)
        out[rows] = _attend(q, k, v, scale).transpose(0, 1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last ``q.shape[1]`` positions over all ``k.shape[1]``; heads come first."""
    num_queries, seq_len = q.shape[1], k.shape[1]
    mask = None
    if 1 < num_queries < seq_len:
        # Query i stands at position seq_len - num_queries + i and sees every position up to its own.
        mask = torch.ones(num_queries, seq_len, dtype=torch.bool, device=q.device).tril(seq_len - num_queries)
    attended = F.scaled_dot_product_attention(
        q[None], k[None], v[None], mask, is_causal=num_queries == seq_len, scale=scale, enable_gqa=True
    )
    return attended[0]
