"""Sizes that make no sense: accepted elsewhere and divided by later; refused here when the pool is made."""

from __future__ import annotations

import pytest
from pool_driving import compute

from pagedkv import BlockPool, KVCacheSpec, SpecError, UsageError
from pagedkv.events import BlockStored


@pytest.mark.parametrize("block_size", [0, -16, 16.5, True, "16", None, 2**16])
def test_an_impossible_block_size_is_refused_when_the_pool_is_made(block_size: object) -> None:
    """A page size of 0 was accepted, and divided by later (vLLM, lmdeploy)."""
    with pytest.raises(UsageError, match=r"block_size: expected .*, got"):
        BlockPool(4, block_size=block_size)
    with pytest.raises(SpecError, match=r"block_size: expected .*, got"):
        KVCacheSpec.uniform(2, 2, 8, block_size=block_size)


@pytest.mark.parametrize("block_size", [1, 3, 16, 48, 2**16 - 1])
def test_the_reported_block_size_is_the_one_in_use(block_size: int) -> None:
    pool = BlockPool(2, block_size=block_size)
    assert pool.block_size == block_size
    with compute(pool, range(block_size)) as seq:
        assert seq.num_reserved_tokens == seq.num_committed_tokens == block_size
    assert KVCacheSpec.uniform(2, 2, 8, block_size=block_size).block_size == block_size


@pytest.mark.parametrize("num_blocks", [0, -1, 1.5, True, "8", None, float("nan"), 2**64])
def test_a_pool_without_pages_is_refused_when_it_is_made(num_blocks: object) -> None:
    with pytest.raises(UsageError, match=r"num_blocks: expected an integer.*, got"):
        BlockPool(num_blocks)  # type: ignore[arg-type]


def test_the_figures_of_a_pool_are_the_ones_it_was_made_with() -> None:
    """A metric reported another page size than the one in use (LMCache)."""
    pool = BlockPool(7, block_size=48, events=True)
    assert (pool.num_blocks, pool.stats().num_blocks, pool.block_size) == (7, 7, 48)
    compute(pool, range(100))
    [stored] = pool.take_events()
    assert isinstance(stored, BlockStored)
    assert (stored.block_size, len(stored.token_ids)) == (48, 96)
