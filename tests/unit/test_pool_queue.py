"""What a scheduler asks of the pool for requests that wait, and what requests may keep to themselves."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from pool_driving import compute, digests, drain, num_block_tokens, observe, remember, run

from pagedkv import Adapter, BlockPool, StateError, UsageError, hash_blocks

PROMPT = st.lists(st.integers(0, 1), max_size=9)
SALT = st.sampled_from([None, "red", b"blue"])


def eviction_order(pool: BlockPool) -> list[bytes | None]:
    """Digests of the pages in the order in which they go."""
    before = digests(pool)
    return [before[page] for page in drain(pool)]


# ---------------------------------------------------------------------- match_lengths


@given(
    history=st.lists(st.tuples(PROMPT.filter(bool), SALT), max_size=4),
    waiting=st.lists(st.tuples(PROMPT, SALT), max_size=6),
)
def test_match_lengths_are_those_of_match(
    history: list[tuple[list[int], str | bytes | None]], waiting: list[tuple[list[int], str | bytes | None]]
) -> None:
    pool = BlockPool(16, block_size=2)
    for tokens, salt in history:
        remember(pool, tokens, cache_salt=salt)
    prompts, salts = [tokens for tokens, _ in waiting], [salt for _, salt in waiting]
    before = observe(pool)
    salted = pool.match_lengths(prompts, cache_salts=salts)
    plain = pool.match_lengths(prompts)
    assert salted.dtype == plain.dtype == np.int64
    assert salted.tolist() == [pool.match(t, cache_salt=s).num_tokens for t, s in waiting]
    assert plain.tolist() == [pool.match(t).num_tokens for t in prompts]
    assert observe(pool) == before


def test_match_lengths_count_partial_blocks() -> None:
    pool = BlockPool(4, block_size=4)
    remember(pool, range(8))
    assert pool.match_lengths([range(8), range(6), [9], []]).tolist() == [8, 6, 0, 0]


@pytest.mark.parametrize("salts", [[], ["red"], ["red", None, "blue"]])
def test_match_lengths_want_one_salt_for_each_prompt(salts: list[str | None]) -> None:
    pool = BlockPool(4, block_size=4)
    with pytest.raises(UsageError, match=f"for each of 2 prompts, got {len(salts)}"):
        pool.match_lengths([[1], [2]], cache_salts=salts)


def test_match_lengths_name_the_prompt_that_is_wrong() -> None:
    pool = BlockPool(4, block_size=4)
    with pytest.raises(UsageError, match=r"prompts\[1\]"):
        pool.match_lengths([[1], [-1]])


# ---------------------------------------------------------------------- touch


def test_touched_blocks_go_last_and_leaves_still_go_first() -> None:
    pool = BlockPool(8, block_size=4)
    remember(pool, range(8), range(100, 108))
    old, young = (hash_blocks(range(start, start + 8), block_size=4) for start in (0, 100))
    assert pool.touch(range(8)) == 8
    pool.check_integrity()
    assert eviction_order(pool) == [*young[::-1], *old[::-1]]


def test_touching_a_prefix_leaves_what_follows_old() -> None:
    pool = BlockPool(8, block_size=4)
    remember(pool, range(8), range(100, 108))
    old, young = (hash_blocks(range(start, start + 8), block_size=4) for start in (0, 100))
    assert pool.touch(range(6)) == 4
    assert eviction_order(pool) == [old[1], *young[::-1], old[0]]


def test_touching_nothing_returns_zero_and_changes_nothing() -> None:
    pools = [BlockPool(8, block_size=4), BlockPool(8, block_size=4)]
    for pool in pools:
        remember(pool, range(8), range(100, 108))
    before = observe(pools[0])
    assert pools[0].touch([]) == 0
    assert pools[0].touch([7] * 9) == 0
    assert pools[0].touch(range(8), cache_salt="red") == 0
    assert observe(pools[0]) == before
    assert drain(pools[0]) == drain(pools[1])


def test_touching_referenced_pages_is_harmless() -> None:
    pool = BlockPool(8, block_size=4)
    remember(pool, range(8))
    with compute(pool, range(6)):
        assert pool.touch(range(8)) == 8
        pool.check_integrity()
    pool.check_integrity()
    assert eviction_order(pool) == hash_blocks(range(8), block_size=4)[::-1]


@given(
    history=st.lists(st.tuples(PROMPT.filter(bool), st.booleans()), min_size=1, max_size=6),
    touched=st.lists(PROMPT, max_size=4),
)
def test_after_any_touches_a_block_never_goes_before_what_follows_it(
    history: list[tuple[list[int], bool]], touched: list[list[int]]
) -> None:
    pool = BlockPool(32, block_size=2)
    running = []
    for tokens, keeps_running in history:
        seq = compute(pool, tokens)
        if keeps_running:
            running.append(seq)
        else:
            seq.close()
    for tokens in touched:
        assert pool.touch(tokens) == num_block_tokens(pool, tokens)
        pool.check_integrity()
    for seq in running:
        seq.close()
    while pool.evict(1):
        pool.check_integrity()
    assert pool.stats().num_free_blocks == 32


# ---------------------------------------------------------------------- no_cache


@pytest.mark.parametrize(("position", "num_published"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (12, 12)])
def test_publication_ends_before_the_block_that_holds_the_position(position: int, num_published: int) -> None:
    pool = BlockPool(8, block_size=4)
    seq = pool.open(range(12))
    seq.no_cache(position)
    run(pool, seq)
    seq.append(12)
    run(pool, seq)
    assert seq.num_computed_tokens == 13
    assert seq.num_committed_tokens == num_published
    pool.check_integrity()
    seq.close()
    assert pool.match(range(12)).num_tokens == num_published
    assert pool.stats().num_evictable_blocks == num_published // 4


def test_no_cache_holds_for_what_is_appended_later() -> None:
    pool = BlockPool(8, block_size=4)
    seq = compute(pool, range(6))
    seq.no_cache(6)
    for token in range(6, 14):
        seq.append(token)
        run(pool, seq)
    seq.close()
    assert pool.match(range(14)).num_tokens == 4


def test_the_earliest_ban_holds() -> None:
    pool = BlockPool(8, block_size=4)
    seq = pool.open(range(12))
    seq.no_cache(4)
    seq.no_cache(9)
    run(pool, seq)
    assert seq.num_committed_tokens == 4


def test_a_position_in_a_published_block_is_refused() -> None:
    pool = BlockPool(8, block_size=4)
    seq = compute(pool, range(10))
    before = observe(pool, seq)
    for position in (0, 3, 7):
        with pytest.raises(StateError, match="no_cache: expected a position from the 8 published"):
            seq.no_cache(position)
        assert observe(pool, seq) == before
    seq.append([10, 11])
    run(pool, seq)
    assert seq.num_committed_tokens == 12, "a refused ban holds nothing back"


def test_no_cache_is_refused_in_a_step_and_after_close() -> None:
    pool = BlockPool(8, block_size=4)
    seq = pool.open(range(10))
    step = pool.reserve(seq, 10)
    with pytest.raises(StateError, match="no_cache"):
        seq.no_cache(8)
    pool.commit(step)
    seq.close()
    with pytest.raises(StateError, match="no_cache"):
        seq.no_cache(8)


@pytest.mark.parametrize("cut", [3, 6])
def test_truncating_to_the_position_or_below_lifts_the_ban(cut: int) -> None:
    pool = BlockPool(8, block_size=4)
    seq = pool.open(range(12))
    seq.no_cache(6)
    run(pool, seq)
    assert seq.num_committed_tokens == 4
    seq.truncate(cut)
    seq.append([50] * (12 - cut))
    run(pool, seq)
    assert seq.num_committed_tokens == 12
    pool.check_integrity()


def test_truncating_behind_the_position_keeps_the_ban() -> None:
    pool = BlockPool(8, block_size=4)
    seq = pool.open(range(12))
    seq.no_cache(6)
    run(pool, seq)
    seq.truncate(7)
    seq.append([50] * 5)
    run(pool, seq)
    assert seq.num_committed_tokens == 4
    pool.check_integrity()


def test_a_fork_inherits_the_ban_and_a_preempted_sequence_keeps_it() -> None:
    pool = BlockPool(12, block_size=4)
    seq = pool.open(range(12))
    seq.no_cache(5)
    fork = seq.fork()
    run(pool, seq)
    seq.preempt()
    run(pool, seq, fork)
    assert seq.num_committed_tokens == fork.num_committed_tokens == 4
    pool.check_integrity()
    seq.close()
    fork.close()
    assert pool.match(range(12)).num_tokens == 4


# ---------------------------------------------------------------------- salt_from


@pytest.mark.parametrize("salt_from", [8, 11])
def test_tenants_share_what_is_before_the_salt_and_nothing_after(salt_from: int) -> None:
    pool = BlockPool(16, block_size=4)
    red = compute(pool, range(16), cache_salt="red", salt_from=salt_from)
    blue = pool.open(range(16), cache_salt="blue", salt_from=salt_from)
    assert blue.num_cached_tokens == 8
    assert blue.block_ids.tolist() == red.block_ids[:2].tolist()
    run(pool, blue)
    assert not set(blue.block_ids[2:].tolist()) & set(red.block_ids[2:].tolist())
    assert red.block_hashes == hash_blocks(range(16), block_size=4, cache_salt="red", salt_from=salt_from)
    assert pool.match(range(16)).num_tokens == 8
    assert pool.match(range(16), cache_salt="red").num_tokens == 0
    assert pool.match(range(16), cache_salt="red", salt_from=salt_from).num_tokens == 16
    pool.check_integrity()


def test_no_partial_run_crosses_into_another_tenants_block() -> None:
    pool = BlockPool(16, block_size=4)
    remember(pool, range(12), cache_salt="red", salt_from=8)
    for salt, num_tokens in (("red", 10), ("blue", 8)):
        found = pool.match([*range(10), 99], cache_salt=salt, salt_from=8)
        assert found.num_tokens == num_tokens
    assert pool.match([*range(10), 99]).num_tokens == 8


def test_touch_knows_the_tenants_blocks() -> None:
    pool = BlockPool(16, block_size=4)
    remember(pool, range(12), cache_salt="red", salt_from=8)
    assert pool.touch(range(12), cache_salt="red", salt_from=8) == 12
    assert pool.touch(range(12), cache_salt="blue", salt_from=8) == 8
    assert pool.touch(range(12)) == 8


def test_rejected_tokens_do_not_lift_a_ban_on_publication() -> None:
    pool = BlockPool(8, block_size=4)
    seq = pool.open(range(6))
    pool.commit(pool.reserve(seq, 6))
    seq.no_cache(6)
    seq.append([90, 91])
    pool.commit(pool.reserve(seq, 2), 0)
    seq.append([70, 71, 72])
    pool.commit(pool.reserve(seq, 3))
    assert seq.num_committed_tokens == 4
    assert pool.match([0, 1, 2, 3, 4, 5, 70, 71]).num_block_tokens == 4


def test_a_cut_before_a_banned_position_that_holds_no_token_keeps_the_ban() -> None:
    pool = BlockPool(8, block_size=4)
    seq = pool.open(range(6))
    seq.no_cache(8)
    seq.truncate(5)
    seq.append(range(5, 12))
    pool.commit(pool.reserve(seq, 12))
    assert seq.num_committed_tokens == 8


@pytest.mark.parametrize("salts", ["ac", b"ac", {"a": 1, "c": 2}, {"a", "c"}, 5])
def test_one_salt_for_all_prompts_is_not_taken_apart(salts: Any) -> None:
    with pytest.raises(UsageError, match="cache_salts: expected"):
        BlockPool(8).match_lengths([range(33)] * 2, cache_salts=salts)


def test_a_queue_may_have_extras_and_salts_that_enter_late() -> None:
    pool = BlockPool(16, block_size=4)
    adapter = Adapter("sql", b"1")
    for salt, extras in (("a", []), ("b", [adapter])):
        with pool.open(range(12), cache_salt=salt, salt_from=8, extras=extras) as seq:
            pool.commit(pool.reserve(seq, seq.num_uncached_tokens))
    lengths = pool.match_lengths(
        [range(12)] * 4,
        cache_salts=["a", "c", "b", None],
        salt_from=8,
        extras=[None, [], [adapter], [adapter]],
    )
    assert lengths.tolist() == [12, 8, 12, 8]
