"""Batches of sequences on scattered pages, every slot that none of them wrote filled with garbage."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

import pagedkv

GARBAGE = (float("nan"), float("inf"), float("-inf"), 6e4)
LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 70, 130)
# (KV heads, query heads): one to one, 3:1, 7:1, one KV head for all, and a ratio that is no divisor of a tile
HEADS = ((2, 2), (2, 6), (1, 7), (1, 4), (3, 27))


class World(NamedTuple):
    """Arguments of paged_attention, and the same KV as plain lists of tokens in float64."""

    query: torch.Tensor
    pages: pagedkv.KVPages
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    keys: list[np.ndarray]  # of each sequence, [seq_len, num_kv_heads, head_dim]
    values: list[np.ndarray]

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.query, *self.pages[LAYER], self.block_table, self.seq_lens, self.query_start_loc

    def __repr__(self) -> str:  # short: a failing example is made again from its seed
        rows = self.query_start_loc.tolist()
        return (
            f"<World: lengths {self.seq_lens.tolist()}, rows {rows}, {self.query.shape}, {self.query.dtype}>"
        )


LAYER = 1  # of two; the other one stays garbage


def make_world(
    shapes: list[tuple[int, int, int]],
    *,
    num_kv_heads: int = 2,
    num_heads: int = 2,
    head_dim: int = 16,
    dtype: str = "float32",
    block_size: int = 16,
    layout: pagedkv.KVLayout = "NHD",
    arrangement: Any = "block",
    garbage: float = float("nan"),
    seed: int = 0,
) -> World:
    """One sequence for each (tokens, queries, blocks shared with the sequence before)."""
    rng = np.random.default_rng(seed)
    spec = pagedkv.KVCacheSpec.uniform(2, num_kv_heads, head_dim, dtype, block_size, layout)
    torch_dtype = getattr(torch, dtype)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=sizes)).to(torch_dtype)

    num_blocks = [-(-length // block_size) for length, _, _ in shapes]
    ids = rng.permutation(sum(num_blocks) + 3).tolist()  # three pages are nobody's
    pages = pagedkv.KVPages(spec, len(ids), arrangement=arrangement)
    pages.blocks.fill_(garbage)
    table = np.full((len(shapes), max(num_blocks, default=0) + 1), -1, np.int32)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for i, (length, _, num_shared) in enumerate(shapes):
        num_shared_tokens = num_shared * block_size
        key, value = (draw(length, num_kv_heads, head_dim) for _ in range(2))
        if num_shared:
            table[i, :num_shared] = table[i - 1, :num_shared]
            key[:num_shared_tokens] = keys[-1][:num_shared_tokens]
            value[:num_shared_tokens] = values[-1][:num_shared_tokens]
        for block in range(num_shared, num_blocks[i]):
            table[i, block] = ids.pop()
        for position in range(length):
            page = int(table[i, position // block_size])
            pages.blocks[page, LAYER, 0, position % block_size] = key[position]
            pages.blocks[page, LAYER, 1, position % block_size] = value[position]
        keys.append(key)
        values.append(value)
    starts = np.cumsum([0] + [num_queries for _, num_queries, _ in shapes], dtype=np.int32)
    return World(
        query=draw(int(starts[-1]), num_heads, head_dim),
        pages=pages,
        block_table=torch.from_numpy(table),
        seq_lens=torch.tensor([length for length, _, _ in shapes], dtype=torch.int32),
        query_start_loc=torch.from_numpy(starts),
        keys=[key.double().numpy() for key in keys],
        values=[value.double().numpy() for value in values],
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    block_size = draw(st.sampled_from([16, 16, 1, 5]))
    shapes: list[tuple[int, int, int]] = []
    for i in range(draw(st.integers(1, 4))):
        length = draw(st.sampled_from(LENGTHS) | st.integers(0, 60))
        if length == 0:
            num_queries = draw(st.integers(0, 2))  # padding rows
        else:
            # decode, prefill, nothing, or a chunk behind what is cached
            num_queries = draw(st.sampled_from([1, min(length, 48), 0]) | st.integers(0, min(length, 20)))
        before = shapes[i - 1][0] if i else 0
        num_shared = draw(st.integers(0, min(length, before) // block_size))
        shapes.append((length, num_queries, num_shared))
    num_kv_heads, num_heads = draw(st.sampled_from(HEADS))
    return make_world(
        shapes,
        num_kv_heads=num_kv_heads,
        num_heads=num_heads,
        head_dim=draw(st.sampled_from([16, 64, 80])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        block_size=block_size,
        layout=draw(st.sampled_from(["NHD", "HND"])),
        arrangement=draw(st.sampled_from(["block", "layer"])),
        garbage=draw(st.sampled_from(GARBAGE)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
