"""The events of a pool tell exactly what can be hit in it."""

from __future__ import annotations

import contextlib
import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import pytest
from event_watcher import Watcher
from hypothesis import given
from pool_driving import compute, digests, remember, run

from pagedkv import BlockHash, BlockPool, OutOfBlocksError, Sequence, StateError, hash_blocks
from pagedkv.events import AllBlocksCleared, BlockRemoved, BlockStored

SALTS = (None, "tenant")
UNIVERSE = [
    (tokens, salt, hash_blocks(tokens, block_size=2, cache_salt=salt))
    for tokens in itertools.product((0, 1), repeat=6)
    for salt in SALTS
]


def hittable(pool: BlockPool) -> dict[BlockHash, list[int]]:
    """Every block that some prompt can hit, with the prompt up to it."""
    found: dict[BlockHash, list[int]] = {}
    for tokens, salt, names in UNIVERSE:
        num_tokens = pool.match(tokens, cache_salt=salt).num_block_tokens
        for i in range(num_tokens // 2):
            found[names[i]] = list(tokens[: 2 * i + 2])
    return found


VERBS = ("open", "open", "compute", "compute", "close", "preempt", "fork", "evict", "reset", "bump")
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(VERBS),
        st.integers(0, 5),
        st.lists(st.integers(0, 1), min_size=1, max_size=6),
        st.sampled_from(SALTS),
    ),
    min_size=4,
    max_size=30,
)


@given(operations=OPERATIONS)
def test_replaying_the_events_gives_exactly_what_can_be_hit(
    operations: list[tuple[str, int, list[int], str | None]],
) -> None:
    pool = BlockPool(6, block_size=2, events=True)
    watcher = Watcher(pool)
    seqs: list[Sequence] = []
    for verb, number, tokens, salt in operations:
        seq = seqs[number % len(seqs)] if seqs else None
        if verb == "open" and len(seqs) < 5:
            seqs.append(pool.open(tokens, cache_salt=salt))
        elif verb == "evict":
            pool.evict(1 + number % 3)
        elif verb == "reset":
            pool.reset()
        elif verb == "bump":
            pool.bump_generation()
        elif seq is not None and verb == "close":
            seqs.remove(seq)
            seq.close()
        elif seq is not None and verb == "preempt":
            seq.preempt()
        elif seq is not None and verb == "fork" and len(seqs) < 5:
            seqs.append(seq.fork())
        elif seq is not None and verb == "compute" and seq.num_uncached_tokens > 0:
            with contextlib.suppress(OutOfBlocksError):
                pool.commit(pool.reserve(seq, 1 + number % seq.num_uncached_tokens))
        watcher.listen()
        assert watcher.prompts == hittable(pool)


def test_events_taken_late_replay_to_the_same() -> None:
    pool = BlockPool(4, block_size=2, events=True)
    remember(pool, [0] * 6, [1] * 4, [0, 0, 1, 1])
    pool.bump_generation()
    remember(pool, [0, 1] * 3, [1, 0] * 3)
    watcher = Watcher(pool)
    watcher.listen()
    assert watcher.prompts == hittable(pool)
    assert watcher.prompts


def test_a_prompt_that_is_all_new_is_stored_from_its_beginning() -> None:
    pool = BlockPool(8, block_size=2, events=True)
    compute(pool, [0, 1, 1, 0, 1])
    [stored] = pool.take_events()
    assert stored == BlockStored(
        block_hashes=hash_blocks([0, 1, 1, 0], block_size=2),
        parent_block_hash=None,
        token_ids=[0, 1, 1, 0],
        block_size=2,
        extras=[b"", b""],
    )


def test_what_follows_cached_blocks_names_the_last_of_them_as_parent() -> None:
    pool = BlockPool(8, block_size=2, events=True)
    remember(pool, [0, 1, 1, 0])
    pool.take_events()
    compute(pool, [0, 1, 1, 0, 1, 1, 0, 0])
    names = hash_blocks([0, 1, 1, 0, 1, 1, 0, 0], block_size=2)
    [stored] = pool.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.parent_block_hash == names[1]
    assert stored.block_hashes == names[2:]
    assert stored.token_ids == [1, 1, 0, 0]


def test_a_block_computed_again_by_another_is_stored_once() -> None:
    pool = BlockPool(8, block_size=2, events=True)
    pair = [pool.open([0, 1, 1]), pool.open([0, 1, 1])]
    run(pool, *pair)
    [stored] = pool.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == hash_blocks([0, 1], block_size=2)


def test_a_block_is_removed_with_the_last_of_its_pages_only() -> None:
    pool = BlockPool(8, block_size=2, events=True)
    pair = [pool.open([0, 1]), pool.open([0, 1])]
    run(pool, *pair)
    for seq in pair:
        seq.close()
    pool.take_events()
    assert pool.stats().num_evictable_blocks == 2
    assert pool.evict(1) == 1
    assert pool.take_events() == []
    assert pool.evict(1) == 1
    assert pool.take_events() == [BlockRemoved(hash_blocks([0, 1], block_size=2))]


