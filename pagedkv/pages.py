"""KVPages: the memory of the K and V of all layers."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Literal, get_args

import numpy as np
import torch

from pagedkv.checks import show
from pagedkv.errors import CapacityError, ShapeError, StateError, UsageError
from pagedkv.spec import DTYPE_BYTES, KVCacheSpec, KVGroup

Arrangement = Literal["block", "layer"]
LayerScales = tuple[torch.Tensor | None, torch.Tensor | None]
"""Of K and of V."""


class GroupPages:
    """The memory of one group of layers; made by :class:`KVPages`, which has the meaning of all this.

    Attributes
    ----------
    group : KVGroup
    blocks : Tensor [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    extents : tuple of Tensor [num_blocks, …]
    scales : Tensor [num_blocks, num_layers, 2, block_size, num_kv_heads] or None
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        group: KVGroup,
        num_blocks: int,
        device: torch.device,
        arrangement: Arrangement,
    ) -> None:
        self.group = group
        dtype = getattr(torch, group.dtype)
        sizes = [num_blocks, len(group.layers), 2, spec.block_size, group.num_kv_heads, group.head_dim]
        # In memory: the dimensions of `sizes`, and where each of them lies.
        order = [0, 1, 2, 3, 4] if arrangement == "block" else [1, 2, 0, 3, 4]
        if spec.layout == "HND":
            order[3:] = reversed(order[3:])
        shape = [sizes[dim] for dim in order]
        back = [order.index(dim) for dim in range(5)]
        self.scales: torch.Tensor | None = None
        # Pages made inside torch.inference_mode() must be writable outside of it too.
        with torch.inference_mode(False):
            if group.scales and arrangement == "block":
                kv_bytes = prod(sizes[1:])
                extents = _allocate(
                    [num_blocks, group.bytes_per_token * spec.block_size], torch.uint8, device
                )
                kv = extents[:, :kv_bytes].view(dtype).view(*shape, group.head_dim)
                self.scales = extents[:, kv_bytes:].view(torch.float32).view(shape).permute(back)
                self.extents: tuple[torch.Tensor, ...] = (extents,)
                self.blocks = kv.permute(*back, 5)
            else:
                self.blocks = _allocate([*shape, group.head_dim], dtype, device).permute(*back, 5)
                if group.scales:
                    self.scales = _allocate(shape, torch.float32, device).permute(back)
                self.extents = (self.blocks,) if self.scales is None else (self.blocks, self.scales)

    @property
    def num_blocks(self) -> int:
        """Pages."""
        return self.blocks.shape[0]


