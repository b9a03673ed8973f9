"""One forward pass of a model over a session: where its tokens' K and V go, and what attention reads."""

from __future__ import annotations

from contextvars import ContextVar
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagedkv import ops
from pagedkv.batch import SharedPrefixes
from pagedkv.contrib.hf.dense import DenseView, Row
from pagedkv.contrib.hf.store import PageStore, tokens_of
from pagedkv.errors import StateError
from pagedkv.sequence import Sequence, Step, StepTables

MAX_HEAD_DIM = 256
"""Of the attention kernels; layers with more have their pages gathered."""
Tables = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]


class Plan(NamedTuple):
    """What attention over pages is told of the batch, the same in every layer.

    Attributes
    ----------
    places : Tensor or None
        Which of the last columns, row by row, hold a token; None when all do.
    block_table, seq_lens, query_start_loc : Tensor
    shared_prefixes : SharedPrefixes or None
    """

    places: torch.Tensor | None
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    shared_prefixes: SharedPrefixes | None


current_forward: ContextVar[Forward | None] = ContextVar("pagedkv_forward", default=None)
"""The pass that is running, for attention, which is handed tensors and no cache."""
heard_keys: ContextVar[list[torch.Tensor] | None] = ContextVar("pagedkv_heard_keys", default=None)
"""While a model is probed: the K that its layers hand to attention."""


