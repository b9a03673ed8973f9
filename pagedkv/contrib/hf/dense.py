"""K and V of a batch as models have them, one tensor a layer: gathered from pages once and then kept up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.contrib.hf.store import PageStore

Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""A row's pages, and which of its columns hold a token, in the order of the pages."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""K and V."""
SPARE_COLUMNS = 64


class DenseView:
    """For attention that wants ``[batch, num_kv_heads, num_columns, head_dim]``: eager, sdpa, flash, flex.

    A column is a place in the padded batch. Padding holds zeros.

    Parameters
    ----------
    store : PageStore
    """

    def __init__(self, store: PageStore) -> None:
        self.store = store
        self._buffers: dict[int, Pair] = {}
        self._filled: dict[int, int] = {}

    def extend(
        self,
        layer: int,
        states: Pair,
        past: int,
        rows: Sequence[Row],
        begin: int,
    ) -> Pair:
        """Put a layer's new K and V behind the `past` columns and return all from column `begin` on.

        The pages are read when what is kept from the last call does not reach to `past`.

        Parameters
        ----------
        layer : int
        states : K and V, Tensor [batch, num_kv_heads, length, head_dim] each
        past : int
        rows : one Row for each of the batch, of at least `past` columns
        begin : int

        Returns
        -------
        K and V, Tensor [batch, num_kv_heads, past + length − begin, head_dim]
            Views, valid until the next call.
        """
        if past == 0:
            return states  # the pages have them too, for whoever comes next
        end = past + states[0].shape[2]
        buffers = self._buffers.get(layer)
        if buffers is None or self._filled[layer] < past or len(rows) != len(buffers[0]):
            buffers = self._room(states, past, rows, end)
            self.gather(layer, past, rows, buffers)
        elif buffers[0].shape[2] < end:
            old, buffers = buffers, self._room(states, past, rows, end)
            for source, into in zip(old, buffers, strict=True):
                into[:, :, :past] = source[:, :, :past]
        keys, values = buffers
        keys.narrow(2, past, end - past).copy_(states[0])
        values.narrow(2, past, end - past).copy_(states[1])
        self._buffers[layer], self._filled[layer] = buffers, end
        return keys.narrow(2, begin, end - begin), values.narrow(2, begin, end - begin)

    def gather(self, layer: int, past: int, rows: Sequence[Row], into: Pair) -> None:
        """Read the first `past` columns of a layer out of the pages."""
        keys, values = into
        for i, (block_ids, is_token) in enumerate(rows):
            columns = np.flatnonzero(is_token[:past])
            if not len(columns):
                continue
            first, num_tokens = int(columns[0]), len(columns)
            num_blocks = -(-num_tokens // self.store.block_size)
            ids = torch.from_numpy(block_ids[:num_blocks].astype(np.int64)).to(keys.device)
            if first + num_tokens == columns[-1] + 1:
                self.store.read(layer, ids, num_tokens, (keys[i, :, first:], values[i, :, first:]))
            else:  # padding between the prompt and what was generated
                found = tuple(x.new_empty(x.shape[1], num_tokens, x.shape[3]) for x in into)
                self.store.read(layer, ids, num_tokens, (found[0], found[1]))
                places = torch.from_numpy(columns).to(keys.device)
                keys[i, :, places], values[i, :, places] = found

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order."""
        for layer, buffers in self._buffers.items():
            keys, values = (buffer.index_select(0, rows.to(buffer.device)) for buffer in buffers)
            self._buffers[layer] = keys, values

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        return not self._buffers

    def forget(self, past: int = 0) -> None:
        """Forget what stands behind the first `past` columns."""
        self._filled = {layer: min(filled, past) for layer, filled in self._filled.items()}

    def _room(self, states: Pair, past: int, rows: Sequence[Row], end: int) -> Pair:
        room = end + end // 8 + SPARE_COLUMNS + self.store.block_size
        is_padded = not all(is_token[:past].all() for _, is_token in rows)
        keys, values = (
            (x.new_zeros if is_padded else x.new_empty)(*x.shape[:2], room, x.shape[3]) for x in states
        )
        return keys, values
