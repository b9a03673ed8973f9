"""A trace through the real pool: one request after the other, each computed before the next arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.policy.trace import Trace
from pagedkv.pool import BlockPool

Progress = Callable[[int], None]
"""Called with the number of requests done since the last call."""
NOTIFY_EVERY = 256


class Replay(NamedTuple):
    """What a pool did with a trace.

    Attributes
    ----------
    hit_blocks, hit_tokens : ndarray [num_requests] int64
        Whole blocks found, and tokens found, of each prompt. Tokens are those of the blocks, and with
        token-granular reuse those of the run behind them.
    num_evicted_blocks : int
        For want of room.
    num_refused : int
        Requests that needed more than the pool has; they hit nothing.
    """

    hit_blocks: npt.NDArray[np.int64]
    hit_tokens: npt.NDArray[np.int64]
    num_evicted_blocks: int
    num_refused: int


def replay(
    trace: Trace,
    *,
    policy: str,
    num_blocks: int,
    block_size: int,
    token_granular: bool = False,
    equal_cost_tokens: int | None = None,
    progress: Progress | None = None,
) -> Replay:
    """Run a trace through a `BlockPool` and count what it finds.

    The pool's clock shows the trace's time. Prompts are published, answers are not: what of an answer comes
    back is in a later prompt.

    Raises
    ------
    UsageError
        The pool does not know the policy, or can't have so many blocks.
    """
    # A pool with a page for every block never evicts; a larger one would only take time to make.
    pages = min(num_blocks, trace.num_blocks(block_size))
    pool = BlockPool(
        pages,
        block_size=block_size,
        token_granular=token_granular,
        clock="manual",
        policy=policy,
        equal_cost_tokens=equal_cost_tokens,
    )
    requests = trace.requests
    hit_blocks = np.zeros(len(requests), np.int64)
    hit_tokens = np.zeros(len(requests), np.int64)
    num_refused = 0
    now_s = requests[0].time_s if requests else 0.0
    for number, request in enumerate(requests):
        if progress is not None and number % NOTIFY_EVERY == 0:
            progress(min(NOTIFY_EVERY, number))
        if request.time_s > now_s:
            pool.advance(request.time_s - now_s)
            now_s = request.time_s
        if -(-request.num_tokens // block_size) > num_blocks:
            num_refused += 1
            continue
        tokens = request.replayed_tokens(block_size)
        found = pool.match(tokens, cache_salt=request.cache_salt) if token_granular else None
        seq = pool.open(tokens, cache_salt=request.cache_salt)
        if found is None:
            # The last token never counts as cached, but if its block is there it is shared: the pages tell.
            num_blocks_hit = seq.num_reserved_tokens // block_size
            num_tokens_hit = num_blocks_hit * block_size
        else:
            num_blocks_hit, num_tokens_hit = found.num_block_tokens // block_size, found.num_tokens
        hit_blocks[number] = num_blocks_hit
        hit_tokens[number] = min(num_tokens_hit, request.num_tokens)
        pool.commit(pool.reserve(seq, seq.num_uncached_tokens))
        pool.close(seq)
    return Replay(hit_blocks, hit_tokens, pool.stats().num_evicted_by["capacity"], num_refused)
