"""The meaning of every operation, in plain torch, on any device that torch has.

It also checks the values in slots and tables, and not only their shapes: a wrong table is refused here before
anything is written, where a fast kernel would read or write somewhere else.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagedkv.errors import UsageError


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write each token's K and V to its slot; a slot of −1 is skipped."""
    block_size = key_pages.shape[1]
    num_slots = key_pages.shape[0] * block_size
    wrong = slot_mapping[(slot_mapping < -1) | (slot_mapping >= num_slots)]
    if wrong.numel():
        what = f"slots from -1 to {num_slots - 1}"
        raise UsageError(f"slot_mapping: expected {what}, got {int(wrong[0])}, in write_kv")
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        slot_mapping, key, value = slot_mapping[kept], key[kept], value[kept]
    index = (slot_mapping // block_size, slot_mapping % block_size)
    key_pages.index_put_(index, key)
    value_pages.index_put_(index, value)


def copy_blocks(blocks: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy whole blocks, all layers at once; every source is read before any destination is written."""
    _check_ids("sources", sources, len(blocks), "copy_blocks")
    _check_ids("destinations", destinations, len(blocks), "copy_blocks")
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
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    _check_tables(block_table, lens, starts, num_tokens=len(query), pages_shape=key_pages.shape)
    for row, seq_len in enumerate(lens):
        rows = slice(starts[row], starts[row + 1])
        if rows.start == rows.stop:
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


def _check_tables(
    block_table: torch.Tensor,
    seq_lens: list[int],
    starts: list[int],
    *,
    num_tokens: int,
    pages_shape: torch.Size,
) -> None:
    """Check every row before any is computed."""
    num_blocks, block_size = pages_shape[:2]
    if starts[0] != 0 or starts[-1] != num_tokens or sorted(starts) != starts:
        what = f"offsets that ascend from 0 to {num_tokens}"
        raise UsageError(f"query_start_loc: expected {what}, got {starts}, in paged_attention")
    max_len = block_table.shape[1] * block_size
    for row, seq_len in enumerate(seq_lens):
        num_queries = starts[row + 1] - starts[row]
        if num_queries == 0 or seq_len == 0:
            continue
        if not num_queries <= seq_len <= max_len:
            what = f"from its {num_queries} queries to the table's {max_len} tokens"
            raise UsageError(f"seq_lens[{row}]: expected {what}, got {seq_len}, in paged_attention")
        pages = block_table[row, : -(-seq_len // block_size)]
        _check_ids(f"block_table[{row}]", pages, num_blocks, "paged_attention")


def _check_ids(name: str, ids: torch.Tensor, num_blocks: int, where: str) -> None:
    wrong = ids[(ids < 0) | (ids >= num_blocks)]
    if wrong.numel():
        what = f"block ids from 0 to {num_blocks - 1}"
        raise UsageError(f"{name}: expected {what}, got {int(wrong[0])}, in {where}")


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last ``q.shape[1]`` positions over all ``k.shape[1]``; heads come first."""
    num_queries, seq_len = q.shape[1], k.shape[1]
    # torch's own causal mask is put on before the scale, which must therefore be positive.
    is_causal = num_queries == seq_len and scale > 0
    mask = None
    if num_queries > 1 and not is_causal:
        # Query i stands at position seq_len - num_queries + i and sees every position up to its own.
        mask = torch.ones(num_queries, seq_len, dtype=torch.bool, device=q.device).tril(seq_len - num_queries)
    attended = F.scaled_dot_product_attention(
        q[None], k[None], v[None], mask, is_causal=is_causal, scale=scale, enable_gqa=True
    )
    return attended[0]
