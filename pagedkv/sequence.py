"""One request's lengths and blocks, and one step's plan."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.checks import check_int, check_ordered, show
from pagedkv.errors import UsageError
from pagedkv.hashing import BlockHash
from pagedkv.retention import Breakpoint
from pagedkv.usage import Usage, prompt_usage

if TYPE_CHECKING:
    from pagedkv import _core
    from pagedkv.pool import BlockPool


class Sequence:
    """One request: its tokens, and references on the pages that hold their KV.

    Made by :meth:`BlockPool.open`. A context manager that closes; a sequence that is garbage-collected is
    closed too.

    ``num_cached_tokens ≤ num_computed_tokens ≤ num_tokens``, and the pages have room for
    `num_reserved_tokens`.
    """

    __slots__ = ("__weakref__", "_core", "breakpoints", "pool")

    def __init__(
        self, pool: BlockPool, core: _core.Sequence, breakpoints: tuple[Breakpoint, ...] = ()
    ) -> None:
        self.pool = pool
        self.breakpoints = breakpoints
        self._core = core

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and those appended since."""
        return self._core.num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose KV was found when the sequence was opened (or matched again after `preempt`)."""
        return self._core.num_cached_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that need no further computation."""
        return self._core.num_computed_tokens

    @property
    def num_uncached_tokens(self) -> int:
        """Tokens still to compute: ``num_tokens − num_computed_tokens``."""
        return self._core.num_uncached_tokens

    @property
    def num_committed_tokens(self) -> int:
        """Tokens in published blocks."""
        return self._core.num_committed_tokens

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens that the pages held have room for."""
        return self._core.num_reserved_tokens

    @property
    def num_releasable_blocks(self) -> int:
        """Pages that nobody else holds: what `preempt` or `close` would give now."""
        return self._core.num_releasable_blocks

    @property
    def usage(self) -> Usage:
        """What the prompt given to `open` cost; sums to its length. Final once the prompt is computed.

        Until then a write is what the breakpoints ask for. What was found and then lost again before any of
        it was of use counts as not found, and what a quota keeps unpublished as not written.
        """
        return prompt_usage(*self._core.prompt_counts(), self.breakpoints, self.pool.block_size)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._core.is_closed

    @property
    def is_preempted(self) -> bool:
        """Whether the pages were given up and the next `reserve` matches again."""
        return self._core.is_preempted

    @property
    def token_ids(self) -> npt.NDArray[np.uint32]:
        """A copy of the tokens, [num_tokens] uint32."""
        return self._core.token_ids()

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """A copy of the page table, [num_blocks] int32: the page of each block, in token order.

        Of the first group, if there are several. −1 in front of its window, if it has one.
        """
        return self._core.block_ids(0)

    def block_ids_of(self, group: int) -> npt.NDArray[np.int32]:
        """Copy the page table of a group, as `block_ids` is that of the first; −1 in front of its window."""
        return self._core.block_ids(check_int("group", group, 0, self.pool.num_groups - 1))

    @property
    def block_hashes(self) -> list[BlockHash]:
        """Digests of the whole blocks of `token_ids`; each is computed once, when first asked for."""
        return self._core.block_hashes()

    def append(self, token_ids: Any) -> None:
        """Add one token or several; see :meth:`BlockPool.append`."""
        self.pool.append(self, token_ids)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens; see :meth:`BlockPool.truncate`."""
        self.pool.truncate(self, num_tokens)

    def fork(self) -> Sequence:
        """Make a second sequence that shares all pages; see :meth:`BlockPool.fork`."""
        return self.pool.fork(self)

    def no_cache(self, position: int) -> None:
        """Never publish anything from `position` on; see :meth:`BlockPool.no_cache`."""
        self.pool.no_cache(self, position)

    def preempt(self) -> None:
        """Give up the pages, keep the tokens; see :meth:`BlockPool.preempt`."""
        self.pool.preempt(self)

    def close(self) -> None:
        """End the request; see :meth:`BlockPool.close`."""
        self._core.close()

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_closed:
            self.close()

    def __repr__(self) -> str:
        lengths = f"{self.num_cached_tokens} cached, {self.num_computed_tokens} computed"
        return f"<Sequence: {lengths} of {self.num_tokens} tokens{', closed' if self.is_closed else ''}>"


class Step:
    """What one step computes, and the pages it took for it.

    Made by :meth:`BlockPool.reserve`, ended by :meth:`BlockPool.commit` or :meth:`BlockPool.abandon`; a step
    that is garbage-collected is abandoned.

    Attributes
    ----------
    pool : BlockPool
    sequences : tuple of Sequence
        In the order of the call, which is the order of rows everywhere.
    """

    __slots__ = ("__weakref__", "_core", "pool", "sequences")

    def __init__(self, pool: BlockPool, sequences: tuple[Sequence, ...], core: _core.Step) -> None:
        self.pool = pool
        self.sequences = sequences
        self._core = core

    @property
    def state(self) -> str:
        """One of "reserved", "prepared", "committed", "abandoned"."""
        return self._core.state

    @property
    def num_new_tokens(self) -> list[int]:
        """Tokens that the step computes for each sequence."""
        return self._core.num_new_tokens()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes in all."""
        return self._core.num_tokens

    @property
    def max_blocks(self) -> int:
        """Columns of the step's block table."""
        return self._core.max_blocks

    @property
    def copies(self) -> list[tuple[int, int, int]]:
        """Page copies to run before anything reads or writes: (source, destination, tokens that count).

        Of the first group, if there are several.
        """
        return self._core.copies(0)

    def copies_of(self, group: int) -> list[tuple[int, int, int]]:
        """Page copies of a group, as `copies` are those of the first; every group copies the same blocks."""
        return self._core.copies(check_int("group", group, 0, self.pool.num_groups - 1))

    def __repr__(self) -> str:
        return f"<Step: {self._core.num_tokens} tokens of {len(self.sequences)} sequences, {self.state}>"


