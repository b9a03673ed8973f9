"""What one token costs: shapes and bytes, no tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from pagedkv.checks import check_int, check_iterable, check_ordered, show
from pagedkv.errors import SpecError, UsageError

KVLayout = Literal["NHD", "HND"]
"""Order of the last three dimensions of a page: N tokens, H heads, D head_dim."""
Scales = Literal["token_head"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
SCALE_BYTES = 4
MAX_BLOCK_SIZE = 2**16 - 1
"""A position in a block, and their count, fit in 16 bits of a digest's preimage."""
MAX_LAYERS = 2**16
MAX_GROUPS = 64
MAX_WINDOW = 2**31 - 1
MAX_BYTES = 2**63 - 1
MAX_BLOCKS = 2**31 - 128
"""Block ids are int32, and the core needs some of its own."""

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
        Tokens that a sliding-window layer sees, the query's own included; None for full attention.
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
            _store(self, "window", _check("KVGroup.window", self.window, 1, MAX_WINDOW))

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers of the group, and their scales."""
        head_bytes = self.head_dim * DTYPE_BYTES[self.dtype] + (SCALE_BYTES if self.scales else 0)
        return len(self.layers) * 2 * self.num_kv_heads * head_bytes

    def blocks_of(self, num_tokens: int, block_size: int, step_tokens: int) -> int:
        """Most pages that a sequence of so many tokens ever holds, computed `step_tokens` at a time."""
        num_blocks = -(-num_tokens // block_size)
        if self.window is None:
            return num_blocks
        # From inside a block back to inside another one: two more than the tokens fill.
        return min(num_blocks, (self.window - 1 + step_tokens) // block_size + 2)


@dataclass(frozen=True)
class KVCacheSpec:
    """The KV of a model: its groups, and how a page is laid out.

    Layers with the same window, heads and dtype form a group, which has pages and tables of its own. Layers
    with a sliding window hold pages for that alone: what has left the window of a sequence is given back
    after each step. Gemma 2, whose even layers have a window, and Mistral, whose layers all have one::

        gemma = KVCacheSpec((
            KVGroup(tuple(range(1, 26, 2)), num_kv_heads=4, head_dim=256, dtype="bfloat16"),
            KVGroup(tuple(range(0, 26, 2)), num_kv_heads=4, head_dim=256, dtype="bfloat16", window=4096),
        ))
        mistral = KVCacheSpec.uniform(32, num_kv_heads=8, head_dim=128, dtype="bfloat16", window=4096)
        cache = PagedKVCache(gemma, gemma.split("8GiB", num_tokens=8192))

    `PagedKVCache.write` and `attend` find the group of a layer, its pages, its table and its window by
    themselves, so an engine's loop is that of a model with one group.

    Parameters
    ----------
    groups : tuple of KVGroup
        Those without a window first. Each layer is in one of them.
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
        if not 1 <= len(groups) <= MAX_GROUPS or not all(isinstance(group, KVGroup) for group in groups):
            expected = f"a tuple of 1 to {MAX_GROUPS} KVGroups"
            raise SpecError(f"KVCacheSpec.groups: expected {expected}, got {show(self.groups)}")
        _store(self, "groups", groups)
        check_windows("KVCacheSpec.groups", self.windows)
        layers = [layer for group in groups for layer in group.layers]
        if len(set(layers)) < len(layers):
            twice = sorted({layer for layer in layers if layers.count(layer) > 1})
            raise SpecError(f"KVCacheSpec.groups: expected each layer in one group, got {twice} in several")
        for group in groups:
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
        window: int | None = None,
    ) -> KVCacheSpec:
        """Describe a model whose layers are all alike.

        Parameters
        ----------
        num_layers : int
        num_kv_heads, head_dim, dtype, window, scales
            Of the one group of all layers, as in KVGroup.
        block_size, layout
            As in KVCacheSpec.

        Raises
        ------
        SpecError
        """
        layers = tuple(range(_check("num_layers", num_layers, 1, MAX_LAYERS)))
        return cls((KVGroup(layers, num_kv_heads, head_dim, dtype, window, scales),), block_size, layout)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each group's window."""
        return tuple(group.window for group in self.groups)

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

    def check_blocks(self, num_blocks: int | Iterable[int]) -> tuple[int, ...]:
        """Pages of each group, from one number for all of them or from one for each.

        Raises
        ------
        UsageError
        """
        return blocks_by_group(num_blocks, len(self.groups))

    def blocks_in(self, memory: int | str) -> int:
        """How many blocks fit into `memory`: bytes, or text such as "2GiB" or "512 MB".

        Every group gets so many pages. For groups with windows :meth:`split` gives more blocks.

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

    def split(self, memory: int | str, num_tokens: int, *, step_tokens: int = 512) -> tuple[int, ...]:
        """Divide memory among the groups so that sequences of one length use them up together.

        Parameters
        ----------
        memory : int or str
            As for `blocks_in`.
        num_tokens : int
            Length of the sequences. Shorter ones leave pages of groups with windows scarce, longer ones
            those of the others; neither makes a request fail that the pages can hold.
        step_tokens : int
            Most tokens that a step computes of a sequence, which are held on top of the window.

        Returns
        -------
        tuple of int, [num_groups]
            Pages of each group, for :class:`PagedKVCache`.

        Raises
        ------
        UsageError
            Also for memory too small for one block of each group.
        """
        num_tokens = check_int("split: num_tokens", num_tokens, 1, MAX_BYTES)
        step_tokens = check_int("split: step_tokens", step_tokens, 1, MAX_BYTES)
        needs = [group.blocks_of(num_tokens, self.block_size, step_tokens) for group in self.groups]
        sizes = [group.bytes_per_token * self.block_size for group in self.groups]
        available, all_bytes = (
            parse_bytes(memory),
            sum(n * size for n, size in zip(needs, sizes, strict=True)),
        )
        counts = tuple(n * available // all_bytes for n in needs)
        if min(counts) < 1:
            raise UsageError(f"memory: expected at least one block of each group, got {show(memory)}")
        return counts


def blocks_by_group(num_blocks: int | Iterable[int], num_groups: int) -> tuple[int, ...]:
    """Pages of each group, from one number for all of them or from one for each."""
    if not isinstance(num_blocks, Iterable) or isinstance(num_blocks, str | bytes):
        return (check_int("num_blocks", num_blocks, 1, MAX_BLOCKS),) * num_groups
    counts = list(check_ordered("num_blocks", num_blocks))
    if len(counts) != num_groups:
        raise UsageError(f"num_blocks: expected one for each of {num_groups} groups, got {len(counts)}")
    return tuple(check_int(f"num_blocks[{g}]", count, 1, MAX_BLOCKS) for g, count in enumerate(counts))


def check_windows(what: str, windows: Iterable[int | None]) -> None:
    """Refuse a group without a window behind one with a window."""
    has_window = [window is not None for window in windows]
    if has_window != sorted(has_window):
        raise SpecError(f"{what}: expected those without a window first, got the windows {tuple(windows)}")


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
