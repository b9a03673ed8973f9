"""What attention reads of one step, as tensors. The lowest module that imports torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from pagedkv.errors import StateError, UsageError
from pagedkv.sequence import Step, StepTables


class SharedPrefixes(NamedTuple):
    """Which rows of a block table hold the same pages, so that attention reads these once for all of them.

    Attributes
    ----------
    groups : Tensor [num_groups, 4] int32
        ``(rows_begin, rows_end, first_block, last_block)``: the sequences ``rows[rows_begin:rows_end]`` have
        the same pages in the columns ``[first_block, last_block)``. No column of a sequence is in two groups.
    rows : Tensor [num_rows] int32
        Rows of the block table; the groups of one row may count in the same part of it.
    """

    groups: torch.Tensor
    rows: torch.Tensor


class BatchShape(NamedTuple):
    """Sizes that a step is padded to, so that a graph captured with one step fits the next.

    Attributes
    ----------
    num_seqs : int
        Rows behind the step's own have length 0 and no token.
    num_tokens : int
        Tokens behind the step's own have position 0, token id 0 and slot −1.
    max_blocks : int
        Columns of the block table.
    """

    num_seqs: int
    num_tokens: int
    max_blocks: int


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """One step's tables on the device.

    Row i is the i-th sequence of the step. Field names are vLLM's; `csr` gives FlashInfer's.

    Attributes
    ----------
    block_table : Tensor [num_seqs, max_blocks] int32
        Pages in token order, padded with −1.
    slot_mapping : Tensor [num_tokens] int64
        Where each token's K/V goes: ``block_id · block_size + offset``. −1: nowhere, it is there already.
    seq_lens : Tensor [num_seqs] int32
        Tokens that the sequence's last query sees, itself included.
    query_start_loc : Tensor [num_seqs + 1] int32
        Row i's tokens are ``[query_start_loc[i], query_start_loc[i + 1])``.
    positions, token_ids : Tensor [num_tokens] int64
        Of the tokens to compute.
    shared_prefixes : SharedPrefixes or None
        Pages that attention may read once for several sequences. None where there are none, and for a step of
        fixed shape, whose graph would not know of others.
    num_seqs, num_tokens : int
        Padding included.
    max_query_len, max_seq_len, block_size : int
    step : Step
        Kept alive by its metadata: its pages are given back when it ends.
    other_groups : tuple of AttentionMetadata
        Of a cache with several groups of layers, those of the second group, and so on; see `group`. They
        share all tensors but `block_table` and `slot_mapping`.
    """

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor
    shared_prefixes: SharedPrefixes | None
    num_seqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    block_size: int
    step: Step
    other_groups: tuple[AttentionMetadata, ...] = ()

    def group(self, group: int) -> AttentionMetadata:
        """Return what layers of a group need, as kernels take it; these metadata are the first group's.

        In front of a window the entries of its block table are −1.
        """
        return self.other_groups[group - 1] if group else self

    @classmethod
    def from_tables(cls, tables: StepTables, step: Step, device: torch.device) -> AttentionMetadata:
        """Move the arrays of :meth:`BlockPool.prepare` to `device`, in one copy.

        On the CPU the memory is shared, but for what the pool believes that it left there.
        """
        if device.type == "cpu":
            tensors = {
                name: torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)
                for name, array in _arrays(tables).items()
            }
        else:
            # Both from torch's caches, which know when the copy is over and the step's kernels have run.
            sizes = {name: array.shape for name, array in _arrays(tables).items()}
            staging = torch.empty(_num_bytes(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
            _fill(_views(staging, sizes), tables)
            tensors = _views(staging.to(device, non_blocking=True), sizes)
        return cls._of(tensors, tables, step)

    @classmethod
    def _of(cls, tensors: dict[str, torch.Tensor], tables: StepTables, step: Step) -> AttentionMetadata:
        first = cls(
            slot_mapping=tensors["slot_mapping"],
            positions=tensors["positions"],
            token_ids=tensors["token_ids"],
            block_table=tensors["block_table"],
            seq_lens=tensors["seq_lens"],
            query_start_loc=tensors["query_start_loc"],
            shared_prefixes=_shared_prefixes(tensors, ""),
            num_seqs=len(tensors["seq_lens"]),
            num_tokens=len(tensors["positions"]),
            max_query_len=int((tables.query_start_loc[1:] - tables.query_start_loc[:-1]).max()),
            max_seq_len=int(tables.seq_lens.max()),
            block_size=step.pool.block_size,
            step=step,
        )
        if not tables.other_groups:
            return first
        others = tuple(
            replace(
                first,
                block_table=tensors[f"block_table@{g}"],
                slot_mapping=tensors[f"slot_mapping@{g}"],
                shared_prefixes=_shared_prefixes(tensors, f"@{g}"),
            )
            for g in range(1, 1 + len(tables.other_groups))
        )
        return replace(first, other_groups=others)

    @property
    def last_token_index(self) -> torch.Tensor:
        """Row of each sequence's last token among the step's tokens, [num_seqs] int64."""
        return self.query_start_loc[1:].long() - 1

    def csr(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the page table as FlashInfer takes it; −1 in front of a window.

        Returns
        -------
        kv_indptr : Tensor [num_seqs + 1] int32
        kv_indices : Tensor [num_pages] int32
        kv_last_page_len : Tensor [num_seqs] int32
            From 1 to `block_size`; 0 for a row of length 0.
        """
        num_pages = (self.seq_lens + self.block_size - 1) // self.block_size
        kv_indptr = torch.zeros(self.num_seqs + 1, dtype=torch.int32, device=self.seq_lens.device)
        torch.cumsum(num_pages, 0, dtype=torch.int32, out=kv_indptr[1:])
        columns = torch.arange(self.block_table.shape[1], device=self.seq_lens.device)
        kv_indices = self.block_table[columns < num_pages[:, None]]
        return kv_indptr, kv_indices, self.seq_lens - (num_pages - 1).clamp(min=0) * self.block_size


