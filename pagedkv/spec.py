"""What one token costs: shapes and bytes, no tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from pagedkv.checks import check_int, check_iterable, show
from pagedkv.errors import SpecError, UsageError

KVLayout = Literal["NHD", "HND"]
"""Order of the last three dimensions of a page: N tokens, H heads, D head_dim."""
Scales = Literal["token_head"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
SCALE_BYTES = 4
MAX_BLOCK_SIZE = 2**16 - 1
"""A position in a block, and their count, fit in 16 bits of a digest's preimage."""
MAX_LAYERS = 2**16
MAX_BYTES = 2**63 - 1

_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", 1):
    _UNITS |= {f"{_prefix}B": 1000**_power, f"{_prefix}IB": 1024**_power}


@dataclass(frozen=True)
class KVGroup:
    """Layers that keep the same kind of KV, and so share one page table.

    Parameters
    ----------
    layers : tuple of int
        The model's layer numbers, each in one group only.
    num_kv_heads, head_dim : int
        Of each of these layers.
    dtype : str
        "float32", "bfloat16", "float16", "float8_e4m3fn" or "int8".
    window : int or None
        Tokens that a sliding-window layer looks back; None for full attention.
    scales : "token_head" or None
        Only for 8 bits. "token_head": each token and head has a scale for K and one for V, computed when it
        is written and kept in its block, so that a hit finds it there. None: a scale of 1, or what
        :meth:`KVPages.set_scales` is given for a layer.

    Raises
    ------
    SpecError
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    window: int | None = None
    scales: Scales | None = None

    def __post_init__(self) -> None:
        # Stored as Python's own integers: those of numpy would overflow in the products below.
        _store(self, "num_kv_heads", _check("KVGroup.num_kv_heads", self.num_kv_heads, 1, 2**16))
        _store(self, "head_dim", _check("KVGroup.head_dim", self.head_dim, 1, 1024))
        numbers = _as_tuple(self.layers)
        layers = tuple(_check("KVGroup.layers", number, 0, MAX_LAYERS - 1) for number in numbers)
        if not layers or len(set(layers)) < len(layers):
            raise SpecError(f"KVGroup.layers: expected at least one and none twice, got {show(self.layers)}")
        _store(self, "layers", layers)
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise SpecError(f"KVGroup.dtype: expected one of {known}, got {show(self.dtype)}")
        if self.scales is not None and (self.scales != "token_head" or DTYPE_BYTES[self.dtype] > 1):
            expected = "None" if DTYPE_BYTES[self.dtype] > 1 else "None or 'token_head'"
            raise SpecError(f"KVGroup.scales: expected {expected} for {self.dtype}, got {show(self.scales)}")
        if self.window is not None:
            raise SpecError(f"KVGroup.window: expected None (full attention), got {show(self.window)}")

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers of the group, and their scales."""
        head_bytes = self.head_dim * DTYPE_BYTES[self.dtype] + (SCALE_BYTES if self.scales else 0)
        return len(self.layers) * 2 * self.num_kv_heads * head_bytes


@dataclass(frozen=True)
class KVCacheSpec:
    """The KV of a model: its groups, and how a page is laid out.

    Parameters
    ----------
    groups : tuple of KVGroup
        Exactly one today.
    block_size : int
        Tokens in a block.
    layout : KVLayout
        "NHD": ``[block_size, num_kv_heads, head_dim]``; "HND": ``[num_kv_heads, block_size, head_dim]``.

    Raises
    ------
    SpecError
    """

    groups: tuple[KVGroup, ...]
    block_size: int = 16
    layout: KVLayout = "NHD"

    def __post_init__(self) -> None:
        _store(self, "block_size", _check("KVCacheSpec.block_size", self.block_size, 1, MAX_BLOCK_SIZE))
        groups = _as_tuple(self.groups)
        if len(groups) != 1 or not isinstance(groups[0], KVGroup):
            raise SpecError(f"KVCacheSpec.groups: expected a tuple of one KVGroup, got {show(self.groups)}")
        _store(self, "groups", groups)
        group = groups[0]
        kv_bytes = self.block_size * len(group.layers) * 2 * group.num_kv_heads * group.head_dim
        if group.scales and kv_bytes % SCALE_BYTES:
            what = f"a multiple of {SCALE_BYTES} bytes of K and V in front of a block's scales"
            raise SpecError(f"KVCacheSpec.groups: expected {what}, got {kv_bytes}")
        if self.layout not in get_args(KVLayout):
            raise SpecError(f"KVCacheSpec.layout: expected 'NHD' or 'HND', got {show(self.layout)}")

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str = "float32",
        block_size: int = 16,
        layout: KVLayout = "NHD",
        scales: Scales | None = None,
    ) -> KVCacheSpec:
        """Describe a model whose layers are all alike."""
        layers = tuple(range(_check("num_layers", num_layers, 1, MAX_LAYERS)))
        return cls((KVGroup(layers, num_kv_heads, head_dim, dtype, None, scales),), block_size, layout)

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers, and their scales."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """K and V of one block in all layers, and their scales."""
        return self.bytes_per_token * self.block_size

    def blocks_in(self, memory: int | str) -> int:
        """How many blocks fit into `memory`: bytes, or text such as "2GiB" or "512 MB".

        Raises
        ------
        UsageError
            For text that is no size, or memory too small for one block.
        """
        num_blocks = parse_bytes(memory) // self.bytes_per_block
        if num_blocks < 1:
            need = f"at least the {self.bytes_per_block} bytes of one block"
            raise UsageError(f"memory: expected {need}, got {show(memory)}")
        return num_blocks


def parse_bytes(size: int | str) -> int:
    """Bytes from a number or from text such as "2GiB", "1.5 GB" or "4096"."""
    if not isinstance(size, str):
        return check_int("memory", size, 0, MAX_BYTES)
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([KMGT]I?B|B?)\s*", size.upper())
    if match is None:
        raise UsageError(f"memory: expected bytes or a size like '2GiB' or '512MB', got {show(size)}")
    return check_int("memory", int(Fraction(match[1]) * _UNITS[match[2]]), 0, MAX_BYTES)


def _check(what: str, value: Any, low: int, high: int) -> int:
    try:
        return check_int(what, value, low, high)
    except UsageError as error:
        raise SpecError(str(error)) from None


def _as_tuple(values: Any) -> tuple[Any, ...]:
    try:
        return tuple(check_iterable("", values))
    except UsageError:
        return ()  # what is none is refused as empty


def _store(frozen: KVGroup | KVCacheSpec, name: str, value: Any) -> None:
    object.__setattr__(frozen, name, value)
