"""Which page goes next: mistakes of other KV caches, as promises that this pool keeps."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from pool_driving import compute, digests, drain, num_block_tokens, remember

from pagedkv import BlockPool, OutOfBlocksError, hash_blocks


def test_a_path_is_evicted_from_its_end() -> None:
    """Parents went before their children, which nobody could find any more though they filled the pool."""
    pool = BlockPool(3, block_size=4)
    tokens = list(range(12))
    with compute(pool, tokens) as seq:
        pages = seq.block_ids.tolist()
    assert pool.allocate(1).tolist() == [pages[2]]
    assert num_block_tokens(pool, tokens) == 8
    assert pool.allocate(1).tolist() == [pages[1]]
    assert num_block_tokens(pool, tokens) == 4


def _close_each(pool: BlockPool) -> None:
    for tokens in (list(range(12)), list(range(50, 58))):
        compute(pool, tokens).close()


def _close_while_a_step_is_open(pool: BlockPool) -> None:
    seqs = [compute(pool, tokens) for tokens in (list(range(12)), list(range(50, 58)))]
    pool.append(seqs, [[1], [1]])
    step = pool.reserve(seqs, [1, 1])
    for seq in reversed(seqs):
        seq.close()
    pool.abandon(step)


def _preempt(pool: BlockPool) -> None:
    seqs = [compute(pool, tokens) for tokens in (list(range(12)), list(range(50, 58)))]
    for seq in seqs:
        seq.preempt()
        seq.close()


@pytest.mark.parametrize("release", [_close_each, _close_while_a_step_is_open, _preempt])
def test_every_way_to_release_pages_gives_the_same_order(release: Callable[[BlockPool], None]) -> None:
    """The path that waits for a running step released pages in another order than the direct one (vLLM)."""
    pool = BlockPool(8, block_size=4)
    release(pool)
    a = hash_blocks(range(12), block_size=4)
    b = hash_blocks(range(50, 58), block_size=4)
    names = digests(pool)
    assert [names[block_id] for block_id in drain(pool)] == [a[2], a[1], a[0], b[1], b[0]]


def test_pages_that_cannot_be_hit_never_push_out_pages_that_can() -> None:
    """Released pages that were only partly filled queued up behind cached ones, and aged these out (vLLM)."""
    pool = BlockPool(4, block_size=4)
    tokens = list(range(8))
    remember(pool, tokens)
    for i in range(100):
        remember(pool, [100 + i, 200])
    assert num_block_tokens(pool, tokens) == 8
    assert pool.stats().num_evicted_blocks == 0


@pytest.mark.parametrize("num_blocks", [10_000, 100_000])
def test_victims_of_a_full_pool_are_those_of_a_brute_force_lru_whatever_its_size(num_blocks: int) -> None:
    """Each eviction scanned all free pages, or the whole tree; a list must not take others (vLLM)."""
    pool, rng = BlockPool(num_blocks, block_size=4), random.Random(num_blocks)
    prompts = np.arange(4 * num_blocks, dtype=np.uint32).reshape(-1, 40)  # of ten blocks
    for tokens in prompts:
        remember(pool, tokens)
    pages = [pool.match(tokens).block_ids.tolist() for tokens in prompts]
    order = list(range(len(prompts)))  # oldest first
    for used in rng.sample(order, 300):
        pool.touch(prompts[used])
        order.remove(used)
        order.append(used)
    assert pool.stats().num_free_blocks == 0
    victims = [page for i in order for page in reversed(pages[i])]
    for taken in (1000, 7, 993):
        expected, victims = victims[:taken], victims[taken:]
        assert pool.allocate(taken).tolist() == expected
    assert pool.stats().num_evicted_blocks == 2000
    assert [num_block_tokens(pool, prompts[i]) for i in order[198:202]] == [0, 0, 40, 40]


def test_a_page_in_use_is_never_a_victim_even_where_nothing_else_is_left() -> None:
    """Under pressure a page that a request was reading went to another (vLLM, SGLang)."""
    pool = BlockPool(4, block_size=4)
    remember(pool, range(100, 108))
    seq = compute(pool, range(8))
    pool.allocate(2)
    assert num_block_tokens(pool, range(100, 108)) == 0
    assert pool.evict(4) == 0
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)
    assert num_block_tokens(pool, range(8)) == 8
    seq.close()
    assert len(pool.allocate(2)) == 2
    assert pool.match(range(8)).num_tokens == 0
