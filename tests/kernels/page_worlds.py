"""Batches of sequences on scattered pages, every slot that none of them wrote filled with garbage."""

from __future__ import annotations

from typing import Any, NamedTuple

import attention_oracle
import numpy as np
import torch
from hypothesis import strategies as st

import pagedkv

GARBAGE = (float("nan"), float("inf"), float("-inf"), 6e4)
LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 70, 130)
# (KV heads, query heads): one to one, 3:1, 7:1, one KV head for all, and a ratio that is no divisor of a tile
HEADS = ((2, 2), (2, 6), (1, 7), (1, 4), (3, 27))
LAYER = 1  # of two; the other one stays garbage


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

    @property
    def scales(self) -> dict[str, Any]:
        key_scales, value_scales = self.pages.scales(LAYER)
        return {"key_scales": key_scales, "value_scales": value_scales}

    def __repr__(self) -> str:  # short: a failing example is made again from its seed
        rows = self.query_start_loc.tolist()
        return (
            f"<World: lengths {self.seq_lens.tolist()}, rows {rows}, {self.query.shape}, {self.query.dtype}>"
        )

    def expected(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """What the oracle says of out and lse; `options` are those of paged_attention."""
        query = self.query.double().numpy()
        starts = self.query_start_loc.tolist()
        mask = options.pop("mask", None)
        options = {
            name: value.double().numpy() if isinstance(value, torch.Tensor) else value
            for name, value in options.items()
        }
        out, lse = np.zeros(query.shape), np.full(query.shape[:2], -np.inf)
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            rows = slice(starts[i], starts[i + 1])
            if len(keys) and rows.start < rows.stop:
                masked = None if mask is None else mask[rows].numpy()
                attended = attention_oracle.attend_with_lse(query[rows], keys, values, mask=masked, **options)
                out[rows], lse[rows] = attended
        return out, lse


def make_world(
    shapes: list[tuple[int, int, int]],
    *,
    num_kv_heads: int = 2,
    num_heads: int = 2,
    head_dim: int = 16,
    dtype: str = "float32",
    page_dtype: str | None = None,
    scales: str | None = None,
    block_size: int = 16,
    layout: pagedkv.KVLayout = "NHD",
    arrangement: Any = "block",
    garbage: float = float("nan"),
    seed: int = 0,
) -> World:
    """One sequence for each (tokens, queries, blocks shared with the sequence before).

    `scales` of pages of 8 bits: None, "tensor", "head" or "token_head".
    """
    rng = np.random.default_rng(seed)
    page_dtype = page_dtype or dtype
    kept: Any = scales if scales == "token_head" else None
    spec = pagedkv.KVCacheSpec.uniform(2, num_kv_heads, head_dim, page_dtype, block_size, layout, kept)
    num_blocks = [-(-length // block_size) for length, _, _ in shapes]
    ids = rng.permutation(sum(num_blocks) + 3).tolist()  # three pages are nobody's
    pages = pagedkv.KVPages(spec, len(ids), arrangement=arrangement)
    _fill_with_garbage(pages, garbage)
    if scales in ("tensor", "head"):
        size = () if scales == "tensor" else (num_kv_heads,)
        key_scale, value_scale = (torch.from_numpy(rng.uniform(0.5, 2, size)).float() for _ in range(2))
        pages.set_scales(LAYER, key_scale, value_scale)

    def draw(length: int) -> torch.Tensor:
        """As it is stored."""
        drawn = torch.from_numpy(rng.normal(size=(length, num_kv_heads, head_dim)))
        return (drawn * 40).round().to(torch.int8) if page_dtype == "int8" else drawn.to(pages.blocks.dtype)

    table = np.full((len(shapes), max(num_blocks, default=0) + 1), -1, np.int32)
    stored: list[tuple[torch.Tensor, ...]] = []  # K, V and, for each token and head, the scales of K and V
    for i, (length, _, num_shared) in enumerate(shapes):
        drawn = [draw(length), draw(length)]
        drawn += [torch.from_numpy(rng.uniform(0.01, 2, (length, num_kv_heads))).float() for _ in range(2)]
        if num_shared:
            table[i, :num_shared] = table[i - 1, :num_shared]
            for mine, theirs in zip(drawn, stored[-1], strict=True):
                mine[: num_shared * block_size] = theirs[: num_shared * block_size]
        for block in range(num_shared, num_blocks[i]):
            table[i, block] = ids.pop()
        positions = np.arange(length)
        page_ids = torch.from_numpy(table[i, positions // block_size]).long()
        places = page_ids, torch.from_numpy(positions % block_size)
        for j in range(2):
            bits(pages[LAYER][j])[places] = bits(drawn[j])
            if kept:
                given = pages.scales(LAYER)[j]
                assert given is not None
                given[places] = drawn[2 + j]
        stored.append(tuple(drawn))

    def meant(i: int, j: int) -> np.ndarray:
        scale = stored[i][2 + j] if kept else pages.scales(LAYER)[j]
        numbers = stored[i][j].double().numpy()
        if scale is None:
            return numbers
        factor = scale.double().numpy()
        return numbers * (factor[..., None] if factor.ndim else factor)

    unit = 1 / 40 if page_dtype == "int8" and scales is None else 1.0  # so that logits stay moderate
    starts = np.cumsum([0] + [num_queries for _, num_queries, _ in shapes], dtype=np.int32)
    query = torch.from_numpy(rng.normal(size=(int(starts[-1]), num_heads, head_dim)) * unit)
    if page_dtype == "int8" and scales is not None:
        query = query / 40
    return World(
        query=query.to(getattr(torch, dtype)),
        pages=pages,
        block_table=torch.from_numpy(table),
        seq_lens=torch.tensor([length for length, _, _ in shapes], dtype=torch.int32),
        query_start_loc=torch.from_numpy(starts),
        keys=[meant(i, 0) for i in range(len(shapes))],
        values=[meant(i, 1) for i in range(len(shapes))],
    )


def _fill_with_garbage(pages: pagedkv.KVPages, garbage: float) -> None:
    if pages.blocks.element_size() == 1:
        bits(pages.blocks).fill_(0x7F)  # NaN in float8_e4m3fn, 127 in int8
    else:
        pages.blocks.fill_(garbage)
    for scales in pages.scales(LAYER):
        if scales is not None:
            scales.fill_(garbage)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers of 8 bits as integers, which torch can index."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


@st.composite
def worlds(draw: st.DrawFn) -> World:
    block_size = draw(st.sampled_from([16, 16, 8, 128]))
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
