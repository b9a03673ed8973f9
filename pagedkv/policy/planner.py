"""How much KV fits: bytes by groups of layers, requests at a time, and what cached prefixes leave to them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from pagedkv.checks import check_int, show
from pagedkv.errors import UsageError
from pagedkv.policy.models import LayerGroup, Model
from pagedkv.spec import DTYPE_BYTES, MAX_BLOCK_SIZE, parse_bytes

CACHED_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75)
MAX_TOKENS = 2**31 - 1


class GroupPlan(NamedTuple):
    """A group of layers, and what a token, a block and a request take in it.

    Attributes
    ----------
    num_layers, window, num_kv_heads, head_dim
        As in `LayerGroup`.
    page_shape : tuple of int
        Of K, or of V, of one block in one layer, in the order of the layout.
    bytes_per_token, bytes_per_block : int
        In all layers of the group.
    blocks_per_request : int
        All blocks of a request; behind a window those that hold the tokens still seen.
    """

    num_layers: int
    window: int | None
    num_kv_heads: int
    head_dim: int
    page_shape: tuple[int, ...]
    bytes_per_token: int
    bytes_per_block: int
    blocks_per_request: int


class CachedShare(NamedTuple):
    """A share of the memory that cached prefixes hold, and what is left.

    Attributes
    ----------
    share : float
    cached_tokens : int
        Tokens in prefixes as long as a request, whole ones only.
    concurrent_requests : int
        What the rest of the memory has room for.
    """

    share: float
    cached_tokens: int
    concurrent_requests: int


@dataclass(frozen=True)
class MemoryPlan:
    """A model's KV in a memory.

    Attributes
    ----------
    model, dtype, layout : str
    block_size : int
        Tokens.
    memory_bytes : int
    groups : tuple of GroupPlan
    bytes_per_token, bytes_per_block : int
        In all layers that keep KV, windows or not.
    num_blocks : int
        Blocks that fit when every layer keeps each of them.
    num_tokens : int
        Of one request, prompt and answer.
    shared_tokens : int
        At its begin, that all requests share; whole blocks of it are there once.
    kv_bytes : int
        So many tokens when every layer keeps all of them.
    request_bytes, shared_bytes : int
        All that one request holds, and what of it is shared.
    concurrent_requests : int
        Requests that fit at a time.
    cached : tuple of CachedShare
        What prefixes that are kept take from running requests.
    """

    model: str
    dtype: str
    layout: str
    block_size: int
    memory_bytes: int
    groups: tuple[GroupPlan, ...]
    bytes_per_token: int
    bytes_per_block: int
    num_blocks: int
    num_tokens: int
    shared_tokens: int
    kv_bytes: int
    request_bytes: int
    shared_bytes: int
    concurrent_requests: int
    cached: tuple[CachedShare, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures, for JSON."""
        groups = [group._asdict() for group in self.groups]
        return {**asdict(self), "groups": groups, "cached": [row._asdict() for row in self.cached]}