class Fence:
    """References on pages for as long as something outside the pool uses them.

    Made by :meth:`BlockPool.fence`. A context manager that releases; a fence that is garbage-collected is
    released too.
    """

    __slots__ = ("__weakref__", "_core", "pool")

    def __init__(self, pool: BlockPool, core: _core.Fence) -> None:
        self.pool = pool
        self._core = core

    @property
    def is_released(self) -> bool:
        """Whether `release` was called."""
        return self._core.is_released

    def release(self) -> None:
        """Give the references back; see :meth:`BlockPool.release`."""
        self.pool.release(self)

    def __enter__(self) -> Fence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_released:
            self.release()

    def __repr__(self) -> str:
        return f"<Fence: {self._core.num_blocks} blocks{', released' if self.is_released else ''}>"


class GroupTables(NamedTuple):
    """What each group of a step has of its own; see :class:`StepTables`."""

    block_table: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]
    copies: list[tuple[int, int, int]]
    prefix_groups: npt.NDArray[np.int32]
    prefix_rows: npt.NDArray[np.int32]


class StepTables(NamedTuple):
    """A step as arrays; see :meth:`BlockPool.prepare`.

    Of several groups, `block_table`, `slot_mapping`, `copies` and the prefix groups are those of the first.

    Attributes
    ----------
    block_table : ndarray [num_seqs, max_blocks] int32
        Pages in token order, padded with −1; −1 also in front of a window.
    slot_mapping : ndarray [num_tokens] int64
        Where each token's K/V goes, ``block_id · block_size + offset``; −1 where it is there already.
    seq_lens : ndarray [num_seqs] int32
        Tokens that the sequence's queries may see, their own included.
    query_start_loc : ndarray [num_seqs + 1] int32
        Row i's tokens are ``[query_start_loc[i], query_start_loc[i + 1])``.
    positions, token_ids : ndarray [num_tokens] int64
    copies : list of (source, destination, num_tokens)
        Pages to copy before anything reads or writes.
    prefix_groups : ndarray [num_groups, 4] int32
        (rows_begin, rows_end, first_block, last_block): the sequences
        ``prefix_rows[rows_begin:rows_end]``, two or more, hold the same pages in the columns
        ``[first_block, last_block)`` of the block table, so that attention can read these once. A page counts
        where it is whole and its K/V was there before the step: then every query of the row sees all of it.
        Exact: all is true, and what rows have in common from their first page on is all there, but for groups
        that would save no more than one piece (see `prefix_multiple` of `prepare`). Groups form
        trees: those of a row are ranges of columns one after the other, and the rows of a later one are among
        those of the earlier.
    prefix_rows : ndarray [k] int32
        Rows of the block table, each at most once.
    other_groups : tuple of GroupTables
        Those of the second group, and so on. Groups with windows have no prefix groups.
    """

    block_table: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int32]
    query_start_loc: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    copies: list[tuple[int, int, int]]
    prefix_groups: npt.NDArray[np.int32]
    prefix_rows: npt.NDArray[np.int32]
    other_groups: tuple[GroupTables, ...] = ()

    def group(self, group: int) -> GroupTables:
        """Return what a group has of its own."""
        if group > 0:
            return self.other_groups[group - 1]
        return GroupTables(
            self.block_table, self.slot_mapping, self.copies, self.prefix_groups, self.prefix_rows
        )


# What the pool's verbs take, checked and turned into what the core takes.


def core_sequences(verb: str, seqs: list[Sequence]) -> list[_core.Sequence]:
    """Return the core's handles of sequences; that they belong to the pool, the core checks."""
    seqs = seqs if isinstance(seqs, list) else list(check_ordered(f"{verb}: seqs", seqs))
    if not set(map(type, seqs)) <= {Sequence}:
        for seq in seqs:
            if not isinstance(seq, Sequence):
                raise UsageError(f"{verb}: expected a Sequence, got {show(seq)}")
    return [seq._core for seq in seqs]


def core_fence(verb: str, fence: Fence) -> _core.Fence:
    """Return the core's handle of a fence."""
    if not isinstance(fence, Fence):
        raise UsageError(f"{verb}: expected a Fence, got {show(fence)}")
    return fence._core


def core_step(verb: str, step: Step) -> _core.Step:
    """Return the core's handle of a step."""
    if not isinstance(step, Step):
        raise UsageError(f"{verb}: expected a Step, got {show(step)}")
    return step._core


def as_counts(verb: str, name: str, counts: int | Iterable[int], num_seqs: int) -> list[int]:
    """Return one count for each sequence, as int."""
    what = f"{verb}: {name}"
    numbers = list(check_ordered(what, counts))
    if len(numbers) != num_seqs:
        raise UsageError(f"{verb}: expected {name} for {num_seqs} sequences, got {len(numbers)}")
    if set(map(type, numbers)) == {int} and min(numbers) >= 0 and max(numbers) < 2**62:
        return numbers  # nearly always; to check them one by one takes longer than the step
    return [check_int(what, number, -(2**62), 2**62) for number in numbers]