def test_blocks_are_removed_from_the_end_of_their_prompt() -> None:
    pool = BlockPool(8, block_size=2, events=True)
    remember(pool, [0, 1, 1, 0, 0, 1])
    pool.take_events()
    pool.evict(8)
    removed = [digest for event in pool.take_events() for digest in event.block_hashes]
    assert removed == hash_blocks([0, 1, 1, 0, 0, 1], block_size=2)[::-1]


def test_reset_and_bump_generation_clear_with_one_event() -> None:
    for clear in (BlockPool.reset, BlockPool.bump_generation):
        pool = BlockPool(8, block_size=2, events=True)
        remember(pool, [0, 1, 1, 0])
        pool.take_events()
        clear(pool)
        assert pool.take_events() == [AllBlocksCleared()]
        pool.evict(8)
        assert pool.take_events() == []


def test_a_refused_reset_is_no_event() -> None:
    pool = BlockPool(8, block_size=2, events=True)
    compute(pool, [0, 1]).preempt()
    seq = compute(pool, [0, 1, 1])
    pool.take_events()
    assert not pool.reset()
    assert pool.take_events() == []
    assert not seq.is_closed


def test_what_an_older_generation_publishes_is_no_news() -> None:
    pool = BlockPool(8, block_size=2, events=True)
    seq = compute(pool, [0, 1, 1])
    pool.bump_generation()
    pool.take_events()
    seq.append([0, 0, 1])
    run(pool, seq)
    seq.close()
    pool.evict(8)
    assert pool.take_events() == []


def test_a_pool_without_events_says_so() -> None:
    pool = BlockPool(2, block_size=2)
    remember(pool, [0] * 4, [1] * 4)
    with pytest.raises(StateError, match="expected a pool with events=True, got one without"):
        pool.take_events()


def test_events_are_taken_once() -> None:
    pool = BlockPool(2, block_size=2, events=True)
    remember(pool, [0] * 4)
    assert len(pool.take_events()) == 1
    assert pool.take_events() == []


def test_an_abandoned_step_stores_nothing() -> None:
    pool = BlockPool(2, block_size=2, events=True)
    seq = pool.open([0] * 4)
    pool.abandon(pool.reserve(seq, 4))
    assert pool.take_events() == []


def test_tenants_are_told_apart_by_extras_and_digest() -> None:
    pool = BlockPool(8, block_size=2, events=True)
    remember(pool, [0, 1, 1, 0])
    remember(pool, [0, 1, 1, 0], cache_salt="red")
    remember(pool, [0, 1, 1, 0], cache_salt="blue")
    events = pool.take_events()
    assert len(events) == 3
    stored = [event for event in events if isinstance(event, BlockStored)]
    for event, salt in zip(stored, (None, "red", "blue"), strict=True):
        assert event.block_hashes == hash_blocks([0, 1, 1, 0], block_size=2, cache_salt=salt)
        assert event.extras[1] == b""
    assert len({event.extras[0] for event in stored}) == 3
    assert stored[0].extras[0] == b""
    assert b"red" in stored[1].extras[0]


def test_events_that_nobody_takes_are_kept_up_to_the_stated_number() -> None:
    pool = BlockPool(8, block_size=2, events=True)
    for i in range(2_048):  # a block stored and removed
        remember(pool, [i, i])
        pool.evict(1)
    assert pool.stats().num_dropped_events == 0
    remember(pool, [0, 1])
    pool.evict(1)
    assert pool.stats().num_dropped_events == 4_098
    assert pool.take_events() == [AllBlocksCleared()]
    remember(pool, [0, 1])
    assert [type(event) for event in pool.take_events()] == [BlockStored]
    assert pool.stats().num_dropped_events == 4_098


def test_events_taken_too_late_are_told_anew_and_replay_to_the_same() -> None:
    rng = random.Random(0)
    pool = BlockPool(6, block_size=2, events=True)
    watcher = Watcher(pool)
    for _ in range(3):
        for _ in range(1_500):
            tokens, salt, _ = rng.choice(UNIVERSE)
            remember(pool, tokens, cache_salt=salt)
        pool.bump_generation()
        remember(pool, [0, 1] * 3, [0, 1, 1, 1])
        num_dropped = pool.stats().num_dropped_events
        watcher.listen()
        assert watcher.prompts == hittable(pool)
        remember(pool, [1, 0] * 3)
        watcher.listen()
        assert watcher.prompts == hittable(pool)
        assert pool.stats().num_dropped_events == num_dropped > 0


def test_what_changes_while_all_is_told_anew_is_told_too() -> None:
    rng = random.Random(0)
    pool = BlockPool(4_000, block_size=1, events=True)

    def change(num_prompts: int) -> None:
        for _ in range(num_prompts):
            remember(pool, [rng.randrange(8) for _ in range(rng.randrange(1, 40))])
            pool.evict(rng.randrange(8))

    change(2_000)
    assert pool.stats().num_dropped_events > 0
    watcher = Watcher(pool)
    with ThreadPoolExecutor(1) as other:
        changing = other.submit(change, 300)
        while not changing.done():
            watcher.listen()
        changing.result()
    watcher.listen()
    assert set(watcher.prompts) == set(digests(pool)) - {None}
    assert len(watcher.prompts) > 2_000