class KVPages:
    """The K and V tensors of a pool.

    Storage is block-major, ``[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]``: one block is
    one contiguous extent over all layers, so that a tier moves it in one piece. With ``arrangement="layer"``
    it is ``[num_layers, 2, num_blocks, …]``, as FlashInfer and flash-attn like it. The layout "HND" swaps the
    dimensions of tokens and heads in either. Kernels take strides, so nothing else depends on the choice.

    Scales "token_head" stand behind the K and V of all layers, ``[num_layers, 2, block_size, num_kv_heads]``
    float32 inside the block's extent, or by the layer in memory of their own.

    Parameters
    ----------
    spec : KVCacheSpec
    num_blocks : int, or sequence of int
        Pages of every group, or of each.
    device : torch.device or str
    arrangement : "block" or "layer"

    Attributes
    ----------
    groups : tuple of GroupPages
        Memory of each group of layers. `blocks` and `extents` are those of the only one.
    device : torch.device
    blocks : Tensor [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
        K and V: a view in this order of dimensions whatever the arrangement and the layout. Uninitialised
        memory at first.
    extents : tuple of Tensor [num_blocks, …]
        All that blocks hold, scales too, for what copies them whole.

    Raises
    ------
    UsageError
    CapacityError
        When the device has no memory for so many pages.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int | Iterable[int],
        *,
        device: torch.device | str = "cpu",
        arrangement: Arrangement = "block",
    ) -> None:
        if not isinstance(spec, KVCacheSpec):
            raise UsageError(f"spec: expected a KVCacheSpec, got {show(spec)}")
        counts = spec.check_blocks(num_blocks)
        if arrangement not in get_args(Arrangement):
            raise UsageError(f"arrangement: expected 'block' or 'layer', got {show(arrangement)}")
        self.device = _device(device)
        self.groups = tuple(
            GroupPages(spec, group, count, self.device, arrangement)
            for group, count in zip(spec.groups, counts, strict=True)
        )
        self.device = self.groups[0].blocks.device  # with its index
        # Taken once: a view costs microseconds, and every layer of every step needs two.
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._scales: dict[int, LayerScales] = {}
        self._group_of: dict[int, KVGroup] = {}
        with torch.inference_mode(False):
            for own in self.groups:
                for i, layer in enumerate(own.group.layers):
                    self._views[layer] = own.blocks[:, i, 0], own.blocks[:, i, 1]
                    scales = own.scales
                    self._scales[layer] = (
                        (None, None) if scales is None else (scales[:, i, 0], scales[:, i, 1])
                    )
                    self._group_of[layer] = own.group
        self.spec = spec
        self.arrangement = arrangement

    def __getitem__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer, each a view ``[num_blocks, block_size, num_kv_heads, head_dim]``."""
        return self._views[self._check(layer)]

    def scales(self, layer: int) -> LayerScales:
        """Return what the K and the V of a layer are multiplied by, each None for 1.

        Of the group's scales "token_head" each is a view ``[num_blocks, block_size, num_kv_heads]`` of what
        `write_kv` computes; else it is what :meth:`set_scales` was given.
        """
        return self._scales[self._check(layer)]

    def set_scales(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Give the scales of a layer's K and V, before any is written.

        Parameters
        ----------
        layer : int
        key, value : Tensor [] or [num_kv_heads] float32
            Of the whole layer, or of each head. Kept, not copied.

        Raises
        ------
        ShapeError
        UsageError
            For pages of more than 8 bits, and for those whose scales are computed.
        StateError
            When they were given before: what is written already would change its meaning.
        """
        layer = self._check(layer)
        group = self._group_of[layer]
        if group.scales is not None or DTYPE_BYTES[group.dtype] > 1:
            kept = f"scales {group.scales!r}" if group.scales else f"{group.dtype}"
            raise UsageError(f"set_scales: expected pages of 8 bits without scales, got pages of {kept}")
        expected = f"[] or [{group.num_kv_heads}] float32 on {self.device}"
        for name, scales in (("key", key), ("value", value)):
            if not isinstance(scales, torch.Tensor):
                got = type(scales).__name__
            elif (
                tuple(scales.shape) in ((), (group.num_kv_heads,))
                and scales.dtype == torch.float32
                and scales.device == self.device
            ):
                continue
            else:
                got = f"{list(scales.shape)} {str(scales.dtype).removeprefix('torch.')} on {scales.device}"
            raise ShapeError(f"{name}: expected {expected}, got {got}, in set_scales", name, expected, got)
        if self._scales[layer] != (None, None):
            raise StateError(
                f"set_scales: expected a layer without scales, got layer {layer}, which has some"
            )
        self._scales[layer] = key, value

    def _check(self, layer: int) -> int:
        # True and 1.0 equal 1, but are no layers.
        if not isinstance(layer, int | np.integer) or isinstance(layer, bool) or layer not in self._views:
            raise UsageError(f"layer: expected one of {sorted(self._views)}, got {show(layer)}")
        return int(layer)

    @property
    def blocks(self) -> torch.Tensor:
        """K and V of the only group."""
        return self._only("blocks").blocks

    @property
    def extents(self) -> tuple[torch.Tensor, ...]:
        """All that blocks of the only group hold."""
        return self._only("extents").extents

    def _only(self, name: str) -> GroupPages:
        if len(self.groups) > 1:
            expected = f"pages of one group, or groups[i].{name}"
            raise UsageError(f"{name}: expected {expected}, got {len(self.groups)} groups")
        return self.groups[0]

    @property
    def num_blocks(self) -> int:
        """Pages of the first group."""
        return self.groups[0].num_blocks

    @property
    def size_bytes(self) -> int:
        """Memory of all pages, and of their scales."""
        return sum(extents.nbytes for group in self.groups for extents in group.extents)


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
