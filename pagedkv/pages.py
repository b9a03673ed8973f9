"""KVPages: the memory of the K and V of all layers."""

from __future__ import annotations

from math import prod
from typing import Literal, get_args

import numpy as np
import torch

from pagedkv.checks import check_int, show
from pagedkv.errors import CapacityError, UsageError
from pagedkv.spec import KVCacheSpec

Arrangement = Literal["block", "layer"]


class KVPages:
    """The K and V tensors of a pool.

    Storage is block-major, ``[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]``: one block is
    one contiguous extent over all layers, so that a tier moves it in one piece. With ``arrangement="layer"``
    it is ``[num_layers, 2, num_blocks, …]``, as FlashInfer and flash-attn like it. The layout "HND" swaps the
    dimensions of tokens and heads in either. Kernels take strides, so nothing else depends on the choice.

    Parameters
    ----------
    spec : KVCacheSpec
    num_blocks : int
    device : torch.device or str
    arrangement : "block" or "layer"

    Attributes
    ----------
    blocks : Tensor [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
        A view in this order of dimensions whatever the arrangement and the layout. Uninitialised memory at
        first.

    Raises
    ------
    UsageError
    CapacityError
        When the device has no memory for so many pages.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        *,
        device: torch.device | str = "cpu",
        arrangement: Arrangement = "block",
    ) -> None:
        if not isinstance(spec, KVCacheSpec):
            raise UsageError(f"spec: expected a KVCacheSpec, got {show(spec)}")
        num_blocks = check_int("num_blocks", num_blocks, 1, 2**31 - 1)
        if arrangement not in get_args(Arrangement):
            raise UsageError(f"arrangement: expected 'block' or 'layer', got {show(arrangement)}")
        [group] = spec.groups
        names = ["num_blocks", "num_layers", "two", "block_size", "num_kv_heads", "head_dim"]
        heads = group.num_kv_heads, group.head_dim
        sizes = dict(zip(names, (num_blocks, len(group.layers), 2, spec.block_size, *heads), strict=True))
        order = list(names)
        if arrangement == "layer":
            order = [*order[1:3], order[0], *order[3:]]
        if spec.layout == "HND":
            order[3:5] = reversed(order[3:5])
        # Pages made inside torch.inference_mode() must be writable outside of it too.
        with torch.inference_mode(False):
            storage = _allocate([sizes[name] for name in order], getattr(torch, group.dtype), _device(device))
            self.blocks = storage.permute([order.index(name) for name in names])
            # Taken once: a view costs microseconds, and every layer of every step needs two.
            self._views = {
                layer: (self.blocks[:, i, 0], self.blocks[:, i, 1]) for i, layer in enumerate(group.layers)
            }
        self.spec = spec
        self.arrangement = arrangement

    def __getitem__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer, each a view ``[num_blocks, block_size, num_kv_heads, head_dim]``."""
        # True and 1.0 equal 1, but are no layers.
        is_integer = isinstance(layer, int | np.integer) and not isinstance(layer, bool)
        views = self._views.get(layer) if is_integer else None
        if views is None:
            raise UsageError(f"layer: expected one of {sorted(self._views)}, got {show(layer)}")
        return views

    @property
    def num_blocks(self) -> int:
        """Pages."""
        return self.blocks.shape[0]

    @property
    def size_bytes(self) -> int:
        """Memory of all pages."""
        return self.blocks.numel() * self.blocks.element_size()


def _device(device: torch.device | str) -> torch.device:
    try:
        known = torch.device(device)
    except (RuntimeError, TypeError):
        known = None
    if known is None or known.type == "meta":  # which stores nothing
        raise UsageError(f"device: expected a device that torch knows, got {show(device)}")
    return known


def _allocate(sizes: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(sizes, dtype=dtype, device=device)
    except AssertionError as error:  # what torch raises for a device that it was built without
        raise UsageError(f"device: expected one that this torch was built for, got {device}") from error
    except RuntimeError as error:
        size_bytes = prod(sizes) * dtype.itemsize
        reason = str(error).partition("\n")[0]
        raise CapacityError(f"pages: expected {size_bytes} bytes on {device}, got none: {reason}") from error
