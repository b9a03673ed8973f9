"""A pool's page map agrees with all else that the pool tells, and with what it does next."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import BlockPool, PoolSnapshot, Retention, Sequence
from pagedkv.snapshot import STATES

SALTS = (None, "tenant-a", "tenant-b")


def run(pool: BlockPool, tokens: list[int], **options: object) -> Sequence:
    seq = pool.open(tokens, **options)  # type: ignore[arg-type]
    pool.commit(pool.reserve(seq, seq.num_uncached_tokens))
    return seq


@st.composite
def used_pools(draw: st.DrawFn) -> tuple[BlockPool, list[Sequence]]:
    """A pool in which prompts ran that begin alike, of which some still run."""
    pool = BlockPool(64, block_size=2, clock="manual")
    running = []
    for _ in range(draw(st.integers(0, 8))):
        tokens = draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
        salt = draw(st.sampled_from(SALTS))
        where = {"cache_salt": salt, "salt_from": draw(st.sampled_from([0, 4])) if salt else None}
        match draw(st.sampled_from(["run", "run", "close", "retain", "touch", "advance"])):
            case "run":
                priority = draw(st.sampled_from([10, 35, 80]))
                ttl_s = draw(st.sampled_from([None, 50.0]))
                wish = Retention(draw(st.integers(0, 6)), None, priority, ttl_s)
                running.append(run(pool, tokens, retention=[wish], **where))
            case "close" if running:
                running.pop(draw(st.integers(0, len(running) - 1))).close()
            case "retain":
                pool.retain(tokens, priority=60, ttl_s=30.0, **where)
            case "touch":
                pool.touch(tokens, **where)
            case _:
                pool.advance(draw(st.integers(1, 9)))
    return pool, running


@given(used_pools())
def test_totals_are_those_of_the_statistics_and_of_the_tenants(
    used: tuple[BlockPool, list[Sequence]],
) -> None:
    pool, running = used
    snapshot, stats = pool.snapshot(), pool.stats()
    counts = dict(zip(STATES, np.bincount(snapshot.state, minlength=len(STATES)).tolist(), strict=True))
    assert counts == {
        "free": stats.num_free_blocks,
        "writable": stats.num_writable_blocks,
        "committed": stats.num_committed_blocks,
        "evictable": stats.num_evictable_blocks,
    }
    assert snapshot.num_refs.sum() == sum(len(seq.block_ids) for seq in running)
    of_tenants = {salt: int((snapshot.tenant == i).sum()) for i, salt in enumerate(snapshot.salts)}
    assert of_tenants == {salt: usage.num_blocks for salt, usage in pool.tenants().items()}
    assert (snapshot.now_s, snapshot.block_size, snapshot.num_blocks) == (pool.now_s, 2, 64)


@given(used_pools())
def test_fields_of_a_page_agree_with_its_state(used: tuple[BlockPool, list[Sequence]]) -> None:
    used[0].evict(0)  # ends what has lapsed by now
    snapshot = used[0].snapshot()
    published = snapshot.state >= 2
    evictable = snapshot.state == 3
    assert ((snapshot.depth >= 0) == published).all()
    assert ((snapshot.parent >= 0) == (snapshot.depth > 0)).all()
    inner = np.flatnonzero(snapshot.parent >= 0)
    assert (snapshot.depth[snapshot.parent[inner]] == snapshot.depth[inner] - 1).all()
    assert (snapshot.priority[snapshot.parent[inner]] >= snapshot.priority[inner]).all()
    assert ((snapshot.num_refs > 0) == np.isin(snapshot.state, (1, 2))).all()
    assert ((snapshot.eviction_rank >= 0) == evictable).all()
    assert sorted(snapshot.eviction_rank[evictable]) == list(range(evictable.sum()))
    assert (np.isfinite(snapshot.idle_s) == evictable).all()
    assert (snapshot.priority[snapshot.retained_s == 0] == 35).all()
    assert (snapshot.tenant[~published] == -1).all()


@given(used_pools())
def test_pages_are_evicted_in_the_order_that_the_map_shows(used: tuple[BlockPool, list[Sequence]]) -> None:
    pool, _ = used
    pool.evict(0)  # ends what has lapsed by now
    order = pool.snapshot().next_evicted(64).tolist()
    for page in order:
        assert pool.snapshot().state[page] == 3
        assert pool.evict(1) == 1
        assert pool.snapshot().state[page] == 0
    assert pool.evict(1) == 0


def test_a_map_of_a_real_pool_goes_through_a_file(tmp_path: Path) -> None:
    pool = BlockPool(8, clock="manual")
    run(pool, list(range(40)), cache_salt="tenant").close()
    pool.retain(list(range(40)), cache_salt="tenant", priority=80, ttl_s=7.5, end=16)
    pool.advance(2.5)
    snapshot = pool.snapshot()
    snapshot.save(tmp_path / "pool.npz")
    loaded = PoolSnapshot.load(tmp_path / "pool.npz")
    first = int(np.flatnonzero(loaded.depth == 0)[0])
    assert loaded.state[first] == 3
    assert loaded.priority[first] == 80
    assert loaded.retained_s[first] == pytest.approx(5.0)
    assert loaded.idle_s[first] == pytest.approx(2.5)
    assert loaded.salts == [b"tenant"]
    for name, value in snapshot._asdict().items():
        np.testing.assert_array_equal(value, getattr(loaded, name))
