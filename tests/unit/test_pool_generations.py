"""After `bump_generation` nothing old is found, and whoever runs still finishes."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given
from pool_driving import NotedKV, compute, digests, drain, num_block_tokens, remember, run

from pagedkv import BlockPool, hash_blocks


def test_nothing_matches_after_a_bump() -> None:
    pool = BlockPool(8, block_size=4)
    remember(pool, range(8), range(100, 106))
    held = compute(pool, range(200, 208))
    pool.bump_generation()
    for prompt in (range(8), range(100, 106), range(200, 208)):
        assert pool.match(prompt).num_tokens == 0
        assert pool.open(prompt).num_cached_tokens == 0
    assert held.num_computed_tokens == 8
    pool.check_integrity()


def test_a_running_sequence_keeps_its_pages_and_finishes() -> None:
    pool, kv = BlockPool(4, block_size=4), NotedKV(4)
    seq = pool.open(range(6))
    for token in (None, 6, 7, 8):
        if token is not None:
            seq.append(token)
        step = pool.reserve(seq, seq.num_uncached_tokens)
        pool.bump_generation()
        kv.execute(pool.prepare(step), [kv.causes(seq.token_ids.tolist())])
        pool.commit(step)
        pool.check_integrity()
    assert seq.num_computed_tokens == 9
    seq.close()
    assert pool.stats().num_evictable_blocks + pool.stats().num_free_blocks == 4


def test_what_a_running_sequence_publishes_is_not_found() -> None:
    pool = BlockPool(8, block_size=4)
    seq = compute(pool, range(6))
    pool.bump_generation()
    seq.append([6, 7, 8, 9])
    run(pool, seq)
    assert num_block_tokens(pool, range(10)) == 0
    seq.close()
    assert num_block_tokens(pool, range(10)) == 0
    pool.check_integrity()


def test_a_fork_of_a_running_sequence_stays_in_its_generation() -> None:
    pool = BlockPool(8, block_size=4)
    seq = compute(pool, range(6))
    pool.bump_generation()
    fork = seq.fork()
    seq.close()
    fork.append([6, 7])
    run(pool, fork)
    assert num_block_tokens(pool, range(8)) == 0
    fork.close()
    assert num_block_tokens(pool, range(8)) == 0
    pool.check_integrity()


def test_a_sequence_with_nothing_computed_publishes_for_the_new_generation() -> None:
    pool = BlockPool(8, block_size=4)
    seq = pool.open(range(8))
    pool.bump_generation()
    run(pool, seq)
    assert num_block_tokens(pool, range(8)) == 8


def test_old_and_new_blocks_of_the_same_tokens_live_side_by_side() -> None:
    pool = BlockPool(8, block_size=4)
    old = compute(pool, range(8))
    pool.bump_generation()
    new = compute(pool, range(8))
    assert not set(old.block_ids.tolist()) & set(new.block_ids.tolist())
    assert pool.match(range(8)).block_ids.tolist() == new.block_ids.tolist()
    assert pool.stats().num_nodes == 4
    assert old.block_hashes == new.block_hashes
    old.close()
    assert pool.evict(2) == 2
    assert num_block_tokens(pool, range(8)) == 8
    pool.check_integrity()


def test_a_preempted_sequence_matches_in_the_new_generation_only() -> None:
    pool = BlockPool(8, block_size=4)
    seq = compute(pool, range(10))
    seq.preempt()
    pool.bump_generation()
    run(pool, seq)
    assert seq.num_cached_tokens == 0
    assert num_block_tokens(pool, range(8)) == 8

    seq.preempt()
    run(pool, seq)
    assert seq.num_cached_tokens == 8


def test_a_sequence_preempted_after_the_bump_forgets_its_old_pages() -> None:
    pool = BlockPool(8, block_size=4)
    seq = compute(pool, range(10))
    pool.bump_generation()
    new = compute(pool, range(4))
    seq.preempt()
    run(pool, seq)
    assert seq.num_cached_tokens == 4
    assert seq.block_ids[0] == new.block_ids[0]
    assert num_block_tokens(pool, range(8)) == 8


def test_old_pages_go_before_all_that_can_be_hit() -> None:
    pool = BlockPool(8, block_size=4)
    running = compute(pool, range(300, 308))
    remember(pool, range(8))
    pool.bump_generation()
    remember(pool, range(100, 108))
    running.close()
    new = set(hash_blocks(range(100, 108), block_size=4))
    before = digests(pool)
    assert [before[page] in new for page in drain(pool)] == [False] * 4 + [True] * 2


@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=8), st.booleans(), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_eviction_never_takes_a_hit_while_an_old_page_is_left(
    prompts: list[tuple[list[int], bool, bool]],
) -> None:
    pool = BlockPool(40, block_size=2)
    running, since_bump = [], []
    for tokens, keeps_running, bumps in prompts:
        seq = compute(pool, tokens)
        since_bump.append(tokens)
        if keeps_running:
            running.append(seq)
        else:
            seq.close()
        if bumps:
            pool.bump_generation()
            since_bump = []
    for seq in running:
        seq.close()
    hits = {digest for tokens in since_bump for digest in hash_blocks(tokens, block_size=2)}
    num_hits = len(hits)
    while pool.stats().num_evictable_blocks > num_hits:
        pool.evict(1)
        pool.check_integrity()
    assert {digest for digest in digests(pool) if digest is not None} == hits
    for tokens in since_bump:
        assert num_block_tokens(pool, tokens) == len(tokens) // 2 * 2


def test_reset_after_a_bump_frees_everything() -> None:
    pool = BlockPool(8, block_size=4)
    remember(pool, range(8))
    pool.bump_generation()
    remember(pool, range(8))
    assert pool.reset()
    assert pool.stats().num_free_blocks == 8
    assert pool.stats().num_nodes == 0
