"""What routers are told: mistakes of other KV caches, as promises that this pool's events keep."""

from __future__ import annotations

import pytest
from event_watcher import Watcher
from pool_driving import compute, num_block_tokens, remember, run

from pagedkv import BlockPool, hash_blocks
from pagedkv.events import AllBlocksCleared, BlockRemoved, BlockStored

TOKENS = list(range(64))
H = hash_blocks(TOKENS)


def longest_match(watcher: Watcher) -> int:
    """What a router that knows events alone takes to be cached of the prompt."""
    return 16 * next((i for i, digest in enumerate(H) if digest not in watcher.prompts), len(H))


@pytest.mark.parametrize("num_present", [0, 1, 2, 3])
def test_the_parent_in_an_event_is_the_block_before_and_not_the_one_stored_last(num_present: int) -> None:
    """Where blocks were there already, the last one stored was named as parent (vllm-ascend)."""
    pool = BlockPool(16, events=True)
    watcher = Watcher(pool)
    remember(pool, TOKENS)
    pool.evict(4 - num_present)
    remember(pool, list(range(500, 532)))  # something else is stored in between
    watcher.listen()
    assert longest_match(watcher) == num_block_tokens(pool, TOKENS) == 16 * num_present
    remember(pool, TOKENS)
    [stored] = pool.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.parent_block_hash == (H[num_present - 1] if num_present else None)
    assert stored.block_hashes == H[num_present:]
    watcher.hear([stored])
    assert longest_match(watcher) == 64


def test_parents_are_right_where_prompts_are_computed_by_turns() -> None:
    pool = BlockPool(16, block_size=4, events=True)
    prompts = [list(range(12)), [*range(4), *range(50, 58)], list(range(90, 102))]
    seqs = [pool.open(tokens) for tokens in prompts]
    watcher = Watcher(pool)
    while any(seq.num_uncached_tokens for seq in seqs):
        pool.commit(pool.reserve(seqs, [3] * 3))  # the ends of blocks fall into different steps
        watcher.listen()
    for tokens in prompts:
        for i, digest in enumerate(hash_blocks(tokens, block_size=4)):
            assert watcher.prompts[digest] == tokens[: 4 * i + 4]
    assert len(watcher.prompts) == pool.stats().num_nodes == 8


def test_a_pool_speaks_for_itself_alone() -> None:
    """One worker's "all cleared" was taken for all behind its address, or for none of them (llm-d)."""
    pools = [BlockPool(8, events=True) for _ in range(3)]
    watchers = [Watcher(pool) for pool in pools]

    def holders() -> list[int]:
        for watcher in watchers:
            watcher.listen()
        return [i for i, watcher in enumerate(watchers) if H[0] in watcher.prompts]

    for pool in pools:
        remember(pool, TOKENS[:16])
    assert holders() == [0, 1, 2]
    assert pools[0].reset()
    assert holders() == [1, 2]
    assert pools[1].evict(1) == 1
    assert holders() == [2]
    busy = compute(pools[2], TOKENS[:16])
    assert not pools[2].reset()  # refused: nothing is cleared
    assert holders() == [2]
    busy.close()
    assert num_block_tokens(pools[2], TOKENS) == 16


def test_tenants_with_the_same_tokens_have_events_that_do_not_meet() -> None:
    """Events ignored the salt, so a router sent one tenant to where another's blocks were (SGLang)."""
    pool = BlockPool(16, events=True)
    watchers = {salt: Watcher(pool) for salt in ("s1", "s2")}
    for salt, watcher in watchers.items():
        remember(pool, TOKENS, cache_salt=salt)
        watcher.listen()
    names = [set(watcher.prompts) for watcher in watchers.values()]
    assert [len(blocks) for blocks in names] == [4, 4]
    assert not names[0] & names[1]
    assert names[0] == set(hash_blocks(TOKENS, cache_salt="s1"))


def test_events_come_in_the_order_in_which_it_happened() -> None:
    """Stored after removed, or the reverse, leaves a router with what is not there for good."""
    pool = BlockPool(2, block_size=4, events=True)
    for _ in range(3):
        remember(pool, range(8))
        remember(pool, range(50, 58))
    pool.bump_generation()
    kinds = [type(event) for event in pool.take_events()]
    assert kinds == [BlockStored, *[BlockRemoved, BlockStored] * 5, AllBlocksCleared]


def test_a_block_stored_again_after_it_was_removed_is_told_again() -> None:
    pool = BlockPool(4, block_size=4, events=True)
    remember(pool, range(8))
    pool.evict(2)
    seq = pool.open(range(8))
    run(pool, seq)
    a, b = hash_blocks(range(8), block_size=4)
    told = [(type(event), event.block_hashes) for event in pool.take_events()]
    assert told == [(BlockStored, [a, b]), (BlockRemoved, [b, a]), (BlockStored, [a, b])]
