"""BlockPool: what the engine knows of the future, for the order of eviction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.checks import check_number
from pagedkv.errors import UsageError
from pagedkv.extras import AnyExtra
from pagedkv.pool_matching import PoolMatching, as_queue
from pagedkv.sequence import Sequence, core_sequences

WEEK_S = 7 * 24 * 3600


class PoolHints(PoolMatching):
    """What changes the order of eviction and nothing else. See `BlockPool`."""

    def waiting(
        self,
        prompts: Iterable[Any],
        *,
        cache_salts: Iterable[str | bytes | None] | None = None,
        salt_from: int | None = None,
        extras: Iterable[Iterable[AnyExtra] | None] | None = None,
    ) -> npt.NDArray[np.int64]:
        """Tell which prompts wait, the next one first: what is cached of them is about to be used.

        Replaces what was told before. Counts as a use of their blocks, as `touch` does, and as no request;
        the next prompt's blocks are evicted last. With the policy "hazard" they also go after all that nobody
        waits for, until they are opened or no longer told.

        Parameters
        ----------
        prompts, cache_salts, salt_from, extras
            As for `match_lengths`. No prompts: nothing waits.

        Returns
        -------
        ndarray [num_prompts] int64
            Tokens of the whole blocks that are cached of each.
        """
        return self._core.waiting(*as_queue(prompts, cache_salts, salt_from, extras))

    def expect_reuse(self, seq: Sequence, *, within_s: float) -> None:
        """Tell that the next request of this conversation is expected soon, such as after a tool call.

        Soft. With the policy "hazard" the blocks that the sequence holds, and those that it publishes, are
        worth a sure hit within that time; afterwards what was learnt of others like them holds again. With
        other policies it only takes back `last_turn`.

        Parameters
        ----------
        seq : Sequence
        within_s : float
            Seconds from now, more than 0; a week or more is without end.

        Raises
        ------
        UsageError
        StateError
            For a closed sequence, or one whose step is still open.
        """
        seconds = check_number("expect_reuse: within_s", within_s)
        if seconds <= 0:
            raise UsageError(f"expect_reuse: within_s: expected more than 0 seconds, got {within_s}")
        [core] = core_sequences("expect_reuse", [seq])
        self._core.expect_reuse(core, int(min(seconds, WEEK_S) * 1e9))

    def last_turn(self, seq: Sequence) -> None:
        """Tell that nobody continues this conversation: its blocks go first once it is closed.

        That is, with any policy and with priority 0, from its end to the first block that something else
        branches off, that somebody else holds, or that a retention covers. Whoever finds a block all the
        same makes it one like others.

        Raises
        ------
        UsageError
        StateError
            For a closed sequence, or one whose step is still open.
        """
        [core] = core_sequences("last_turn", [seq])
        self._core.last_turn(core)
