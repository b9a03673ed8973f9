"""BlockPool: all pages and the index over them, behind one lock. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv import _core
from pagedkv.checks import check_bytes, check_int, check_iterable, show
from pagedkv.errors import UsageError
from pagedkv.extras import AnyExtra, BlockExtras, encode_extras
from pagedkv.hashing import BlockHash, as_tokens
from pagedkv.sequence import Sequence, Step, StepTables
from pagedkv.spec import MAX_BLOCK_SIZE
from pagedkv.stats import CacheStats

MAX_BLOCKS = 2**31 - 1
"""Block ids are int32."""


class Match(NamedTuple):
    """What the index holds of a prompt, at the moment of the call.

    Attributes
    ----------
    num_block_tokens : int
        Tokens of the whole blocks that match.
    num_partial_tokens : int
        Tokens after these, fewer than a block, that some cached block begins with.
    block_ids : ndarray [num_block_tokens // block_size] int32
        A page of each matched block. Not referenced: it may be evicted by any later call.
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


class BlockPool:
    """Pages, what they hold, who uses them, and which goes next.

    Safe to call from many threads. A call that raises has changed nothing. Pages are evicted only inside
    `reserve`, `allocate` and `evict`, in the order of their last release, the deepest block of a path first.

    Parameters
    ----------
    num_blocks : int
        Pages, at least 1.
    block_size : int
        Tokens in a block.
    namespace : bytes
        What all the KV depends on: model and revision, dtype, layout, quantisation. Enters every digest.
    prefix_caching : bool
        False: nothing is found and nothing is published.
    token_granular : bool
        False: only whole blocks are reused.

    Raises
    ------
    UsageError
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int = 16,
        namespace: bytes = b"",
        prefix_caching: bool = True,
        token_granular: bool = True,
    ) -> None:
        self.num_blocks = check_int("num_blocks", num_blocks, 1, MAX_BLOCKS)
        self.block_size = check_int("block_size", block_size, 1, MAX_BLOCK_SIZE)
        self.namespace = check_bytes("namespace", namespace, 0, 2**32 - 1)
        self.prefix_caching = bool(prefix_caching)
        self.token_granular = bool(token_granular)
        self._core = _core.BlockPool.make(
            self.num_blocks, self.block_size, self.namespace, self.prefix_caching, self.token_granular
        )

    # ------------------------------------------------------------------ one request

    def match(
        self,
        token_ids: Any,
        *,
        cache_salt: str | bytes | None = None,
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
        extras : iterable of Adapter, Media, Embeddings, Extra
            What else the KV depends on.
        """
        tokens, encoded = self._encode(token_ids, cache_salt, extras)
        return Match(*self._core.match(tokens, encoded))

    def open(
        self,
        token_ids: Any,
        *,
        cache_salt: str | bytes | None = None,
        extras: Iterable[AnyExtra] | None = (),
    ) -> Sequence:
        """Begin a request: find its longest cached prefix and reference those pages.

        Evicts nothing and takes no page. At most ``num_tokens − 1`` tokens count as cached, since the last
        one must be computed for its logits; if its block is cached whole, that page is shared all the same.

        Parameters
        ----------
        token_ids, cache_salt, extras
            As for `match`; at least one token.

        Raises
        ------
        UsageError
            For an empty prompt, a bad token or a bad salt.
        """
        tokens, encoded = self._encode(token_ids, cache_salt, extras)
        return Sequence(self, self._core.open(tokens, encoded))

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
        token_ids = list(check_iterable("token_ids", token_ids))
        if len(seqs) != len(token_ids):
            raise UsageError(f"append: expected tokens for {len(seqs)} sequences, got {len(token_ids)}")
        single = (int, np.integer)
        tokens = [
            as_tokens([t] if isinstance(t, single) else t, f"token_ids[{i}]") for i, t in enumerate(token_ids)
        ]
        self._core.append(self._cores("append", seqs), tokens)

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and release the pages beyond them.

        Published blocks stay matchable. A page that is now used in part, and is shared, is copied by the next
        `reserve` before anything is written behind the cut.

        Raises
        ------
        UsageError, StateError
            The former unless ``0 ≤ num_tokens ≤ seq.num_tokens``.
        """
        [core] = self._cores("truncate", [seq])
        self._core.truncate(core, check_int("truncate: num_tokens", num_tokens, 0, seq.num_tokens))

    def preempt(self, seq: Sequence) -> None:
        """Give up the sequence's pages and keep its tokens; its next `reserve` matches them again first.

        Raises
        ------
        StateError
            For a closed sequence, or one whose step is still open.
        """
        [core] = self._cores("preempt", [seq])
        self._core.preempt(core)

    def close(self, seq: Sequence) -> None:
        """End the request: published pages become evictable, others free.

        While a step of the sequence is open, its pages are kept until that step ends; none of it is
        published.

        Raises
        ------
        StateError
            When it is closed already.
        """
        [core] = self._cores("close", [seq])
        self._core.close(core)

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
            seqs, num_new_tokens = [seqs], [num_new_tokens]  # type: ignore[list-item]  # an int
        seqs = list(check_iterable("seqs", seqs))
        counts = self._counts("reserve", "num_new_tokens", num_new_tokens, len(seqs))
        return Step(seqs, self._core.reserve(self._cores("reserve", seqs), counts))

    def prepare(self, step: Step) -> StepTables:
        """Fill the arrays that attention and the writers read. The caller runs ``copies`` first.

        Modifies the step's state only. The arrays are the caller's, and true until the step ends.

        Raises
        ------
        StateError
            When the step has ended.
        """
        core = self._step("prepare", step)
        num_seqs, num_tokens = len(step.sequences), core.num_tokens
        tables = StepTables(
            block_table=np.empty((num_seqs, core.max_blocks), np.int32),
            slot_mapping=np.empty(num_tokens, np.int64),
            seq_lens=np.empty(num_seqs, np.int32),
            query_start_loc=np.empty(num_seqs + 1, np.int32),
            positions=np.empty(num_tokens, np.int64),
            token_ids=np.empty(num_tokens, np.int64),
            copies=core.copies(),
        )
        self._core.prepare(core, *tables[:-1])
        return tables

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
        core = self._step("commit", step)
        counts: list[int] = []
        if num_accepted is not None:
            if len(step.sequences) == 1 and not isinstance(num_accepted, Iterable):
                num_accepted = [num_accepted]
            counts = self._counts("commit", "num_accepted", num_accepted, len(step.sequences))
        self._core.commit(core, counts)

    def abandon(self, step: Step) -> None:
        """End a step as if it had not been reserved.

        Evictions, and cached runs given up for the step, are not undone.

        Raises
        ------
        StateError
            When the step has ended.
        """
        self._core.abandon(self._step("abandon", step))

    # ------------------------------------------------------------------ pages and the index

    def allocate(self, num_blocks: int) -> npt.NDArray[np.int32]:
        """Take pages for the caller's own use, evicting if need be. They are never published.

        Returns
        -------
        ndarray [num_blocks] int32
            Held until `free`.

        Raises
        ------
        OutOfBlocksError, UsageError
        """
        return self._core.allocate(check_int("num_blocks", num_blocks, 0, MAX_BLOCKS))

    def free(self, block_ids: Iterable[int]) -> None:
        """Give back pages of `allocate`.

        Raises
        ------
        StateError
            For a page that is not held through `allocate`, or is listed twice.
        UsageError
            For an id outside the pool.
        """
        ids = check_iterable("block_ids", block_ids)
        self._core.free([check_int("block_ids", i, 0, self.num_blocks - 1) for i in ids])

    def evict(self, num_blocks: int) -> int:
        """Evict up to `num_blocks` pages, the longest unused first, and return how many."""
        return self._core.evict(check_int("num_blocks", num_blocks, 0, MAX_BLOCKS))

    def reset(self) -> bool:
        """Forget everything cached. False, and no change, while any page is referenced."""
        return self._core.reset()

    def stats(self) -> CacheStats:
        """Return a snapshot of the counters."""
        return CacheStats(**self._core.stats())

    def digest_of(self, block_id: int) -> BlockHash | None:
        """Digest of the block that a page holds; None for a page that is not published."""
        digest = self._core.digest_of(check_int("block_id", block_id, 0, self.num_blocks - 1))
        return None if digest is None else BlockHash(digest)

    def check_integrity(self) -> None:
        """Check every invariant from scratch, in time linear in the pool. For tests.

        Raises
        ------
        IntegrityError
        """
        self._core.check_integrity()

    def __repr__(self) -> str:
        s = self.stats()
        return f"<BlockPool: {s.num_free_blocks} free, {s.num_evictable_blocks} evictable of {s.num_blocks}>"

    # ------------------------------------------------------------------ arguments

    def _encode(
        self, token_ids: Any, cache_salt: str | bytes | None, extras: Iterable[AnyExtra] | None
    ) -> tuple[npt.NDArray[np.integer[Any]], BlockExtras]:
        tokens = as_tokens(token_ids)
        return tokens, encode_extras(len(tokens), self.block_size, cache_salt, extras)

    def _cores(self, verb: str, seqs: Iterable[Sequence]) -> list[_core.Sequence]:
        for seq in seqs:
            if not isinstance(seq, Sequence):
                raise UsageError(f"{verb}: expected a Sequence, got {show(seq)}")
            if seq.pool is not self:
                raise UsageError(f"{verb}: expected a sequence of this pool, got one of another")
        return [seq._core for seq in seqs]

    def _step(self, verb: str, step: Step) -> _core.Step:
        if not isinstance(step, Step):
            raise UsageError(f"{verb}: expected a Step, got {show(step)}")
        self._cores(verb, step.sequences[:1])
        return step._core

    def _counts(self, verb: str, name: str, counts: int | Iterable[int], num_seqs: int) -> list[int]:
        checked = [
            check_int(f"{verb}: {name}", n, -(2**62), 2**62)
            for n in check_iterable(f"{verb}: {name}", counts)
        ]
        if len(checked) != num_seqs:
            raise UsageError(f"{verb}: expected {name} for {num_seqs} sequences, got {len(checked)}")
        return checked
