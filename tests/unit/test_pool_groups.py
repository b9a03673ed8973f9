"""What groups of layers promise: pages for a window alone, and hits where every group has what is seen."""

from __future__ import annotations

import contextlib
import random

import pytest
from event_replay_of import replay
from pool_driving import NotedKV, compute, observe, run

from pagedkv import BlockPool, OutOfBlocksError, Sequence, UsageError
from pagedkv.pool import POLICIES

FULL_AND_WINDOW = (None, 8)


def small(*windows: int | None, num_blocks: int | list[int] = 32) -> BlockPool:
    return BlockPool(num_blocks, block_size=4, windows=windows, clock="manual")


def held(seq: Sequence, group: int) -> list[int]:
    """The blocks whose pages a sequence holds."""
    return [i for i, block_id in enumerate(seq.block_ids_of(group).tolist()) if block_id >= 0]


def decode(pool: BlockPool, seq: Sequence, num_tokens: int) -> None:
    for token in range(num_tokens):
        pool.append(seq, 1000 + token)
        run(pool, seq)


def evict_from(pool: BlockPool, group: int, num_pages: int) -> None:
    """Take all free pages of one group and so many more, and give them back."""
    stats = pool.stats().groups[group]
    pool.free(pool.allocate(stats.num_free_blocks + num_pages, group=group), group=group)


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize(
    ("window", "num_tokens", "first"),
    [
        (8, 40, 8),  # 40 sees 33 … 40, and 33 is in block 8
        (9, 40, 8),
        (10, 40, 7),  # 31 is in block 7
        (5, 40, 9),
        (4, 40, 9),
        (1, 40, 10),  # 40 sees itself alone
        (8, 42, 8),  # from inside block 10, as from its beginning
        (8, 43, 8),
        (8, 44, 9),
        (100, 40, 0),
    ],
)
def test_a_sequence_holds_the_blocks_of_the_last_tokens_of_its_window(
    window: int, num_tokens: int, first: int
) -> None:
    pool = small(None, window)
    seq = compute(pool, range(num_tokens))
    num_blocks = -(-num_tokens // 4)
    assert held(seq, 0) == list(range(num_blocks))
    assert held(seq, 1) == list(range(first, num_blocks))


def test_decoding_holds_a_window_whatever_the_length() -> None:
    pool = small(8)
    seq = compute(pool, range(20))
    for token in range(60):
        pool.append(seq, token)
        run(pool, seq)
        assert len(held(seq, 0)) <= 8 // 4 + 2
        pool.check_integrity()
    assert seq.num_tokens == 80


def test_what_has_left_a_window_stays_cached_until_it_is_evicted() -> None:
    pool = small(*FULL_AND_WINDOW)
    seq = compute(pool, range(40))
    stats = pool.stats().groups[1]
    assert (stats.num_committed_blocks, stats.num_evictable_blocks) == (2, 8)
    assert pool.match(range(20)).num_tokens == 20, "a shorter prompt finds its own window"
    evict_from(pool, 1, 8)
    assert pool.match(range(20)).num_tokens == 0
    assert pool.match(range(40)).num_tokens == 40, "the sequence holds what this one needs"
    seq.close()


def test_what_was_never_published_is_free_behind_a_window() -> None:
    pool = BlockPool(32, block_size=4, windows=FULL_AND_WINDOW, prefix_caching=False)
    seq = compute(pool, range(40))
    assert seq.num_committed_tokens == 0
    stats = pool.stats().groups[1]
    assert (stats.num_writable_blocks, stats.num_free_blocks) == (2, 30)


def test_tables_have_no_page_in_front_of_a_window() -> None:
    pool = small(*FULL_AND_WINDOW)
    seq = pool.open(range(40))
    run(pool, seq)
    for token in range(9):
        pool.append(seq, token)
        tables = run(pool, seq)
        [local] = tables.other_groups
        first = max(0, (39 + token + 1) // 4 * 4 - 7) // 4
        row = local.block_table[0].tolist()
        assert row[:first] == [-1] * first
        assert min(row[first : len(seq.block_ids)]) >= 0
        assert local.slot_mapping[0] // 4 == row[(40 + token) // 4]


# ---------------------------------------------------------------- hits


def test_a_hit_needs_no_page_in_front_of_its_window() -> None:
    pool = small(*FULL_AND_WINDOW)
    seq = compute(pool, range(40))
    evict_from(pool, 1, 8)
    again = pool.open([*range(40), 7, 7])
    assert again.num_cached_tokens == 40
    assert held(again, 1) == [8, 9]
    assert again.block_ids_of(1)[8:].tolist() == seq.block_ids_of(1)[8:].tolist()


def test_a_hit_is_as_long_as_the_windows_that_are_left() -> None:
    pool = small(*FULL_AND_WINDOW)
    compute(pool, range(40)).close()
    pool.touch(range(20))  # blocks 3 and 4 of the window: these go last
    evict_from(pool, 1, 8)
    assert pool.match_lengths([range(40), range(24), range(20), range(16)]).tolist() == [20, 20, 20, 0]
    found = pool.match(range(40))
    assert (found.num_block_tokens, len(found.block_ids)) == (20, 5)
    why = pool.explain(range(40))
    assert (why.reason, why.position) == ("window", 20)
    assert "window" in str(why)


def test_a_run_inside_a_block_needs_its_page_in_every_group() -> None:
    pool = small(*FULL_AND_WINDOW)
    compute(pool, range(40)).close()
    prompt = [*range(38), 99, 99, 99]
    assert pool.match(prompt).num_tokens == 38
    seq = pool.open(prompt)
    step = pool.reserve(seq, 3)
    assert [len(step.copies_of(group)) for group in range(2)] == [1, 1]
    pool.abandon(step)
    seq.close()
    pool.touch(range(36))  # but not block 9
    evict_from(pool, 1, 8)
    assert pool.match(prompt).num_tokens == 36


def test_windows_alone_find_a_tail_whose_head_is_gone() -> None:
    pool = small(8)
    compute(pool, range(40)).close()
    pool.touch(range(40))
    evict_from(pool, 0, 8)
    assert pool.match_lengths([range(40), range(44), range(36)]).tolist() == [40, 40, 0]
    assert pool.match(range(40)).block_ids[:8].tolist() == [-1] * 8
    assert held(pool.open(range(44)), 0) == [8, 9]
    pool.check_integrity()


def test_a_full_group_takes_a_block_out_of_all_groups() -> None:
    pool = small(None, 8, num_blocks=[10, 32])
    compute(pool, range(40)).close()
    assert pool.stats().groups[1].num_evictable_blocks == 10
    evict_from(pool, 0, 3)
    assert [group.num_evictable_blocks for group in pool.stats().groups] == [7, 7]
    assert pool.stats().num_evicted_by["capacity"] == 6
    assert pool.match(range(40)).num_tokens == 28


# ---------------------------------------------------------------- sequences


def test_a_fork_at_the_edge_of_a_window_has_its_own() -> None:
    pool = small(*FULL_AND_WINDOW)
    seq = compute(pool, range(39))
    fork = seq.fork()
    decode(pool, seq, 9)
    assert held(fork, 1) == [7, 8, 9]
    assert held(seq, 1) == [10, 11]
    decode(pool, fork, 1)
    assert held(fork, 1) == [8, 9]
    pool.check_integrity()
    seq.close()
    fork.close()
    assert pool.stats().groups[1].num_committed_blocks == 0


def test_truncating_behind_a_window_holds_its_pages_again() -> None:
    pool = small(*FULL_AND_WINDOW)
    seq = compute(pool, range(40))
    seq.truncate(22)
    assert (seq.num_computed_tokens, held(seq, 1)) == (22, [3, 4, 5])
    pool.append(seq, [7, 7])
    run(pool, seq)
    assert seq.num_computed_tokens == 24
    pool.check_integrity()


def test_truncating_behind_a_window_whose_pages_are_gone_computes_again() -> None:
    pool = small(*FULL_AND_WINDOW)
    seq = compute(pool, range(40))
    evict_from(pool, 1, 8)
    seq.truncate(22)
    assert (seq.num_tokens, seq.num_computed_tokens, seq.num_uncached_tokens) == (22, 0, 22)
    run(pool, seq)
    assert pool.match(range(22)).num_tokens == 20
    pool.check_integrity()


def test_truncating_inside_the_block_of_the_next_token_never_computes_again() -> None:
    pool = small(*FULL_AND_WINDOW, num_blocks=[32, 6])
    seq = compute(pool, range(4))
    for token in range(39):
        pool.append(seq, token)
        run(pool, seq)
    assert seq.num_tokens == 43
    evict_from(pool, 1, pool.stats().groups[1].num_evictable_blocks)
    seq.truncate(40)
    assert seq.num_computed_tokens == 40


def test_rejected_tokens_never_need_what_has_left_the_window() -> None:
    pool = small(5, num_blocks=8)
    seq = compute(pool, range(4))
    for _ in range(12):
        pool.append(seq, [1, 2, 3, 4, 5])
        step = pool.reserve(seq, 5)
        pool.prepare(step)
        pool.commit(step, 1)
        evict_from(pool, 0, pool.stats().num_evictable_blocks)
        assert seq.num_uncached_tokens == 0
        pool.check_integrity()


def test_a_preempted_sequence_finds_its_window_again() -> None:
    pool = small(*FULL_AND_WINDOW)
    seq = compute(pool, range(40))
    seq.preempt()
    assert [group.num_committed_blocks for group in pool.stats().groups] == [0, 0]
    pool.append(seq, 5)
    run(pool, seq)
    assert (seq.num_cached_tokens, held(seq, 1)) == (40, [8, 9, 10])


def test_an_abandoned_step_leaves_every_group_as_it_was() -> None:
    pool, other = (small(*FULL_AND_WINDOW) for _ in range(2))
    seqs = [compute(each, range(38)) for each in (pool, other)]
    for each, seq in zip((pool, other), seqs, strict=True):
        each.append(seq, [1] * 9)
    pool.abandon(pool.reserve(seqs[0], 9))
    assert observe(pool, seqs[0]) == observe(other, seqs[1])
    assert [held(seqs[0], group) for group in range(2)] == [held(seqs[1], group) for group in range(2)]


def test_a_step_that_one_group_has_no_pages_for_takes_none_of_any() -> None:
    pool, other = (small(*FULL_AND_WINDOW, num_blocks=[32, 4]) for _ in range(2))
    seqs = [each.open(range(40)) for each in (pool, other)]
    with pytest.raises(OutOfBlocksError, match="of group 1, got a need of 10") as refusal:
        pool.reserve(seqs[0], 40)
    assert (refusal.value.needed, refusal.value.free, refusal.value.evictable) == (10, 4, 0)
    assert observe(pool, seqs[0]) == observe(other, seqs[1])
    for _ in range(5):  # in pieces it fits
        step = pool.reserve(seqs[0], 8)
        pool.commit(step)
        pool.check_integrity()
    assert held(seqs[0], 1) == [8, 9]


def test_a_fence_holds_the_pages_of_windows_that_have_moved_on() -> None:
    pool = small(*FULL_AND_WINDOW)
    seq = compute(pool, range(40))
    fence = pool.fence(seq)
    before = seq.block_ids_of(1)[8:].tolist()
    decode(pool, seq, 12)
    seq.close()
    evict_from(pool, 1, pool.stats().groups[1].num_evictable_blocks)
    assert [pool.digest_of(block_id, group=1) is not None for block_id in before] == [True, True]
    fence.release()
    pool.check_integrity()


# ---------------------------------------------------------------- the index


@pytest.mark.parametrize("windows", [(8,), (None, 8), (8, 20), (None, None, 5)])
def test_replaying_the_events_gives_the_index(windows: tuple[int | None, ...]) -> None:
    pool = BlockPool(16, block_size=4, windows=windows, events=True)
    index: dict[bytes, bytes | None] = {}
    for start in (0, 0, 100, 0, 200, 100):
        seq = compute(pool, [*range(start, start + 30), start])
        decode(pool, seq, 10)
        seq.close()
        replay(pool.take_events(), index)
        groups = range(pool.num_groups)
        pages = [pool.digest_of(i, group=g) for g in groups for i in range(pool.num_blocks_by_group[g])]
        assert index.keys() == {page for page in pages if page is not None}
    assert pool.reset()
    replay(pool.take_events(), index)
    assert not index


def test_an_index_full_of_blocks_without_pages_makes_room() -> None:
    """Long prompts leave nodes behind; new ones are published all the same."""
    pool = BlockPool(64, block_size=1, windows=(4,))
    for start in range(0, 40_000, 1000):
        seq = pool.open(range(start, start + 900))
        while seq.num_uncached_tokens:
            pool.commit(pool.reserve(seq, min(20, seq.num_uncached_tokens)))
        seq.close()
        assert pool.match(range(start, start + 900)).num_tokens == 900
        assert pool.stats().num_nodes <= 1024
    pool.check_integrity()


def test_a_quota_counts_the_pages_of_the_first_group() -> None:
    pool = small(*FULL_AND_WINDOW)
    pool.set_quota("tenant", 5)
    compute(pool, range(20), cache_salt="tenant").close()
    compute(pool, range(100, 120), cache_salt="tenant").close()
    assert pool.tenant_usage("tenant").num_blocks == 5
    assert [group.num_evictable_blocks for group in pool.stats().groups] == [5, 5]
    assert pool.stats().num_evicted_by["quota"] == 10


def test_pages_of_each_group_are_counted_and_mapped() -> None:
    pool = small(*FULL_AND_WINDOW, num_blocks=[16, 12])
    seq = compute(pool, range(40))
    assert [tuple(group)[:5] for group in pool.stats().groups] == [(16, 6, 0, 10, 0), (12, 2, 0, 2, 8)]
    assert [pool.snapshot(group=group).num_blocks for group in range(2)] == [16, 12]
    assert sorted(pool.snapshot(group=1).eviction_rank.tolist()) == [-1] * 4 + list(range(8))
    seq.close()
    assert pool.evict(3) == 3
    assert [group.num_evictable_blocks for group in pool.stats().groups] == [7, 7]


# ---------------------------------------------------------------- arguments


def test_pages_are_counted_for_all_groups_or_for_each() -> None:
    assert small(None, 8, num_blocks=7).num_blocks_by_group == (7, 7)
    assert small(None, 8, num_blocks=[7, 3]).num_blocks_by_group == (7, 3)
    with pytest.raises(UsageError, match="num_blocks: expected one for each of 2 groups, got 3"):
        small(None, 8, num_blocks=[7, 3, 1])
    with pytest.raises(UsageError, match=r"num_blocks\[1\]: expected an integer"):
        small(None, 8, num_blocks=[7, 0])


@pytest.mark.parametrize("windows", [(0,), (8, None), (), ("8",), (True,)])
def test_windows_that_are_none_are_refused(windows: tuple[int | None, ...]) -> None:
    with pytest.raises(UsageError, match="windows"):
        BlockPool(8, windows=windows)


def test_a_group_that_is_none_is_refused() -> None:
    pool = small(*FULL_AND_WINDOW)
    seq = compute(pool, range(8))
    for call in (
        lambda: seq.block_ids_of(2),
        lambda: pool.allocate(1, group=2),
        lambda: pool.free([0], group=-1),
        lambda: pool.digest_of(0, group=2),
        lambda: pool.snapshot(group=2),
    ):
        with pytest.raises(UsageError, match="group: expected an integer from 0 to 1, got "):
            call()


def test_kv_is_never_read_from_another_ones_page() -> None:
    """A long history in few pages; the KV of every group is noted and read back."""
    windows = (None, 6, 13)
    pool = BlockPool([40, 12, 18], block_size=4, windows=windows)
    kvs = [NotedKV(4) for _ in windows]
    seqs: list[Sequence] = []
    for turn in range(60):
        while len(seqs) > 2:
            seqs.pop(turn % 3).close()
        seq = pool.open([*range(4 * (turn % 5)), *range(turn % 3, 10 + turn % 7)])
        seqs.append(seq)
        if turn % 4 == 0:
            seqs[0].truncate(max(1, seqs[0].num_tokens - turn % 11))
        for each in seqs:
            pool.append(each, turn)
        while busy := [each for each in seqs if each.num_uncached_tokens]:
            try:
                step = pool.reserve(busy, [min(5, each.num_uncached_tokens) for each in busy])
            except OutOfBlocksError:
                busy[-1].close()
                seqs.remove(busy[-1])
                continue
            tables = pool.prepare(step)
            causes = [kvs[0].causes(each.token_ids.tolist()) for each in busy]
            for group, window in enumerate(windows):
                kvs[group].execute(tables, causes, group=group, window=window)
            pool.commit(step)
            pool.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_of_eviction_goes_with_windows(policy: str) -> None:
    """Whatever orders the full group, no page is lost and none is evicted under a reader."""
    rng = random.Random(policy)
    pool = BlockPool([20, 14], block_size=4, windows=FULL_AND_WINDOW, policy=policy)
    seqs: list[Sequence] = []
    for turn in range(60):
        if len(seqs) > 2:
            seqs.pop(rng.randrange(3)).close()
        seqs.append(pool.open([rng.randrange(2) for _ in range(rng.randint(1, 40))]))
        if turn % 5 == 0:
            pool.retain(seqs[-1].token_ids, priority=rng.choice([20, 80]))
        for seq in seqs:
            if seq.num_uncached_tokens == 0:
                pool.append(seq, 1)
            with contextlib.suppress(OutOfBlocksError):
                pool.commit(pool.reserve(seq, min(9, seq.num_uncached_tokens)))
            pool.check_integrity()
    pool.close(seqs)
    assert pool.reset()
    assert pool.stats().num_nodes == 0


def test_a_map_names_a_tenant_who_has_pages_of_its_group_alone() -> None:
    pool = small(4, 4, num_blocks=4)
    compute(pool, range(8), cache_salt="tenant").close()
    evict_from(pool, 0, 2)
    assert pool.tenants() == {}  # pages of the first group are what is charged for
    assert pool.snapshot(group=0).salts == []
    of_second = pool.snapshot(group=1)
    assert of_second.salts == [b"tenant"]
    assert (of_second.tenant[of_second.depth >= 0] == 0).all()
    assert (of_second.depth >= 0).any()
