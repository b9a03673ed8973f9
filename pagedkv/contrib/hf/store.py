"""The pages of all layers, whatever their shapes, under the block ids of one pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagedkv import ops
from pagedkv.config import Backend
from pagedkv.contrib.hf.layer import LayerKV
from pagedkv.errors import SpecError
from pagedkv.pages import KVPages
from pagedkv.spec import KVCacheSpec, KVLayout


class PageStore:
    """K and V of every layer that keeps some. Layers of one shape, dtype and device lie in one KVPages.

    Parameters
    ----------
    layers : list of LayerKV
    num_blocks, block_size : int
    layout : KVLayout
    backend : str, optional
        Of the operations on pages.
    """

    def __init__(
        self,
        layers: Sequence[LayerKV],
        num_blocks: int,
        block_size: int,
        layout: KVLayout = "NHD",
        backend: Backend | None = None,
    ) -> None:
        self.layers = {kv.layer: kv for kv in layers}
        self.block_size = block_size
        self.backend = backend
        self.pages: list[KVPages] = []
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for spec, members in specs_of(layers, block_size, layout):
            pages = KVPages(spec, num_blocks, device=members[0].device)
            self.pages.append(pages)
            for i, kv in enumerate(members):
                self._views[kv.layer] = pages[i]

    def __getitem__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer, each a view ``[num_blocks, block_size, num_kv_heads, head_dim]``.

        Where K and V of the model differ in their head_dim, both have the larger one.
        """
        return self._views[layer]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Write K and V ``[batch, num_kv_heads, length, head_dim]`` to one slot a token, row by row."""
        kv, (key_pages, value_pages) = self.layers[layer], self._views[layer]
        dim = key_pages.shape[3]
        if kv.key_dim != dim:
            key = torch.nn.functional.pad(key, (0, dim - kv.key_dim))
        if kv.value_dim != dim:
            value = torch.nn.functional.pad(value, (0, dim - kv.value_dim))
        ops.write_kv(tokens_of(key), tokens_of(value), key_pages, value_pages, slots, backend=self.backend)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Run a step's copies: (source, destination, tokens that count)."""
        for pages in self.pages:
            for blocks in pages.extents:
                ids = torch.tensor(copies, dtype=torch.int64, device=blocks.device)
                ops.copy_blocks(blocks, ids[:, 0], ids[:, 1], backend=self.backend)

    def read(
        self, layer: int, block_ids: torch.Tensor, num_tokens: int, into: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Copy a sequence's first tokens out of the pages, in one pass over them.

        Parameters
        ----------
        layer : int
        block_ids : Tensor [num_blocks] int64
        num_tokens : int
        into : K and V, Tensor [num_kv_heads, at least num_tokens, head_dim] each
            Modified; where there is room for the whole last block, zeros come behind the tokens.
        """
        num_blocks = len(block_ids)
        whole = num_blocks * self.block_size
        for pages, out in zip(self._views[layer], into, strict=True):
            _, room, dim = out.shape
            if room >= whole and dim == pages.shape[3] and out.stride(1) == dim:
                # [num_blocks, block_size, heads, dim], as the pages have it
                by_block = out[:, :whole].view(-1, num_blocks, self.block_size, dim).permute(1, 2, 0, 3)
                torch.index_select(pages, 0, block_ids, out=by_block)
                # An unwritten place may hold NaN, which even a weight of 0 lets through.
                out[:, num_tokens:whole] = 0
            else:
                found = pages[block_ids].flatten(0, 1)[:num_tokens, :, :dim]
                out[:, :num_tokens] = found.transpose(0, 1)


def tokens_of(states: torch.Tensor) -> torch.Tensor:
    """Return ``[batch, num_heads, length, head_dim]`` as ``[batch * length, num_heads, head_dim]``."""
    if states.shape[2] == 1:
        return states.squeeze(2)
    return states.transpose(1, 2).flatten(0, 1)


def specs_of(
    layers: Sequence[LayerKV], block_size: int, layout: KVLayout = "NHD"
) -> list[tuple[KVCacheSpec, list[LayerKV]]]:
    """Return one spec for the layers of each shape, dtype and device, and these layers."""
    alike: dict[object, list[LayerKV]] = {}
    for kv in layers:
        dim = max(kv.key_dim, kv.value_dim)
        alike.setdefault((kv.num_kv_heads, dim, kv.dtype, kv.device), []).append(kv)
    specs = []
    for members in alike.values():
        kv = members[0]
        dtype = str(kv.dtype).removeprefix("torch.")
        if dtype not in ("float32", "bfloat16", "float16"):
            raise SpecError(f"model: expected K and V in float32, bfloat16 or float16, got {dtype}")
        dim = max(kv.key_dim, kv.value_dim)
        specs.append(
            (KVCacheSpec.uniform(len(members), kv.num_kv_heads, dim, dtype, block_size, layout), members)
        )
    return specs