class Forward:
    """What is the same in all layers of one pass.

    Parameters
    ----------
    store : PageStore
    view : DenseView
    rows : list of Sequence
        One for each row of the batch; rows that hold the same tokens may share one.
    is_token : ndarray [batch, past + length] bool
        Whether a column holds a token, or padding.
    past : int
        Columns that earlier passes had.
    step : Step or None
        What the pass computes; None when all of it is cached.
    tables : StepTables or None
        Of the step.
    in_place : bool
        Whether attention reads the pages.
    """

    def __init__(
        self,
        store: PageStore,
        view: DenseView,
        rows: list[Sequence],
        is_token: npt.NDArray[np.bool_],
        past: int,
        step: Step | None,
        tables: StepTables | None,
        in_place: bool,
    ) -> None:
        self.store, self.view, self.rows, self.is_token, self.past = store, view, rows, is_token, past
        self.step, self.tables, self.in_place = step, tables, in_place
        self.length = is_token.shape[1] - past
        # The K of layers whose attention will read pages, to know it again by, in layers that share it too.
        self._keys: dict[int, tuple[torch.Tensor, int]] = {}
        self.updated: set[int] = set()
        self._slots: dict[torch.device, torch.Tensor] = {}
        self._plans: dict[tuple[int, torch.device], Plan] = {}
        fits = step is not None and step.sequences == tuple(rows)
        self._is_plain = bool(
            fits and tables is not None and len(tables.positions) == is_token[:, past:].size
        )

    def update(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's K and V into its pages; return what the model hands to attention."""
        kv = self.store.layers[layer]
        if layer in self.updated:
            raise StateError(
                f"update: expected one of layer {layer} in a pass, got another: the pass before was "
                "interrupted, and the session with it; make a new one"
            )
        self.updated.add(layer)
        if self.step is not None:
            slots = self._slots.get(key.device)
            if slots is None:
                slots = self._slots[key.device] = as_tensor(self.slots, key.device)
            self.store.write(layer, key, value, slots)
        if self.in_place and max(kv.key_dim, kv.value_dim) <= MAX_HEAD_DIM:
            self._keys[id(key)] = key, layer
            return key, value
        begin = 0 if kv.window is None else max(self.past - kv.window + 1, 0)
        return self.view.extend(layer, (key, value), self.past, self.pages_of_rows, begin)

    def layer_of(self, key: torch.Tensor) -> int | None:
        """Return the layer whose K in pages a tensor stands for; None when it is all the K there is."""
        found = self._keys.get(id(key))
        return None if found is None or found[0] is not key else found[1]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float | None,
        window: int | None,
        soft_cap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend to a layer's pages.

        Parameters
        ----------
        query : Tensor [batch, num_heads, length, key_dim]
        scale, window, soft_cap, sinks
            As for :func:`pagedkv.ops.paged_attention`.

        Returns
        -------
        Tensor [batch, length, num_heads, value_dim]
            Zeros for padding.
        """
        kv, (key_pages, value_pages) = self.store.layers[layer], self.store[layer]
        batch, num_heads, length, dim = query.shape
        if dim != key_pages.shape[3]:
            scale = dim**-0.5 if scale is None else scale
            query = torch.nn.functional.pad(query, (0, key_pages.shape[3] - dim))
        tokens = every = tokens_of(query)
        plan = self._plans.get((length, query.device))
        if plan is None:
            plan = self._plans[length, query.device] = self._plan(length, query.device)
        if plan.places is not None:
            tokens = every[plan.places]
        attended = ops.paged_attention(
            tokens,
            key_pages,
            value_pages,
            plan.block_table,
            plan.seq_lens,
            plan.query_start_loc,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=None if sinks is None else sinks.detach().float().reshape(-1),
            shared_prefixes=plan.shared_prefixes,
            backend=self.store.backend,
        )
        if plan.places is not None:
            attended = torch.zeros_like(every).index_copy_(0, plan.places, attended)
        attended = attended.view(batch, length, num_heads, attended.shape[2])
        return attended if kv.value_dim == attended.shape[3] else attended[..., : kv.value_dim]

    def gather(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all K and V of a layer that was written, ``[batch, num_kv_heads, columns, head_dim]``."""
        kv, pages = self.store.layers[layer], self.store[layer][0]
        room = self.is_token.shape[1] + self.store.block_size
        sizes = [(len(self.rows), kv.num_kv_heads, room, dim) for dim in (kv.key_dim, kv.value_dim)]
        keys, values = (pages.new_zeros(size) for size in sizes)
        end = self.is_token.shape[1]
        self.view.gather(layer, end, self.pages_of_rows, (keys, values))
        return keys[:, :, :end], values[:, :, :end]

    def mask(self, length: int, window: int | None, device: torch.device) -> torch.Tensor:
        """Return which columns each of the last `length` sees, ``[batch, 1, length, columns]`` bool."""
        columns = torch.arange(self.is_token.shape[1], device=device)
        queries = columns[-length:, None]
        sees = columns <= queries
        if window is not None:
            sees &= columns > queries - window
        return sees & torch.from_numpy(self.is_token).to(device)[:, None, None, :]

    @cached_property
    def pages_of_rows(self) -> list[Row]:
        """Pages and columns of each row."""
        return [(seq.block_ids, is_token) for seq, is_token in zip(self.rows, self.is_token, strict=True)]

    @cached_property
    def slots(self) -> npt.NDArray[np.int64]:
        """Slot of each new column, row by row; −1 for padding and for what is cached already."""
        assert self.step is not None
        assert self.tables is not None
        if self._is_plain:
            return self.tables.slot_mapping
        slots = np.full((len(self.rows), self.length), -1, dtype=np.int64)
        starts = self.tables.query_start_loc
        for i, seq in enumerate(self.step.sequences):
            row = self.rows.index(seq)  # the first that holds these tokens writes them
            columns = np.flatnonzero(self.is_token[row, self.past :])
            slots[row, columns[len(columns) - (starts[i + 1] - starts[i]) :]] = self.tables.slot_mapping[
                starts[i] : starts[i + 1]
            ]
        return slots.reshape(-1)

    def _plan(self, length: int, device: torch.device) -> Plan:
        """Return what attention is told, for queries of the rows' last `length` columns.

        Some models compute no more than the last token in layers that only read others' K and V.
        """
        new = self.is_token[:, -length:]
        places = None if new.all() else as_tensor(np.flatnonzero(new), device)
        is_plain = self._is_plain and self.tables is not None and length == self.length
        shared = None
        if is_plain and self.tables is not None:
            tables = self.tables.block_table, self.tables.seq_lens, self.tables.query_start_loc
        else:
            tables = self._tables_of(length)
        if self._is_plain and self.tables is not None and len(self.tables.prefix_groups):
            groups, rows = self.tables.prefix_groups, self.tables.prefix_rows
            shared = SharedPrefixes(as_tensor(groups, device), as_tensor(rows, device))
        table, lens, starts = (as_tensor(array, device) for array in tables)
        return Plan(places, table, lens, starts, shared)

    def _tables_of(self, length: int) -> Tables:
        ids = [seq.block_ids for seq in self.rows]
        table = np.full((len(ids), max(map(len, ids))), -1, dtype=np.int32)
        for row, own in zip(table, ids, strict=True):
            row[: len(own)] = own
        starts = np.zeros(len(ids) + 1, dtype=np.int32)
        np.cumsum(self.is_token[:, -length:].sum(1), out=starts[1:])
        # A row of padding alone has no query yet, and maybe no page.
        lens = np.where(np.diff(starts) > 0, self.is_token.sum(1), 0).astype(np.int32)
        return table, lens, starts


def as_tensor(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Return an array of a step on a device."""
    # The pool may write where its arrays are read-only to us, but not before the step ends.
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)
