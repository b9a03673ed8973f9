"""Products with weights, in the weights' own format: float32, bfloat16, or int8 with a scale a row.

A step of few tokens is bound by reading the weights: on a CPU a kernel of ours does that (`kernels.dense`).
With more tokens it is the arithmetic that counts, and torch's products do it; but where a processor
multiplies pairs of bfloat16, ours do for any number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedkv.kernels import dense


@dataclass(frozen=True)
class Linear:
    """A matrix product with an optional bias.

    Attributes
    ----------
    weight : Tensor [out, in]
        float32, bfloat16 or int8.
    bias : Tensor [out], optional
    scales : Tensor [out] float32, optional
        What the rows of an int8 weight are multiplied by.
    """

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    _wide_bias: Tensor | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Lay out what the kernel takes."""
        object.__setattr__(self, "weight", self.weight.contiguous())
        object.__setattr__(self, "_wide_bias", None if self.bias is None else self.bias.float())

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to x [num_tokens, in]; the result has its dtype."""
        if len(x) <= dense.FEW_TOKENS.get(self.weight.dtype, 0) and dense.takes(x):
            return self._by_kernel(x)
        if self.scales is None:
            return F.linear(x, self.weight, self.bias)
        # Whole numbers up to 127 are exact in every dtype, so the scales can come behind the sums.
        product = F.linear(x, self.weight.to(x.dtype)) * self.scales.to(x.dtype)
        return product if self.bias is None else product + self.bias

    def in_float32(self, x: Tensor) -> Tensor:
        """Apply to float32 x [num_tokens, in], with no sum or result rounded to less."""
        if dense.takes(x):
            if len(x) <= dense.MAX_TOKENS:
                return self._by_kernel(x)
            if self.weight.dtype != torch.float32:  # which torch could only multiply in a copy
                return torch.cat([self._by_kernel(rows) for rows in torch.split(x, dense.MAX_TOKENS)])
        product = F.linear(x, self.weight.float())
        if self.scales is not None:
            product *= self.scales
        return product if self._wide_bias is None else product + self._wide_bias

    def in_int8(self) -> Linear:
        """Return the same with weights of 8 bits: each row's largest becomes 127 or −127."""
        weight = self.weight.float()
        scales = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        return Linear((weight / scales[:, None]).round().to(torch.int8), self.bias, scales)

    def packed(self) -> Linear | PackedLinear:
        """Return the same by products of pairs, where the processor has them for this weight."""
        weight = dense.pack(self.weight)
        return self if weight is None else PackedLinear(weight, self._wide_bias)

    def _by_kernel(self, x: Tensor) -> Tensor:
        return dense.multiply(x, self.weight, scales=self.scales, bias=self._wide_bias, dtype=x.dtype)

    @classmethod
    def fused(cls, weights: dict[str, Tensor], *names: str) -> Linear:
        """Join projections of the same input into one product, consuming them from `weights`."""
        biases = [weights.pop(f"{name}.bias") for name in names if f"{name}.bias" in weights]
        return cls(
            torch.cat([weights.pop(f"{name}.weight") for name in names]),
            torch.cat(biases) if biases else None,
        )


@dataclass(frozen=True)
class PackedLinear:
    """A matrix product of bfloat16 by a weight that is laid out for it.

    Attributes
    ----------
    weight : PackedWeight
    bias : Tensor [out] float32, optional
    """

    weight: dense.PackedWeight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to bfloat16 x [num_tokens, in]."""
        return dense.multiply_packed(x, self.weight, self.bias)
