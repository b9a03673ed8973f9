"""Short histories that a long random one was shrunk to, each with what went wrong in it turned right."""

from __future__ import annotations

import pytest
from pool_driving import compute, digests, drain, remember, run

from pagedkv import BlockPool, Breakpoint, Media, Retention, hash_blocks


def release_order(pool: BlockPool) -> list[bytes | None]:
    """Digests of the evictable blocks in the order in which they go."""
    before = digests(pool)
    return [before[page] for page in drain(pool)]


def test_a_retention_that_ends_after_a_new_generation_leaves_the_order_of_eviction_alone() -> None:
    pool = BlockPool(4, block_size=1, clock="manual")
    points = [Breakpoint(1, 1.0), Breakpoint(2, 1.0), Breakpoint(3, 0.5)]
    with pool.open([0, 0, 1], breakpoints=points) as seq:
        run(pool, seq)
    pool.bump_generation()
    pool.advance(0.5)  # ends the last block's, not those before it
    assert pool.evict(1) == 1
    pool.check_integrity()
    assert release_order(pool) == hash_blocks([0, 0], block_size=1)[::-1]


def test_a_running_sequence_of_an_old_generation_raises_nothing_out_of_order() -> None:
    pool = BlockPool(8, block_size=2, clock="manual")
    running = [pool.open([0, 0, 1, 1], retention=[Retention(priority=priority)]) for priority in (50, 70)]
    run(pool, running[0])
    running[0].close()
    step = pool.reserve(running[1], 4)
    pool.bump_generation()
    pool.commit(step)
    pool.check_integrity()
    running[1].close()
    pool.check_integrity()
    assert pool.evict(8) == 4


def test_a_block_that_a_quota_kept_back_is_published_once_by_all_who_share_it() -> None:
    pool = BlockPool(8, block_size=4)
    pool.set_quota("tenant", 0)
    seq = compute(pool, range(4), cache_salt="tenant")
    fork = seq.fork()
    pool.set_quota("tenant", None)
    for one in (seq, fork):
        one.append(9)
        run(pool, one)
        pool.check_integrity()
        assert pool.tenant_usage("tenant").num_blocks == 1
    assert seq.num_committed_tokens == fork.num_committed_tokens == 4
    seq.close()
    fork.close()
    pool.check_integrity()
    assert pool.evict(8) == 1
    assert pool.tenants() == {}


def test_a_block_whose_item_was_cut_takes_no_room_from_its_tenant() -> None:
    """It can't be published, so nothing is evicted for it."""
    pool = BlockPool(12, block_size=4)
    seq = pool.open(range(8), cache_salt="tenant", extras=[Media(4, 4, bytes(32))])
    run(pool, seq)
    remember(pool, range(100, 104), cache_salt="tenant")
    pool.set_quota("tenant", 3)
    seq.truncate(6)
    seq.append([50, 51])
    run(pool, seq)
    assert pool.stats().num_evicted_by["quota"] == 0
    assert pool.match(range(100, 104), cache_salt="tenant").num_block_tokens == 4


def test_a_digest_finds_the_block_of_the_present_generation_beside_the_old_one() -> None:
    pool = BlockPool(8, block_size=4)
    remember(pool, range(8))
    names = hash_blocks(range(8), block_size=4)
    assert len(pool.lookup(names)) == 2
    pool.bump_generation()
    assert pool.lookup(names).tolist() == []
    seq = compute(pool, range(8))
    assert pool.lookup(names).tolist() == seq.block_ids.tolist()
    assert pool.stats().num_collisions == 0


def test_what_is_expected_at_a_missing_token_is_what_stands_at_that_very_place() -> None:
    """Where a run ends at an item, the tokens may be equal there, and differ further on."""
    pool = BlockPool(4, block_size=3)
    remember(pool, [0, 0, 0], extras=[Media(0, 1, bytes(32))])
    answer = pool.explain([0, 0, 3])
    assert (answer.reason, answer.position, answer.expected_token) == ("differs", 0, None)

    whole_blocks_only = BlockPool(4, block_size=3, token_granular=False)
    remember(whole_blocks_only, [0, 0, 7])
    answer = whole_blocks_only.explain([0, 0, 3])
    assert (answer.reason, answer.position, answer.expected_token) == ("differs", 0, None)


def test_a_lost_run_after_the_first_step_bills_nothing_anew() -> None:
    """The last token of a full hit is computed but not written, whatever is given up later."""
    pool = BlockPool(3, block_size=4)
    remember(pool, range(4))
    seq = pool.open(range(4), breakpoints=[Breakpoint(4, 60.0)])
    run(pool, seq)
    usage = seq.usage
    assert (usage.input, usage.cache_read, usage.cache_write_by_ttl) == (1, 3, {})
    seq.truncate(2)
    seq.append([8, 8])
    pool.allocate(2)
    step = pool.reserve(seq, 2)  # no page for a copy: the run of two is computed again
    assert step.num_new_tokens == [4]
    assert seq.usage == usage


@pytest.mark.parametrize("num_published", [0, 1, 2])
def test_a_step_makes_room_for_what_it_may_publish_and_no_more(num_published: int) -> None:
    pool = BlockPool(8, block_size=4)
    remember(pool, range(8), cache_salt="tenant")
    pool.set_quota("tenant", 2)
    seq = pool.open(range(50, 58), cache_salt="tenant", no_cache=[(4 * num_published, 9)])
    run(pool, seq)
    assert pool.stats().num_evicted_by["quota"] == num_published
    assert seq.num_committed_tokens == 4 * num_published
    assert pool.tenant_usage("tenant").num_blocks == 2


def test_what_is_raised_to_its_parents_priority_still_goes_before_it() -> None:
    pool = BlockPool(8, block_size=4)
    remember(pool, range(8))
    assert pool.retain(range(8), end=4) == 4
    pool.check_integrity()
    assert pool.retain(range(8), start=4) == 4
    pool.check_integrity()
    assert release_order(pool) == hash_blocks(range(8), block_size=4)[::-1]


def test_a_low_block_whose_time_is_over_still_goes_before_its_low_parent() -> None:
    pool = BlockPool(8, block_size=4, clock="manual")
    wishes = [Retention(0, 4, 20), Retention(4, 8, 20, 1.0)]
    with pool.open(range(8), retention=wishes) as seq:
        run(pool, seq)
    pool.advance(1.0)
    assert pool.snapshot().eviction_rank.tolist().count(-1) == 6
    pool.check_integrity()
    assert release_order(pool) == hash_blocks(range(8), block_size=4)[::-1]


def test_a_wish_below_the_default_lowers_nothing_that_is_there() -> None:
    pool = BlockPool(8, block_size=4)
    remember(pool, range(8), range(100, 104))
    pool.retain(range(100, 104), priority=20)
    assert release_order(pool)[-1] == hash_blocks(range(100, 104), block_size=4)[0]
