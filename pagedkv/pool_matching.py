"""What a pool holds of a prompt, and how long it keeps that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.checks import check_ordered, one_for_each, show
from pagedkv.errors import UsageError
from pagedkv.extras import AnyExtra
from pagedkv.pool_admin import PoolAdmin
from pagedkv.retention import RETAINED_PRIORITY, Retention, retained_blocks


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


class PoolMatching(PoolAdmin):
    """The part of :class:`BlockPool` that looks prompts up."""

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
        return self._core.match_lengths(*as_queue(prompts, cache_salts, salt_from, extras))

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


def as_queue(
    prompts: Iterable[Any],
    cache_salts: Iterable[str | bytes | None] | None,
    salt_from: int | None,
    extras: Iterable[Iterable[AnyExtra] | None] | None,
) -> tuple[list[Any], list[Any] | None, int | None, list[Any] | None]:
    """Return prompts, and one salt and one list of extras for each, as the core takes them."""
    prompts = list(check_ordered("prompts", prompts))
    if cache_salts is None and salt_from is not None:
        raise UsageError(f"salt_from: expected cache_salts with it, got {show(salt_from)} and no salts")
    salts = None if cache_salts is None else one_for_each("cache_salts", cache_salts, len(prompts))
    extras_of = None if extras is None else one_for_each("extras", extras, len(prompts))
    return prompts, salts, salt_from, extras_of
