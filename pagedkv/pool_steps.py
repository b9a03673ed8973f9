"""How pages are taken, written and published: step by step, or for the caller's own use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from pagedkv import _core
from pagedkv.checks import check_bool, check_int, check_iterable, check_ordered
from pagedkv.pool_hints import PoolHints
from pagedkv.sequence import GroupTables, Sequence, Step, StepTables, as_counts, core_step
from pagedkv.spec import MAX_BLOCKS

if TYPE_CHECKING:
    from pagedkv.pool import BlockPool

SPLIT_TOKENS = _core.SPLIT_TOKENS
"""Tokens that the attention kernels compute as one, at absolute multiples of so many positions."""


class PoolSteps(PoolHints):
    """The part of :class:`BlockPool` that serves one step."""

    def reserve(self, seqs: Sequence | list[Sequence], num_new_tokens: int | Iterable[int]) -> Step:
        """Take the pages that the next tokens of all these sequences need, evicting if need be.

        All or nothing. When pages are short, cached runs that end inside a block are given up first: such a
        sequence computes a few tokens more, and its step still ends at the same token.

        Parameters
        ----------
        seqs : Sequence or list of Sequence
            Each once, none in an open step.
        num_new_tokens : int or iterable of int; for a list of sequences, one for each
            Tokens to compute for each, from 1 to its `num_uncached_tokens`. A preempted sequence first
            matches again, and then computes at most so many.

        Returns
        -------
        Step
            Open until `commit` or `abandon`.

        Raises
        ------
        OutOfBlocksError
            With ``.needed``, ``.free`` and ``.evictable``; nothing has changed.
        UsageError, StateError
        """
        pool = cast("BlockPool", self)
        if isinstance(seqs, Sequence):
            return Step(pool, (seqs,), self._core.reserve_one(seqs._core, num_new_tokens))
        if type(seqs) is not list:
            seqs = list(check_ordered("seqs", seqs))
        own = tuple(seqs)  # the caller's list may change while the counts are read
        return Step(pool, own, self._core.reserve(list(own), num_new_tokens))

    def prepare(
        self, step: Step, *, share_prefixes: bool = True, prefix_multiple: int = SPLIT_TOKENS
    ) -> StepTables:
        """Fill the arrays that attention and the writers read. The caller runs ``copies`` first.

        Modifies the step's state only. The arrays are true until the step ends, and the caller's to read for
        as long as he holds them or a tensor that shares their memory; then a later step writes what differs.

        Parameters
        ----------
        step : Step
        share_prefixes : bool
            False: don't look for rows that begin with the same pages.
        prefix_multiple : int
            What rows share is told in multiples of so many tokens, and of whole blocks. By default the
            tokens that this library's attention kernels compute as one; nothing less is of use to them.

        Raises
        ------
        StateError
            When the step has ended.
        UsageError
        """
        core = core_step("prepare", step)
        if prefix_multiple is not SPLIT_TOKENS:
            prefix_multiple = check_int("prefix_multiple", prefix_multiple, 1, 2**31 - 1)
        multiple = prefix_multiple if check_bool("share_prefixes", share_prefixes) else 0
        *tables, groups, rows, others = self._core.prepare(core, multiple)
        if others:
            others = tuple(
                GroupTables(table, slots, core.copies(g), *prefixes)
                for g, (table, slots, *prefixes) in enumerate(others, 1)
            )
        return StepTables._make((*tables, core.copies(0), groups, rows, others))

    def commit(self, step: Step, num_accepted: int | Iterable[int] | None = None) -> None:
        """End a step whose K/V was written: its tokens count as computed, and full blocks are published.

        Parameters
        ----------
        step : Step
        num_accepted : int or iterable of int, optional
            How many of the step's tokens hold for each sequence; the rest is cut off and never published.
            None: all.

        Raises
        ------
        StateError
            When the step has ended.
        UsageError
            For a count outside ``0 … num_new_tokens``.
        """
        core = step._core if type(step) is Step else core_step("commit", step)
        counts = None
        if num_accepted is not None:
            if len(step.sequences) == 1 and not isinstance(num_accepted, Iterable):
                num_accepted = [num_accepted]
            counts = as_counts("commit", "num_accepted", num_accepted, len(step.sequences))
        self._core.commit(core, counts)

    def abandon(self, step: Step) -> None:
        """End a step as if it had not been reserved.

        Evictions, and cached runs given up for the step, are not undone; what a preempted sequence had
        matched counts as used now.

        Raises
        ------
        StateError
            When the step has ended.
        """
        self._core.abandon(core_step("abandon", step))

    # ------------------------------------------------------------------ pages

    def allocate(self, num_blocks: int, *, group: int = 0) -> npt.NDArray[np.int32]:
        """Take pages of a group for the caller's own use, evicting if need be. They are never published.

        Returns
        -------
        ndarray [num_blocks] int32
            Held until `free`.

        Raises
        ------
        OutOfBlocksError, UsageError
        """
        group = check_int("group", group, 0, self.num_groups - 1)
        return self._core.allocate(check_int("num_blocks", num_blocks, 0, MAX_BLOCKS), group)

    def free(self, block_ids: Iterable[int], *, group: int = 0) -> None:
        """Give back pages of `allocate`.

        Raises
        ------
        StateError
            For a page that is not held through `allocate`, or is listed twice.
        UsageError
            For an id outside the pool.
        """
        ids = check_iterable("block_ids", block_ids)
        group = check_int("group", group, 0, self.num_groups - 1)
        most = self.num_blocks_by_group[group] - 1
        self._core.free([check_int("block_ids", i, 0, most) for i in ids], group)