def plan_memory(
    model: Model,
    memory: int | str,
    *,
    dtype: str | None = None,
    scales: bool = False,
    layout: str = "NHD",
    block_size: int = 16,
    num_tokens: int = 8192,
    shared_tokens: int = 0,
    tensor_parallel: int = 1,
) -> MemoryPlan:
    """Say what fits into a memory.

    Parameters
    ----------
    model : Model
    memory : int or str
        Bytes, or text such as "40GiB": what is left for KV, of one device.
    dtype : str, optional
        Of the KV; by default the model's.
    scales : bool
        Count a scale of 4 bytes for each token and head, of K and of V.
    layout : "NHD" or "HND"
        Order in a page; changes its shape, not its size.
    block_size : int
    num_tokens, shared_tokens : int
        Of a request, and how many of them all requests share.
    tensor_parallel : int
        Devices that the KV heads are divided among; the plan is for one of them.

    Raises
    ------
    UsageError
        A wrong argument, or not even one block fits.
    """
    dtype = model.dtype if dtype is None else dtype
    if dtype not in DTYPE_BYTES:
        raise UsageError(f"dtype: expected one of {', '.join(DTYPE_BYTES)}, got {show(dtype)}")
    if layout not in ("NHD", "HND"):
        raise UsageError(f"layout: expected NHD or HND, got {show(layout)}")
    size = check_int("block_size", block_size, 1, MAX_BLOCK_SIZE)
    length = check_int("num_tokens", num_tokens, 1, MAX_TOKENS)
    shared = check_int("shared_tokens", shared_tokens, 0, length)
    bytes_there = parse_bytes(memory)
    model = split_heads(model, check_int("tensor_parallel", tensor_parallel, 1, 1024))
    groups = tuple(_group(group, dtype, scales, layout, size, length) for group in model.groups)
    if not groups:
        raise UsageError(f"{model.name}: expected a layer that keeps KV, got none")
    bytes_per_token = sum(group.bytes_per_token for group in groups)
    bytes_per_block = bytes_per_token * size
    if bytes_there < bytes_per_block:
        raise UsageError(
            f"memory: expected at least the {bytes_per_block} bytes of a block, got {bytes_there}"
        )
    request = sum(group.bytes_per_block * group.blocks_per_request for group in groups)
    shared_bytes = sum(group.bytes_per_block * (shared // size) for group in groups if group.window is None)

    def fitting(room: int) -> int:
        # With all of a request shared, its own part would be nothing: it still computes its last block.
        own = max(request - shared_bytes, bytes_per_block)
        return max(0, room - shared_bytes) // own

    cached = []
    for share in CACHED_SHARES:
        prefixes = int(bytes_there * share) // request
        left = bytes_there - prefixes * request
        cached.append(CachedShare(share, prefixes * length, fitting(left)))
    return MemoryPlan(
        model=model.name,
        dtype=dtype,
        layout=layout,
        block_size=size,
        memory_bytes=bytes_there,
        groups=groups,
        bytes_per_token=bytes_per_token,
        bytes_per_block=bytes_per_block,
        num_blocks=bytes_there // bytes_per_block,
        num_tokens=length,
        shared_tokens=shared,
        kv_bytes=length * bytes_per_token,
        request_bytes=request,
        shared_bytes=shared_bytes,
        concurrent_requests=fitting(bytes_there),
        cached=tuple(cached),
    )


def split_heads(model: Model, devices: int) -> Model:
    """Return what one of several devices keeps: its part of the KV heads, at least one; a latent whole."""

    def part(group: LayerGroup) -> LayerGroup:
        heads = -(-group.num_kv_heads // devices)
        values = group.values_per_token // group.num_kv_heads * heads
        return group._replace(num_kv_heads=heads, values_per_token=values)

    return replace(model, groups=tuple(map(part, model.groups)))


def window_blocks(num_tokens: int, window: int | None, block_size: int) -> int:
    """Return the blocks that a request of so many tokens holds in a layer, at most.

    A token sees itself and the ``window − 1`` before it, which may begin anywhere in a block.
    """
    whole = -(-num_tokens // block_size)
    if window is None:
        return whole
    return min(whole, -(-(window - 1) // block_size) + 1)


def _group(
    group: LayerGroup, dtype: str, scales: bool, layout: str, block_size: int, num_tokens: int
) -> GroupPlan:
    of_token = group.bytes_per_token(dtype, scales=scales)
    heads, width = group.num_kv_heads, group.head_dim
    return GroupPlan(
        num_layers=group.num_layers,
        window=group.window,
        num_kv_heads=heads,
        head_dim=width,
        page_shape=(block_size, heads, width) if layout == "NHD" else (heads, block_size, width),
        bytes_per_token=of_token,
        bytes_per_block=of_token * block_size,
        blocks_per_request=window_blocks(num_tokens, group.window, block_size),
    )
