"""What a decoder computes between two calls of attention, by the C++ kernels for the CPU.

torch's own products of one or a few tokens take several times as long as reading the weights does, and its
norms and rotations are many small calls. These read the weights once, at the speed of the memory, with
float32 sums; a token's result depends neither on the other tokens nor on the number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, get_num_threads

from pagedkv import _core
from pagedkv.kernels.cpu import chosen_isa

MAX_TOKENS = 32
"""The most tokens of a call that is worth it; beyond, arithmetic counts and not memory."""
FEW_TOKENS = {torch.float32: 32, torch.bfloat16: 8, torch.int8: 32}
"""Up to so many tokens these products are faster than torch's, by the weights' dtype."""

PANEL_OUTPUTS = 32  # kPanelOutputs in csrc/include/pagedkv/dense.h

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


class PackedWeight(NamedTuple):
    """A weight of bfloat16 in the order in which products of pairs need it.

    Attributes
    ----------
    packed : Tensor [⌈num_out / 32⌉, num_in / 2, 32, 2] bfloat16
        Outputs beyond the last are 0.
    num_out : int
    isa : int
        The instruction set that it was packed for.
    """

    packed: Tensor
    num_out: int
    isa: int


def pack(weight: Tensor) -> PackedWeight | None:
    """Lay a weight [num_out, num_in] out for `multiply_packed`; None where that can't be or has no use."""
    isa = chosen_isa()
    is_suited = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
    if not is_suited or not _core.cpu_has_pairs(isa):
        return None
    num_out, num_in = weight.shape
    weight = weight.contiguous()
    packed = torch.empty(-(-num_out // PANEL_OUTPUTS), num_in // 2, PANEL_OUTPUTS, 2, dtype=weight.dtype)
    _core.cpu_pack_pairs(weight.data_ptr(), num_out, num_in, packed.data_ptr())
    return PackedWeight(packed, num_out, isa)


def multiply_packed(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias``, summed in float32 and rounded once.

    For many tokens as fast as torch's products, for few as fast as the weights can be read, and a token's
    result has the same bits among many and alone.

    Parameters
    ----------
    x : Tensor [num_tokens, num_in] bfloat16
    weight : PackedWeight
    bias : Tensor [num_out] float32, optional

    Returns
    -------
    Tensor [num_tokens, num_out] bfloat16
    """
    num_tokens, num_in = x.shape
    out = torch.empty(num_tokens, weight.num_out, dtype=x.dtype)
    _core.cpu_multiply_pairs(
        weight.isa,
        get_num_threads(),
        x.data_ptr(),
        x.stride(0),
        num_tokens,
        num_in,
        weight.packed.data_ptr(),
        weight.num_out,
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
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
