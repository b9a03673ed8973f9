"""write_kv: one program a token writes its K and V, and the scales that they are given."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton import next_power_of_2

from pagedkv.kernels.triton.launching import Launch, target_of
from pagedkv.kernels.triton.numbers import E4M3_MAX, INT8_MAX, float32_to_e4m3, round_half_even

MAX_ELEMENTS = 8192
"""Of a tile of heads; more would not fit into registers."""


@triton.jit
def _store_heads(
    tokens, token_stride, token_head_stride,
    pages, page_stride, offset_stride, head_stride,
    scales, scale_page_stride, scale_offset_stride, scale_head_stride,
    token, page, offset, head, is_head,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, QUANTISED: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Store heads of one token. QUANTISED: "no", "e4m3" or "int8"; SCALES: "none", "given" or "computed"."""
    dim = tl.arange(0, PADDED_DIM)
    is_element = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    read_from = tokens + token * token_stride + head * token_head_stride
    x = tl.load(read_from[:, None] + dim[None, :], mask=is_element, other=0)
    if QUANTISED != "no":
        x = x.to(tl.float32)
        largest: tl.constexpr = E4M3_MAX if QUANTISED == "e4m3" else INT8_MAX
        if SCALES != "none":
            slot = scales + page * scale_page_stride + offset * scale_offset_stride + head * scale_head_stride
            if SCALES == "given":
                scale = tl.load(slot, mask=is_head, other=1.0)
            else:
                scale = tl.div_rn(tl.max(tl.abs(x), 1), largest + tl.zeros_like(head).to(tl.float32))
                tl.store(slot, scale, mask=is_head)
            divisor = tl.where(scale == 0.0, 1.0, scale)[:, None]
            x = tl.where((scale == 0.0)[:, None], 0.0, tl.div_rn(x, divisor + tl.zeros_like(x)))
        if QUANTISED == "e4m3":
            x = float32_to_e4m3(x)
        else:
            x = round_half_even(tl.minimum(tl.maximum(x, -largest), largest)).to(tl.int8)
    write_to = pages + page * page_stride + offset * offset_stride + head * head_stride
    tl.store(write_to[:, None] + dim[None, :], x, mask=is_element)


@triton.jit(do_not_specialize=["num_slots"])
def write_tokens(
    slot_mapping, num_slots,
    key, key_token_stride, key_head_stride,
    value, value_token_stride, value_head_stride,
    key_pages, key_block_stride, key_offset_stride, key_page_head_stride,
    value_pages, value_block_stride, value_offset_stride, value_page_head_stride,
    key_scales, key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride,
    value_scales, value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUANTISED: tl.constexpr, KEY_SCALES: tl.constexpr, VALUE_SCALES: tl.constexpr,
):  # fmt: skip
    """Write one token, some of its heads. Grid: (tokens, tiles of heads). A slot that is none is skipped."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    slot = tl.load(slot_mapping + token)
    is_head = head < tl.where((slot >= 0) & (slot < num_slots), NUM_HEADS, 0)
    page = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    _store_heads(
        key, key_token_stride, key_head_stride,
        key_pages, key_block_stride, key_offset_stride, key_page_head_stride,
        key_scales, key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride,
        token, page, offset, head, is_head, HEAD_DIM, PADDED_DIM, QUANTISED, KEY_SCALES,
    )  # fmt: skip
    _store_heads(
        value, value_token_stride, value_head_stride,
        value_pages, value_block_stride, value_offset_stride, value_page_head_stride,
        value_scales, value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride,
        token, page, offset, head, is_head, HEAD_DIM, PADDED_DIM, QUANTISED, VALUE_SCALES,
    )  # fmt: skip


def write_kv_launches(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    *,
    target: str | None = None,
) -> list[Launch]:
    """Return what writes the tokens."""
    target = target or target_of(key_pages.device)
    num_blocks, block_size, num_heads, head_dim = key_pages.shape
    if len(slot_mapping) == 0:
        return []
    quantised = "no"
    if key.dtype != key_pages.dtype:
        quantised = "int8" if key_pages.dtype == torch.int8 else "e4m3"
    if key_pages.dtype == torch.float8_e4m3fn:
        key_pages, value_pages = key_pages.view(torch.uint8), value_pages.view(torch.uint8)
        if quantised == "no":
            key, value = key.view(torch.uint8), value.view(torch.uint8)
    padded_dim = next_power_of_2(head_dim)
    heads = min(next_power_of_2(num_heads), max(1, MAX_ELEMENTS // padded_dim))
    arguments: dict[str, Any] = {
        "slot_mapping": slot_mapping.contiguous(),
        "num_slots": num_blocks * block_size,
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "HEADS": heads,
        "BLOCK_SIZE": block_size,
        "QUANTISED": quantised,
    }
    for name, tokens, pages, scales in (
        ("key", key, key_pages, key_scales),
        ("value", value, value_pages, value_scales),
    ):
        arguments[name] = tokens
        arguments[f"{name}_token_stride"], arguments[f"{name}_head_stride"], _ = tokens.stride()
        arguments[f"{name}_pages"] = pages
        (
            arguments[f"{name}_block_stride"],
            arguments[f"{name}_offset_stride"],
            arguments[f"{name}_page_head_stride"],
            _,
        ) = pages.stride()
        arguments[f"{name}_scales"] = slot_mapping if scales is None else scales
        (
            arguments[f"{name}_scale_block_stride"],
            arguments[f"{name}_scale_offset_stride"],
            arguments[f"{name}_scale_head_stride"],
        ) = (0, 0, 0) if scales is None else scales.stride()
        kind = "none" if scales is None else "given" if scales.stride(1) == 0 else "computed"
        arguments[f"{name.upper()}_SCALES"] = kind
    grid = (len(slot_mapping), -(-num_heads // heads))
    return [Launch(write_tokens, grid, arguments)]
