"""paged_attention: which kernels, over what grids, with what work space."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from triton import next_power_of_2

from pagedkv.errors import UsageError
from pagedkv.kernels.triton import attention_kernels as kernels
from pagedkv.kernels.triton.launching import INTERPRETING, Launch, count_multiprocessors, target_of
from pagedkv.kernels.triton.tuning import (
    BYTES_BY_ARITHMETIC,
    Heads,
    StatePlan,
    choose_tile,
    has_e4m3,
    plan_states,
)

LARGEST_HEAD_DIM = 256
LARGEST_WINDOW = 2**30  # beyond every position; sums with it stay below 2^31
LOG2_E = kernels.LOG2_E.value
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def paged_attention_launches(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    prefix_groups: torch.Tensor | None,
    prefix_rows: torch.Tensor | None,
    *,
    target: str | None = None,
    num_multiprocessors: int | None = None,
) -> list[Launch]:
    """Return what answers the queries; by default on the device that they are on."""
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, block_size, num_kv_heads, _ = key_pages.shape
    num_seqs = seq_lens.shape[0]
    if num_tokens == 0:
        return []
    if head_dim > LARGEST_HEAD_DIM:
        raise UsageError(
            f"query: expected head_dim up to {LARGEST_HEAD_DIM}, got {head_dim}, in paged_attention"
        )
    target = target or target_of(query.device)
    has_groups = prefix_groups is not None and prefix_groups.shape[0] > 0
    group = num_heads // num_kv_heads
    upcasts = INTERPRETING and query.dtype == torch.bfloat16  # which the interpreter can't compute with
    dtype = torch.float32 if upcasts else query.dtype
    is_e4m3 = key_pages.dtype == torch.float8_e4m3fn
    soft_e4m3 = is_e4m3 and not has_e4m3(target)
    is_8_bits = key_pages.dtype.itemsize == 1 and not has_e4m3(target)
    soft_row = is_8_bits and dtype.itemsize == 2 and not INTERPRETING
    tile = choose_tile(
        target, BYTES_BY_ARITHMETIC if soft_row else 4 if INTERPRETING else dtype.itemsize, head_dim
    )
    heads = Heads.of(group, tile.block_m)
    head_tiles = num_kv_heads * heads.num_tiles

    def dense(tensor: torch.Tensor | None) -> torch.Tensor:
        """Return a tensor whose last dimension is dense, and any one for what is off."""
        if tensor is None:
            return seq_lens
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

    plan = StatePlan()
    if num_seqs:
        plan = plan_states(
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            num_heads=num_heads,
            head_dim=head_dim,
            max_len=block_table.shape[1] * block_size,
            split_tokens=kernels.SPLIT_TOKENS,
            head_tiles=head_tiles,
            tile_tokens=heads.tokens,
            num_multiprocessors=num_multiprocessors or count_multiprocessors(query.device),
            num_groups=prefix_groups.shape[0] if has_groups and prefix_groups is not None else 0,
            num_prefix_rows=prefix_rows.shape[0] if prefix_rows is not None else 0,
        )
    states = (num_seqs, plan.num_splits, plan.max_tokens, num_heads)
    if soft_e4m3:
        key_pages, value_pages = key_pages.view(torch.uint8), value_pages.view(torch.uint8)
    shared: dict[str, Any] = {
        "query": query,
        **_strides("query", query, "token head"),
        "key_pages": key_pages,
        **_strides("key", key_pages, "block token head"),
        "value_pages": value_pages,
        **_strides("value", value_pages, "block token head"),
        "key_scales": key_scales if key_scales is not None else seq_lens,
        **_strides("key_scale", key_scales, "block token head"),
        "value_scales": value_scales if value_scales is not None else seq_lens,
        **_strides("value_scale", value_scales, "block token head"),
        "block_table": dense(block_table),
        "block_table_stride": dense(block_table).stride(0),
        "seq_lens": dense(seq_lens),
        "query_start_loc": dense(query_start_loc),
        "alibi_slopes": dense(alibi_slopes),
        "mask": dense(mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask),
        "mask_stride": 0 if mask is None else dense(mask).stride(0),
        # In units of log 2; a soft cap takes the logit before it over itself.
        "scale": scale / soft_cap if soft_cap else scale * LOG2_E,
        "soft_cap": soft_cap * LOG2_E,
        "window": min(window, LARGEST_WINDOW),
        "num_seqs": num_seqs,
        "num_blocks": num_blocks,
        "max_new": 0 if mask is None else mask.shape[1],
        "state_acc": query.new_empty((*states, head_dim), dtype=torch.float32),
        "state_top": query.new_empty(states, dtype=torch.float32),
        "state_total": query.new_empty(states, dtype=torch.float32),
        "grouped": query.new_empty(states[:2] if has_groups else (0,), dtype=torch.int8),
        "num_state_splits": plan.num_splits,
        "state_tokens": plan.max_tokens,
        "DTYPE": _DTYPES[dtype],
        "PRECISION": "tf32x3" if target.startswith("sm") and dtype == torch.float32 else "ieee",
        "HEAD_DIM": head_dim,
        "PADDED_DIM": max(16, next_power_of_2(head_dim)),
        "BLOCK_SIZE": block_size,
        "GROUP": group,
        "HEADS": heads.in_tile,
        "HEAD_TILES": heads.num_tiles,
        "NUM_HEADS": num_heads,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "CAUSAL": causal,
        "WINDOW": window > 0,
        "SOFT_CAP": soft_cap > 0,
        "ALIBI": alibi_slopes is not None,
        "MASK": "none" if mask is None else "bool" if mask.dtype == torch.bool else "float",
        "KEY_SCALES": key_scales is not None,
        "VALUE_SCALES": value_scales is not None,
        "SOFT_E4M3": soft_e4m3,
    }
    launches = []
    if plan.num_splits:
        groups = {
            "prefix_groups": dense(prefix_groups),
            "prefix_rows": dense(prefix_rows),
            "num_groups": prefix_groups.shape[0] if has_groups and prefix_groups is not None else 0,
            "group_tiles": plan.group_tiles,
            "group_pack": plan.group_pack,
        }
        if has_groups:
            marked = ("grouped", "query_start_loc", "num_state_splits", "state_tokens", "BLOCK_SIZE")
            arguments = {name: shared[name] for name in marked} | groups | {"TOKENS": heads.tokens}
            arguments["NUM_SPLITS"] = next_power_of_2(plan.num_splits)
            launches.append(Launch(kernels.mark_grouped_splits, (num_seqs,), arguments))
        arguments = shared | groups
        arguments["NUM_GROUPS"] = next_power_of_2(groups["num_groups"]) if has_groups else 0
        grid = (plan.group_tiles + (num_seqs if plan.of_all else 0), head_tiles, plan.num_parts)
        launches.append(Launch(kernels.compute_states, grid, arguments, tile.num_warps, tile.num_stages))
    answer = {
        "num_tokens": num_tokens,
        "out": out,
        **_strides("out", out, "token head"),
        "lse": lse if lse is not None else seq_lens,
        **_strides("lse", lse, "token head"),
        "sinks": dense(sinks),
        "STATES": "none" if not plan.num_splits else "all" if plan.of_all else "grouped",
        "SINKS": sinks is not None,
        "LSE": lse is not None,
        "INTERPRET": INTERPRETING,
    }
    tiles = (num_tokens // heads.tokens + num_seqs + 1, head_tiles)
    launches.append(Launch(kernels.attend, tiles, shared | answer, tile.num_warps, tile.num_stages))
    return launches


def _strides(name: str, tensor: torch.Tensor | None, dimensions: str) -> dict[str, int]:
    """Name a tensor's strides as the kernels do; 0 for what is off."""
    strides = [0, 0, 0] if tensor is None else tensor.stride()
    return {f"{name}_{dim}_stride": stride for dim, stride in zip(dimensions.split(), strides, strict=False)}
