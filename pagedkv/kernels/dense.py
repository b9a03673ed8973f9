"""What a decoder computes between two calls of attention, by the C++ kernels for the CPU.

torch's own products of one or a few tokens take several times as long as reading the weights does, and its
norms and rotations are many small calls. These read the weights once, at the speed of the memory, with
float32 sums; a token's result depends neither on the other tokens nor on the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor, get_num_threads

from pagedkv import _core
from pagedkv.kernels.cpu import chosen_isa

MAX_TOKENS = 32
"""The most tokens of a call that is worth it; beyond, arithmetic counts and not memory."""
FEW_TOKENS = {torch.float32: 32, torch.bfloat16: 8, torch.int8: 32}
"""Up to so many tokens these products are faster than torch's, by the weights' dtype."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 4}  # as in csrc/include/pagedkv/kernels.h
_ACTIVATIONS = (torch.float32, torch.bfloat16)


def takes(x: Tensor) -> bool:
    """Say whether these kernels compute with `x`: on the CPU, float32 or bfloat16, rows in one piece."""
    return x.device.type == "cpu" and x.dtype in _ACTIVATIONS and x.stride(-1) == 1


def multiply(
    x: Tensor, weight: Tensor, *, scales: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return ``x @ weight.T · scales + bias``.

    Parameters
    ----------
    x : Tensor [num_tokens, num_in]
        float32 or bfloat16.
    weight : Tensor [num_out, num_in]
        float32, bfloat16 or int8, contiguous.
    scales, bias : Tensor [num_out] float32, optional
    dtype : torch.dtype
        Of the result: float32 or bfloat16.

    Returns
    -------
    Tensor [num_tokens, num_out]
    """
    num_tokens, num_in = x.shape
    out = torch.empty(num_tokens, weight.shape[0], dtype=dtype)
    _core.cpu_multiply(
        chosen_isa(),
        get_num_threads(),
        x.data_ptr(),
        x.stride(0),
        _DTYPES[x.dtype],
        num_tokens,
        num_in,
        weight.data_ptr(),
        _DTYPES[weight.dtype],
        weight.shape[0],
        0 if scales is None else scales.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        _DTYPES[dtype],
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return each row of `x` over its root mean square, times `weight`; rounded once.

    Parameters
    ----------
    x : Tensor [..., num_columns]
        The dimensions before the last need no copy where they are one in memory.
    weight : Tensor [num_columns] float32
    eps : float
        Added to the mean of the squares.
    """
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype)
    _core.cpu_normalise(
        chosen_isa(),
        get_num_threads(),
        rows.data_ptr(),
        rows.stride(0),
        _DTYPES[x.dtype],
        rows.shape[0],
        rows.shape[1],
        weight.data_ptr(),
        eps,
        out.data_ptr(),
    )
    return out


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn each head's pairs (i, i + head_dim / 2) by the angles of its token; modifies `x`.

    Parameters
    ----------
    x : Tensor [num_tokens, num_heads, head_dim]
    cos, sin : Tensor [num_tokens, 1, head_dim / 2] float32
        Contiguous.
    """
    num_tokens, num_heads, head_dim = x.shape
    token_stride, head_stride, _ = x.stride()
    _core.cpu_rotate(
        chosen_isa(),
        get_num_threads(),
        x.data_ptr(),
        token_stride,
        head_stride,
        _DTYPES[x.dtype],
        num_tokens,
        num_heads,
        head_dim,
        cos.data_ptr(),
        sin.data_ptr(),
    )


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) · up`` of rows that hold gate and then up; rounded once.

    Parameters
    ----------
    gate_up : Tensor [num_tokens, 2 · num_columns]
    """
    num_tokens, width = gate_up.shape
    out = torch.empty(num_tokens, width // 2, dtype=gate_up.dtype)
    _core.cpu_gate(
        chosen_isa(),
        get_num_threads(),
        gate_up.data_ptr(),
        gate_up.stride(0),
        _DTYPES[gate_up.dtype],
        num_tokens,
        width // 2,
        out.data_ptr(),
    )
    return out
