"""BlockPool: all pages and the index over them, behind one lock. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv import _core
from pagedkv.checks import (
    check_bool,
    check_bytes,
    check_int,
    check_iterable,
    check_ordered,
    one_for_each,
    show,
)
from pagedkv.errors import UsageError
from pagedkv.extras import AnyExtra
from pagedkv.hashing import as_tokens, digests_are_broken
from pagedkv.pool_admin import PoolAdmin
from pagedkv.retention import (
    RETAINED_PRIORITY,
    Breakpoint,
    Retention,
    check_breakpoints,
    encode_retention,
    first_unpublished,
    retained_blocks,
)
from pagedkv.sequence import (
    Fence,
    GroupTables,
    Sequence,
    Step,
    StepTables,
    as_counts,
    core_fence,
    core_sequences,
    core_step,
)
from pagedkv.spec import (
    MAX_BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_GROUPS,
    MAX_WINDOW,
    blocks_by_group,
    check_windows,
)

_NOTHING: tuple[()] = ()

SPLIT_TOKENS = _core.SPLIT_TOKENS
"""Tokens that the attention kernels compute as one, at absolute multiples of so many positions."""

POLICIES: tuple[str, ...] = _core.POLICIES
"""The names of the eviction policies; docs/concepts/eviction.md says what each does."""

_SEED = hash("the shape of the tree") % 2**64
"""Random in every process, as Python's hashes of text are; the same in all with PYTHONHASHSEED=0."""


class Match(NamedTuple):
    """What the index holds of a prompt, at the moment of the call.

    Attributes
    ----------
    num_block_tokens : int
        Tokens of the whole blocks that match.
    num_partial_tokens : int
        Tokens after these, fewer than a block, that some cached block begins with.
    block_ids : ndarray [num_block_tokens // block_size] int32
        A page of each matched block, −1 in front of a window. Not referenced: it may be evicted by any
        later call.
    partial_block_id : int
        The page that begins with the partial tokens; −1 when there are none.
    """

    num_block_tokens: int
    num_partial_tokens: int
    block_ids: npt.NDArray[np.int32]
    partial_block_id: int

    @property
    def num_tokens(self) -> int:
        """All tokens that match."""
        return self.num_block_tokens + self.num_partial_tokens


