"""What calls cost, counted and not timed: blocks hashed, and steps made among the siblings of a node."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pagedkv import BlockPool, OutOfBlocksError, Sequence, hash_blocks

BLOCK = 16


def cost(pool: BlockPool, call: Callable[[], object]) -> tuple[int, int]:
    """Blocks hashed and steps made by a call."""
    num_digests, num_steps = pool._core.work()
    call()
    digests_after, steps_after = pool._core.work()
    return digests_after - num_digests, steps_after - num_steps


def compute(seq: Sequence, num_tokens: int | None = None) -> None:
    """Run one step, as if its KV was written."""
    step = seq.pool.reserve(seq, num_tokens or seq.num_uncached_tokens)
    seq.pool.commit(step)


def full_of_leaves(num_leaves: int) -> BlockPool:
    """A pool whose pages all hold a first block of some prompt."""
    pool = BlockPool(num_leaves)
    tokens = np.random.default_rng(0).permutation(num_leaves).astype(np.int32)
    for start in range(0, num_leaves, 1000):
        seqs = [pool.open(np.full(BLOCK, token)) for token in tokens[start : start + 1000]]
        pool.commit(pool.reserve(seqs, [BLOCK] * len(seqs)))
        for seq in seqs:
            seq.close()
    return pool


def test_a_victim_costs_the_same_among_few_and_many_leaves() -> None:
    steps_per_victim = []
    for num_leaves in (1_000, 30_000):
        pool = full_of_leaves(num_leaves)
        num_digests, num_steps = cost(pool, lambda pool=pool: pool.evict(500))
        assert num_digests == 0
        steps_per_victim.append(num_steps / 500)
    # The subtrees below a node of a treap have fewer than two nodes on their inner spines, on average.
    assert max(steps_per_victim) < 3


def test_finding_a_block_takes_steps_of_the_order_of_the_logarithm_of_its_siblings() -> None:
    pool = full_of_leaves(30_000)
    total = sum(cost(pool, lambda t=token: pool.match([t] * BLOCK))[1] for token in range(0, 30_000, 300))
    assert total / 100 < 4 * np.log2(30_000)


def test_a_warm_open_hashes_nothing() -> None:
    pool = BlockPool(64)
    tokens = np.arange(BLOCK * 50)
    with pool.open(tokens) as seq:
        compute(seq)
        assert seq.block_hashes == hash_blocks(tokens)
    assert cost(pool, lambda: pool.open(tokens).close())[0] == 0
    assert cost(pool, lambda: pool.match_lengths([tokens] * 3))[0] == 0


def test_nothing_is_hashed_before_somebody_asks_for_a_digest() -> None:
    pool = BlockPool(64)

    def serve() -> None:
        with pool.open(np.arange(BLOCK * 50)) as seq:
            compute(seq)

    assert cost(pool, serve)[0] == 0


@pytest.mark.parametrize("num_tokens", [16_384, 32_768])
def test_a_prompt_in_chunks_with_refused_steps_is_hashed_once(num_tokens: int) -> None:
    pool = BlockPool(num_tokens // BLOCK, events=True)
    seq = pool.open(np.arange(num_tokens))

    def serve() -> None:
        held = pool.allocate(pool.num_blocks)
        for _ in range(64):
            for _ in range(10):
                with pytest.raises(OutOfBlocksError):
                    pool.reserve(seq, num_tokens // 64)
            pool.free(held[-(num_tokens // BLOCK // 64) :])
            held = held[: -(num_tokens // BLOCK // 64)]
            compute(seq, num_tokens // 64)
            _ = seq.block_hashes
        pool.take_events()

    assert cost(pool, serve)[0] == num_tokens // BLOCK
