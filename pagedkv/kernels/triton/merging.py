"""merge_attention_states: one program folds the states of some rows, from the first to the last."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton import next_power_of_2

from pagedkv.kernels.triton.launching import INTERPRETING, Launch, target_of
from pagedkv.kernels.triton.numbers import narrow

ROWS = 16
"""Rows, each a token's head, of one program."""


@triton.jit(do_not_specialize=["num_states", "num_rows"])
def merge_states(
    outs, outs_state_stride, outs_token_stride, outs_head_stride,
    lses, lses_state_stride, lses_token_stride, lses_head_stride,
    out, out_token_stride, out_head_stride,
    lse, lse_token_stride, lse_head_stride,
    num_states, num_rows,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr,
    LSE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Fold the states of some rows; one that saw nothing is left out, whatever it holds. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // NUM_HEADS, row % NUM_HEADS
    is_row = row < num_rows
    dim = tl.arange(0, PADDED_DIM)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for i in range(num_states):
        state = tl.zeros_like(row) + i
        at = state * lses_state_stride + token * lses_token_stride + head * lses_head_stride
        new = tl.load(lses + at, mask=is_row, other=float("-inf"))
        has_seen = is_row & (new != float("-inf"))
        at = state * outs_state_stride + token * outs_token_stride + head * outs_head_stride
        is_element = has_seen[:, None] & (dim < HEAD_DIM)[None, :]
        x = tl.load(outs + at[:, None] + dim[None, :], mask=is_element, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, new)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        old, weight = tl.exp(top - base), tl.exp(new - base)
        acc = acc * old[:, None] + x * weight[:, None]
        total = total * old + weight
        top = new_top
    is_empty = total == 0.0
    divisor = tl.where(is_empty, 1.0, total)
    result = narrow(acc / divisor[:, None] + 0.0, out.dtype.element_ty, INTERPRET)  # a zero has no sign
    at = token * out_token_stride + head * out_head_stride
    tl.store(out + at[:, None] + dim[None, :], result, mask=is_row[:, None] & (dim < HEAD_DIM)[None, :])
    if LSE:
        value = tl.where(is_empty, float("-inf"), top + tl.log(divisor))
        tl.store(lse + token * lse_token_stride + head * lse_head_stride, value, mask=is_row)


def merge_launches(
    outs: torch.Tensor,
    lses: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    target: str | None = None,
) -> list[Launch]:
    """Return what merges the states."""
    target = target or target_of(outs.device)
    num_states, num_tokens, num_heads, head_dim = outs.shape
    if num_tokens * num_heads == 0:
        return []
    arguments: dict[str, Any] = {"outs": outs, "lses": lses, "out": out, "lse": lses if lse is None else lse}
    for name, tensor, dims in (
        ("outs", outs, ("state", "token", "head")),
        ("lses", lses, ("state", "token", "head")),
        ("out", out, ("token", "head")),
        ("lse", lse, ("token", "head")),
    ):
        strides = (0,) * len(dims) if tensor is None else tensor.stride()[: len(dims)]
        arguments |= {f"{name}_{dim}_stride": stride for dim, stride in zip(dims, strides, strict=True)}
    arguments |= {
        "num_states": num_states,
        "num_rows": num_tokens * num_heads,
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": next_power_of_2(head_dim),
        "ROWS": ROWS,
        "LSE": lse is not None,
        "INTERPRET": INTERPRETING,
    }
    return [Launch(merge_states, (-(-num_tokens * num_heads // ROWS),), arguments)]
