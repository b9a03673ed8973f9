"""What stands between a decoder's products: norms, rotations and gates. One call each on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedkv.kernels import dense

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [..., columns] over its root mean square, times float32 `weight` [columns].

    Computed in float32 whatever the dtype: the squares of bfloat16 numbers keep too few digits to be summed.
    """
    if dense.takes(x):
        return dense.rms_norm(x, weight, eps)
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head's pairs (i, i + head_dim / 2) by the token's angles; may do so in place.

    Parameters
    ----------
    x : Tensor [num_tokens, heads, head_dim]
        Use the result only.
    cos, sin : Tensor [num_tokens, 1, head_dim / 2] float32
    """
    if dense.takes(x):
        dense.rotate_(x, cos, sin)
        return x
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """Return ``activation(gate) · up`` for rows that hold gate and then up: [num_tokens, 2 · columns]."""
    if activation == "silu" and dense.takes(gate_up):
        return dense.silu_and_multiply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate) * up
