"""Requests one by one: what each verb takes. Each class is one piece of work that can be timed again."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import prompts
from benchmarks.harness import timed
from benchmarks.prompts import Prompts
from benchmarks.work.identity import within
from pagedkv import BlockPool, Sequence, hash_blocks, hash_blocks_batch

Tokens = npt.NDArray[np.int32]

LONG_POOL_BLOCKS = 16_384


def as_tokens(tokens: list[int]) -> Tokens:
    """Give a prompt as an engine has it."""
    return np.array(tokens, np.int32)


def compute(pool: BlockPool, seq: Sequence) -> None:
    """Take the pages that a prompt needs, and publish them as if its K/V was written."""
    pool.commit(pool.reserve(seq, seq.num_uncached_tokens))


def leave(pool: BlockPool, tokens: Tokens, **identity: Any) -> None:
    """Serve a prompt, so that it is cached."""
    with pool.open(tokens, **identity) as seq:
        compute(pool, seq)


def name_all(pool: BlockPool, seq: Sequence) -> bytes | None:
    """Digest of a sequence's last whole block, which needs those of all blocks before it."""
    last = seq.num_committed_tokens // pool.block_size - 1
    return pool.digest_of(int(seq.block_ids[last]))


class Digest:
    """Name the blocks of a prompt."""

    def __init__(self, **identity: Any) -> None:
        self.tokens, self.identity = as_tokens(Prompts("digest").draw(prompts.NUM_TOKENS)), identity

    def sample(self) -> float:
        """Time of one prompt."""
        return timed(partial(hash_blocks, self.tokens, **self.identity))


class DigestBatch:
    """Name the blocks of 8 prompts, in one call and one by one."""

    def __init__(self) -> None:
        rows = Prompts("digest batch")
        self.prompts = [as_tokens(rows.draw(prompts.NUM_SERVED_TOKENS)) for _ in range(8)]

    def sample(self) -> float:
        """Time of one call."""
        return timed(partial(hash_blocks_batch, self.prompts))

    def one_by_one(self) -> float:
        """Time of a call for each."""
        return timed(lambda: [hash_blocks(prompt) for prompt in self.prompts])


class Warm:
    """Open a prompt that is cached, and close it. Its blocks lie anywhere in a pool that others use too."""

    def __init__(self, pool: BlockPool | None = None, **identity: Any) -> None:
        self.pool = pool or BlockPool(LONG_POOL_BLOCKS)
        self.tokens, self.identity = as_tokens(Prompts("warm").draw(prompts.NUM_TOKENS)), identity
        leave(self.pool, self.tokens, **identity)

    def times(self) -> tuple[float, float]:
        """Time an open and its close."""
        made: list[Sequence] = []
        opened = timed(lambda: made.append(self.pool.open(self.tokens, **self.identity)))
        seq = made.pop()
        assert seq.num_cached_tokens == prompts.NUM_TOKENS - 1
        return opened, timed(seq.close)

    def sample(self) -> float:
        """Time an open."""
        return self.times()[0]


class Close(Warm):
    """The other half."""

    def sample(self) -> float:
        """Time a close."""
        return self.times()[1]


class Path(Warm):
    """Open a prompt whose path was built by 100 requests, each of which left it 100 tokens later."""

    def __init__(self, **identity: Any) -> None:
        rows, self.pool, self.identity = Prompts("path"), BlockPool(65_536), identity
        whole = rows.draw(prompts.NUM_TOKENS)
        for end in range(prompts.SHORT_PATH_TOKENS, prompts.NUM_TOKENS + 1, prompts.SHORT_PATH_TOKENS):
            branch = whole[:end] + rows.draw(prompts.SHORT_PATH_TOKENS // 2)
            leave(self.pool, as_tokens(branch), **within(identity, end))
        self.tokens = as_tokens(whole)
        leave(self.pool, self.tokens, **identity)


class Cold:
    """Serve a prompt in an empty pool and name all its blocks."""

    def __init__(self, **identity: Any) -> None:
        self.pool, self.prompts, self.identity = BlockPool(LONG_POOL_BLOCKS), Prompts("cold"), identity

    def sample(self) -> float:
        """Time of open, reserve, commit and the digests."""
        tokens = as_tokens(self.prompts.draw(prompts.NUM_TOKENS))
        made: list[Sequence] = []

        def serve() -> None:
            seq = self.pool.open(tokens, **self.identity)
            compute(self.pool, seq)
            name_all(self.pool, seq)
            made.append(seq)

        time_us = timed(serve)
        seq = made.pop()
        assert seq.num_cached_tokens == 0
        assert name_all(self.pool, seq) == hash_blocks(tokens, **self.identity)[-1]
        seq.close()
        assert self.pool.reset()
        return time_us


class Decode:
    """One step of 256 sequences."""

    def __init__(self, **identity: Any) -> None:
        self.pool, self.prompts = BlockPool(prompts.DECODING_BLOCKS), Prompts("decode")
        drawn = [as_tokens(self.prompts.draw(prompts.NUM_SERVED_TOKENS)) for _ in range(prompts.NUM_DECODING)]
        self.seqs = [self.pool.open(tokens, **identity) for tokens in drawn]
        for seq in self.seqs:
            compute(self.pool, seq)
        self.ones = [1] * len(self.seqs)

    def step(self, tokens: Tokens) -> None:
        """Append a token to each sequence and compute it."""
        self.pool.append(self.seqs, tokens)
        step = self.pool.reserve(self.seqs, self.ones)
        self.pool.prepare(step)
        self.pool.commit(step)

    def sample(self) -> float:
        """Time of a step for each sequence, the mean over as many steps as fill a block."""
        steps = [as_tokens(self.prompts.draw(len(self.seqs))) for _ in range(prompts.STEPS_PER_SAMPLE)]
        return sum(timed(partial(self.step, tokens)) for tokens in steps) / len(steps) / len(self.seqs)