class FixedTables:
    """Tables of one shape that stay at one address: a captured graph reads there what the next step is.

    Parameters
    ----------
    shape : BatchShape
    device : torch.device
    num_groups : int
    """

    def __init__(self, shape: BatchShape, device: torch.device, num_groups: int = 1) -> None:
        self.shape = shape
        others = range(1, num_groups)
        self._sizes: dict[str, tuple[int, ...]] = {
            "slot_mapping": (shape.num_tokens,),
            "positions": (shape.num_tokens,),
            "token_ids": (shape.num_tokens,),
            **{f"slot_mapping@{g}": (shape.num_tokens,) for g in others},
            "block_table": (shape.num_seqs, shape.max_blocks),
            "seq_lens": (shape.num_seqs,),
            "query_start_loc": (shape.num_seqs + 1,),
            **{f"block_table@{g}": (shape.num_seqs, shape.max_blocks) for g in others},
        }
        self._memory = torch.empty(_num_bytes(self._sizes), dtype=torch.uint8, device=device)
        self._tensors = _views(self._memory, self._sizes)
        self._step: Step | None = None

    def check(self, step: Step) -> None:
        """Check that a step fits, and that the last one needs its tables no more.

        Raises
        ------
        StateError, UsageError
        """
        last = self._step
        if last is not None and last is not step and last.state == "prepared":
            raise StateError(f"prepare: expected the last step of {self.shape} to have ended, got it open")
        sizes = len(step.sequences), step.num_tokens, step.max_blocks
        for name, most, size in zip(BatchShape._fields, self.shape, sizes, strict=True):
            if size > most:
                raise UsageError(f"prepare: expected shape.{name} of at least {size}, got {most}")

    def fill(self, tables: StepTables, step: Step) -> AttentionMetadata:
        """Write a step's tables and what they are padded with. Modifies what the last step was given."""
        self._step = step
        if self._memory.device.type == "cpu":
            _fill(self._tensors, tables)
        else:
            staging = torch.empty(self._memory.shape, dtype=torch.uint8, pin_memory=True)
            _fill(_views(staging, self._sizes), tables)
            self._memory.copy_(staging, non_blocking=True)
        return AttentionMetadata._of(dict(self._tensors), tables, step)


_INT64 = ("slot_mapping", "positions", "token_ids")
_INT32 = ("block_table", "seq_lens", "query_start_loc")
_PADDING = {"slot_mapping": -1, "block_table": -1, "positions": 0, "token_ids": 0, "seq_lens": 0}


def _arrays(tables: StepTables) -> dict[str, np.ndarray[Any, Any]]:
    """Return a step's arrays, those of 8 bytes first; "name@g" is what group g > 0 has of its own."""
    arrays = {name: getattr(tables, name) for name in _INT64}
    for g, other in enumerate(tables.other_groups, 1):
        arrays[f"slot_mapping@{g}"] = other.slot_mapping
    arrays |= {name: getattr(tables, name) for name in _INT32}
    if len(tables.prefix_groups):
        arrays |= {"prefix_groups": tables.prefix_groups, "prefix_rows": tables.prefix_rows}
    for g, other in enumerate(tables.other_groups, 1):
        arrays[f"block_table@{g}"] = other.block_table
        if len(other.prefix_groups):
            arrays |= {f"prefix_groups@{g}": other.prefix_groups, f"prefix_rows@{g}": other.prefix_rows}
    return arrays


def _shared_prefixes(tensors: dict[str, torch.Tensor], suffix: str) -> SharedPrefixes | None:
    groups, rows = tensors.get(f"prefix_groups{suffix}"), tensors.get(f"prefix_rows{suffix}")
    return None if groups is None or rows is None else SharedPrefixes(groups, rows)


def _kind(name: str) -> str:
    return name.partition("@")[0]


def _num_bytes(sizes: dict[str, tuple[int, ...]]) -> int:
    return sum(prod(size) * (8 if _kind(name) in _INT64 else 4) for name, size in sizes.items())


def _views(memory: torch.Tensor, sizes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Cut bytes into tables, those of 8 bytes an element first."""
    views, begin = {}, 0
    for name, size in sizes.items():
        end = begin + _num_bytes({name: size})
        views[name] = memory[begin:end].view(torch.int64 if _kind(name) in _INT64 else torch.int32).view(size)
        begin = end
    return views


def _fill(views: dict[str, torch.Tensor], tables: StepTables) -> None:
    arrays = _arrays(tables)
    for name, view in views.items():
        array, into, kind = arrays[name], view.numpy(), _kind(name)
        if into.shape != array.shape:
            # Behind the last row begins none: query_start_loc stays at its last entry.
            into.fill(_PADDING[kind] if kind in _PADDING else array[-1])
        into[tuple(map(slice, array.shape))] = array
