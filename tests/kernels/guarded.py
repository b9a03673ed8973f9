"""Tensors between guard words: whoever writes beside one is found out, and whoever reads there gets a NaN."""

from __future__ import annotations

import torch

GUARD_BYTES = 256
GUARD = 0xFF
"""Repeated, a NaN in every dtype of floats, and −1 as an integer."""


class Guards:
    """Makes guarded copies, and checks later what became of the memory around them."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` with the same strides in memory of its own; also what lies between is guarded."""
        return self.empty(name, tensor).copy_(tensor)

    def empty(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor like another, filled with guards, which are NaN."""
        strides = like.stride()
        span = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, strides, strict=True))
        span = span * like.element_size() if like.numel() else 0
        memory = torch.full((2 * GUARD_BYTES + span,), GUARD, dtype=torch.uint8)
        inner = memory[GUARD_BYTES : GUARD_BYTES + span].view(like.dtype)
        # Which bytes are the tensor's own.
        own = torch.zeros(memory.shape, dtype=torch.bool)
        itemsize = like.element_size()
        if like.numel():
            bytes_of = own[GUARD_BYTES:].as_strided(
                (*like.shape, itemsize), (*(stride * itemsize for stride in strides), 1), GUARD_BYTES
            )
            bytes_of.fill_(True)
        self._kept.append((name, memory, own))
        return inner.as_strided(like.shape, strides, inner.storage_offset())

    def check(self) -> None:
        """Every byte that is no tensor's is as it was."""
        for name, memory, own in self._kept:
            assert bool((memory[~own] == GUARD).all()), f"guard words beside {name} were written"