class BlockPool(PoolAdmin):
    """Pages, what they hold, who uses them, and which goes next.

    Safe to call from many threads. A call that raises has changed nothing. Pages are evicted only inside
    `reserve`, `allocate` and `evict`, in the order of `policy`: by default that of their last release,
    the deepest block of a path first.

    Parameters
    ----------
    num_blocks : int, or iterable of int
        Pages, at least 1: of every group, or of each.
    block_size : int
        Tokens in a block.
    namespace : bytes
        What all the KV depends on: model and revision, dtype, layout, quantisation. Enters every digest.
    prefix_caching : bool
        False: nothing is found and nothing is published.
    token_granular : bool
        False: only whole blocks are reused.
    events : bool
        True: changes of the index are kept until `take_events` is called, however many they are.
    clock : "monotonic" or "manual"
        Whether time passes by itself, or only by `advance`: for tests and simulations.
    policy : str
        Which page is evicted next, one of `POLICIES`. All of them honour priorities and evict a block after
        those that follow it. Groups with windows go by "lru" in any case.
    windows : iterable of int or None
        One for each group of layers: the tokens that its attention sees, the query's own included; None: all.
        Those without a window come first. Each group has pages and tables of its own, and a block is found
        where every group has the pages that attention will read; docs/concepts/blocks.md has the rules.

    Raises
    ------
    UsageError

    Attributes
    ----------
    num_blocks : int
        Pages of the first group, which all verbs mean that don't name another one.
    num_blocks_by_group : tuple of int
    windows : tuple of int or None
    """

    def __init__(
        self,
        num_blocks: int | Iterable[int],
        *,
        block_size: int = 16,
        namespace: bytes = b"",
        prefix_caching: bool = True,
        token_granular: bool = True,
        events: bool = False,
        clock: Literal["monotonic", "manual"] = "monotonic",
        policy: str = "lru",
        windows: Iterable[int | None] = (None,),
    ) -> None:
        if not isinstance(clock, str) or clock not in ("monotonic", "manual"):
            raise UsageError(f'clock: expected "monotonic" or "manual", got {show(clock)}')
        if not isinstance(policy, str) or policy not in POLICIES:
            raise UsageError(f"policy: expected one of {', '.join(POLICIES)}, got {show(policy)}")
        self.policy = policy
        self.windows = _windows(windows)
        self.num_blocks_by_group = blocks_by_group(num_blocks, len(self.windows))
        self.num_blocks = self.num_blocks_by_group[0]
        self.block_size = check_int("block_size", block_size, 1, MAX_BLOCK_SIZE)
        self.namespace = check_bytes("namespace", namespace, 0, 2**32 - 1)
        self.prefix_caching = check_bool("prefix_caching", prefix_caching)
        self.token_granular = check_bool("token_granular", token_granular)
        self.events = check_bool("events", events)
        self._core = _core.BlockPool.make(
            self.num_blocks_by_group,
            [window or 0 for window in self.windows],
            self.block_size,
            self.namespace,
            self.prefix_caching,
            self.token_granular,
            self.events,
            clock == "manual",
            digests_are_broken(),
            _SEED,
            policy,
        )

    # ------------------------------------------------------------------ one request

    def match(
        self,
        token_ids: Any,
        *,
        cache_salt: str | bytes | None = None,
        salt_from: int | None = None,
        extras: Iterable[AnyExtra] | None = (),
    ) -> Match:
        """Say how much of a prompt is cached. Modifies nothing and references nothing.

        Not capped: a prompt that is all there matches whole, although `open` will leave its last token to
        compute.

        Parameters
        ----------
        token_ids : array or iterable of int, [num_tokens]
            Each from 0 to 2³² − 1. An empty prompt matches nothing.
        cache_salt : str or bytes, optional
            1 to 128 bytes that keep one tenant's blocks apart from all others'.
        salt_from : int, optional
            Position at which the salt enters, rounded down to a block start. What is before it is shared by
            all tenants, such as a public system prompt.
        extras : iterable of Adapter, Media, Embeddings, Extra
            What else the KV depends on.
        """
        return Match(*self._core.match(token_ids, cache_salt, salt_from, extras))

    def match_lengths(
        self,
        prompts: Iterable[Any],
        *,
        cache_salts: Iterable[str | bytes | None] | None = None,
        salt_from: int | None = None,
        extras: Iterable[Iterable[AnyExtra] | None] | None = None,
    ) -> npt.NDArray[np.int64]:
        """Say how many tokens of each prompt are cached, in one call: to order a waiting queue.

        Modifies nothing and references nothing. Other calls may come in between two prompts.

        Parameters
        ----------
        prompts : iterable of token ids
        cache_salts, extras : iterable, optional
            One salt, and one list of extras, for each prompt; by default none has any.
        salt_from : int, optional
            Where every salt enters.

        Returns
        -------
        ndarray [num_prompts] int64
            `Match.num_tokens` of each.
        """
        prompts = list(check_ordered("prompts", prompts))
        if cache_salts is None and salt_from is not None:
            raise UsageError(f"salt_from: expected cache_salts with it, got {show(salt_from)} and no salts")
        salts = None if cache_salts is None else one_for_each("cache_salts", cache_salts, len(prompts))
        extras_of = None if extras is None else one_for_each("extras", extras, len(prompts))
        return self._core.match_lengths(prompts, salts, salt_from, extras_of)

    def touch(
        self,
        token_ids: Any,
        *,
        cache_salt: str | bytes | None = None,
        salt_from: int | None = None,
        extras: Iterable[AnyExtra] | None = (),
    ) -> int:
        """Count a prompt's cached blocks as used now, so that they are evicted later; for requests that wait.

        Returns
        -------
        int
            Tokens of the blocks touched.
        """
        return self._core.touch(token_ids, cache_salt, salt_from, extras)

    def open(
        self,
        token_ids: Any,
        *,
        cache_salt: str | bytes | None = None,
        salt_from: int | None = None,
        extras: Iterable[AnyExtra] | None = (),
        retention: Iterable[Retention] | None = (),
        breakpoints: Iterable[Breakpoint] | None = (),
        no_cache: Iterable[tuple[int, int]] | None = (),
        reuse: bool = True,
    ) -> Sequence:
        """Begin a request: find its longest cached prefix and reference those pages.

        Evicts nothing and takes no page. At most ``num_tokens − 1`` tokens count as cached, since the last
        one must be computed for its logits; if its block is cached whole, that page is shared all the same.

        Parameters
        ----------
        token_ids, cache_salt, salt_from, extras
            As for `match`; at least one token.
        retention : iterable of Retention
            How long to keep the blocks that the request hits, and those that it publishes later.
        breakpoints : iterable of Breakpoint
            At most 4, in the order of the prompt, longer times first. See also `Sequence.usage`.
        no_cache : iterable of (start, end)
            Ranges of tokens that are never published, such as reasoning or secrets. Publication ends before
            the block that holds the first of them; what others published may still be read.
        reuse : bool
            False finds nothing, so that every token is computed, as log-probabilities of a prompt need; what
            is computed is published all the same. The statistics don't count its tokens as looked up. If it
            is preempted, what it or others have published is found after all.

        Raises
        ------
        UsageError
            For an empty prompt, a bad token, a bad salt, and so on for what else is asked for.
        """
        if retention is _NOTHING and breakpoints is _NOTHING and no_cache is _NOTHING:  # nearly always
            core = self._core.open(token_ids, cache_salt, salt_from, extras, None, None, reuse)
            return Sequence(self, core)
        tokens = as_tokens(token_ids)
        points = check_breakpoints(len(tokens), breakpoints)
        kept = encode_retention(len(tokens), self.block_size, retention, points)
        end = first_unpublished(no_cache)
        core = self._core.open(tokens, cache_salt, salt_from, extras, kept, end, reuse)
        return Sequence(self, core, tuple(points))

    def retain(
        self,
        token_ids: Any,
        *,
        priority: int = RETAINED_PRIORITY,
        ttl_s: float | None = None,
        start: int = 0,
        end: int | None = None,
        cache_salt: str | bytes | None = None,
        salt_from: int | None = None,
        extras: Iterable[AnyExtra] | None = (),
    ) -> int:
        """Keep what is cached of a prompt for longer; also counts as a use, as `touch` does.

        Soft: it orders eviction and gives way when nothing of a lower priority is left. Never lowers a
        priority nor shortens a time.

        Parameters
        ----------
        token_ids, cache_salt, salt_from, extras
            As for `match`.
        priority, ttl_s, start, end
            As for `Retention`; ``ttl_s`` counts from now.

        Returns
        -------
        int
            Tokens of the whole blocks that are cached and hold a token of the range. What comes before them
            is kept for as long as they are.
        """
        blocks = retained_blocks(Retention(start, end, priority, ttl_s), self.block_size, "retain")
        return self._core.retain(token_ids, cache_salt, salt_from, extras, blocks)

    def append(self, seqs: Sequence | list[Sequence], token_ids: Any) -> None:
        """Add tokens at the end of each sequence; they are computed by later steps.

        Parameters
        ----------
        seqs : Sequence or list of Sequence
        token_ids : int or iterable of int; for a list of sequences, one of these for each

        Raises
        ------
        UsageError, StateError
            The latter for a closed sequence, or one whose step is still open.
        """
        if isinstance(seqs, Sequence):
            seqs, token_ids = [seqs], [token_ids]
        if hasattr(token_ids, "__array__"):
            token_ids = as_tokens(token_ids)
        elif type(token_ids) is not list:
            token_ids = list(check_ordered("token_ids", token_ids))
        if self._core.append_each(seqs, token_ids):
            return  # nearly always: one token for each
        cores = core_sequences("append", seqs)
        several = [[t] if isinstance(t, int) or getattr(t, "ndim", 1) == 0 else t for t in token_ids]
        self._core.append(cores, [as_tokens(t, f"token_ids[{i}]") for i, t in enumerate(several)])

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and release the pages beyond them.

        Published blocks stay matchable. A page that is now used in part, and is shared, is copied by the next
        `reserve` before anything is written behind the cut.

        Raises
        ------
        UsageError, StateError
            The former unless ``0 ≤ num_tokens ≤ seq.num_tokens``.
        """
        [core] = core_sequences("truncate", [seq])
        self._core.truncate(core, check_int("truncate: num_tokens", num_tokens, 0, seq.num_tokens))

    def fork(self, seq: Sequence) -> Sequence:
        """Make a second sequence with the same tokens and the same pages, for another sample or beam.

        Every page is shared; whichever of the two first writes into a partly filled one gets its own copy,
        inside `reserve`. Not counted as a prompt.

        Raises
        ------
        StateError
            For a closed sequence, or one whose step is still open.
        """
        [core] = core_sequences("fork", [seq])
        return Sequence(self, self._core.fork(core), seq.breakpoints)

    def no_cache(self, seq: Sequence, position: int) -> None:
        """Never publish what the sequence holds from `position` on, such as reasoning or a secret.

        Publication ends before the block that holds the position. A `truncate` that removes the token there
        lifts the ban; tokens that `commit` rejects do not.

        Raises
        ------
        StateError
            When that block is published already; also for a closed sequence, or one whose step is still open.
        """
        [core] = core_sequences("no_cache", [seq])
        self._core.stop_publishing(core, check_int("no_cache: position", position, 0, 2**62))

    def preempt(self, seq: Sequence) -> None:
        """Give up the sequence's pages and keep its tokens; its next `reserve` matches them again first.

        Raises
        ------
        StateError
            For a closed sequence, or one whose step is still open.
        """
        [core] = core_sequences("preempt", [seq])
        self._core.preempt(core)

    def close(self, seqs: Sequence | list[Sequence]) -> None:
        """End one request or several: published pages become evictable, others free.

        Of several the pages of the first come first in the order of eviction, of each the deepest. While a
        step of a sequence is open, its pages are kept until that step ends; none of it is published.

        Raises
        ------
        StateError
            When one is closed already, or given twice; then none is closed by the call.
        """
        if type(seqs) is Sequence:  # nearly always
            self._core.close_one(seqs._core)
        else:
            seqs = list(seqs) if isinstance(seqs, list | tuple) else [seqs]
            self._core.close(core_sequences("close", seqs))

    def fence(self, seqs: Sequence | list[Sequence]) -> Fence:
        """Hold every page that the sequences have now, for a copy or a kernel that runs beside the pool.

        Until `Fence.release` none of these pages is evicted, freed or written by another owner, whatever
        becomes of the sequences; what is written next into a partly filled one goes to a copy.

        Raises
        ------
        StateError
            For a closed sequence.
        """
        cores = core_sequences("fence", [seqs] if isinstance(seqs, Sequence) else seqs)
        return Fence(self, self._core.fence(cores))

    def release(self, fence: Fence) -> None:
        """End a fence: pages that nobody else holds become evictable or free, the deepest first.

        Raises
        ------
        StateError
            When it was released already.
        """
        self._core.release(core_fence("release", fence))

    # ------------------------------------------------------------------ one step

    def reserve(self, seqs: Sequence | list[Sequence], num_new_tokens: int | Iterable[int]) -> Step:
        """Take the pages that the next tokens of all these sequences need, evicting if need be.

        All or nothing. When pages are short, cached runs that end inside a block are given up first: such a
        sequence computes a few tokens more, and its step still ends at the same token.

        Parameters
        ----------
        seqs : Sequence or list of Sequence
            Each once, none in an open step.
        num_new_tokens : int or iterable of int
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
        if isinstance(seqs, Sequence):
            return Step(self, (seqs,), self._core.reserve_one(seqs._core, num_new_tokens))
        if type(seqs) is not list:
            seqs = list(check_ordered("seqs", seqs))
        own = tuple(seqs)  # the caller's list may change while the counts are read
        return Step(self, own, self._core.reserve(list(own), num_new_tokens))

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

    def __repr__(self) -> str:
        s = self.stats()
        return f"<BlockPool: {s.num_free_blocks} free, {s.num_evictable_blocks} evictable of {s.num_blocks}>"


def _windows(windows: Iterable[int | None]) -> tuple[int | None, ...]:
    checked = tuple(
        None if window is None else check_int(f"windows[{i}]", window, 1, MAX_WINDOW)
        for i, window in enumerate(check_ordered("windows", windows))
    )
    if not 1 <= len(checked) <= MAX_GROUPS:
        raise UsageError(f"windows: expected 1 to {MAX_GROUPS} groups, got {len(checked)}")
    check_windows("windows", checked)
    return checked
