"""BlockPool: all pages and the index over them, behind one lock; here, requests. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pagedkv import _core
from pagedkv.checks import (
    check_bool,
    check_bytes,
    check_int,
    check_ordered,
    show,
)
from pagedkv.errors import UsageError
from pagedkv.extras import AnyExtra
from pagedkv.hashing import as_tokens, digests_are_broken
from pagedkv.pool_matching import Match as Match  # a name of this module
from pagedkv.pool_steps import PoolSteps
from pagedkv.retention import (
    Breakpoint,
    Retention,
    check_breakpoints,
    encode_retention,
    first_unpublished,
)
from pagedkv.sequence import (
    Fence,
    Sequence,
    core_fence,
    core_sequences,
)
from pagedkv.spec import (
    MAX_BLOCK_SIZE,
    MAX_GROUPS,
    MAX_WINDOW,
    blocks_by_group,
    check_windows,
)

_NOTHING: tuple[()] = ()

POLICIES: tuple[str, ...] = _core.POLICIES
"""The names of the eviction policies; docs/concepts/eviction.md says what each does."""

_SEED = hash("the shape of the tree") % 2**64
"""Random in every process, as Python's hashes of text are; the same in all with PYTHONHASHSEED=0."""


class BlockPool(PoolSteps):
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
        True: changes of the index are kept until `take_events` is called, up to the number stated there.
    clock : "monotonic" or "manual"
        Whether time passes by itself, or only by `advance`: for tests and simulations.
    policy : str
        Which page is evicted next, one of `POLICIES`. All of them honour priorities and evict a block after
        those that follow it. Groups with windows go by "lru" in any case.
    equal_cost_tokens : int, optional
        How far into a prompt attention to what precedes a token costs as much as all other work on it: some
        30,000 for a model of 8 billion parameters. "hazard" and "gdsf" prefer to keep blocks that cost more
        to compute again; 0: all cost the same. By default 0 for "hazard" and 32,768 for "gdsf"; the other
        policies count no costs.
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
        equal_cost_tokens: int | None = None,
        windows: Iterable[int | None] = (None,),
    ) -> None:
        if not isinstance(clock, str) or clock not in ("monotonic", "manual"):
            raise UsageError(f'clock: expected "monotonic" or "manual", got {show(clock)}')
        if not isinstance(policy, str) or policy not in POLICIES:
            raise UsageError(f"policy: expected one of {', '.join(POLICIES)}, got {show(policy)}")
        self.policy = policy
        self.equal_cost_tokens = equal_cost_tokens
        if equal_cost_tokens is not None:
            self.equal_cost_tokens = check_int("equal_cost_tokens", equal_cost_tokens, 0, 2**32 - 1)
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
            self.equal_cost_tokens,
        )

    # ------------------------------------------------------------------ one request

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
