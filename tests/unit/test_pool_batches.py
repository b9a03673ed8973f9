"""Several sequences at once, tables that nobody else writes, and times beyond what the pages' clock holds."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv import BlockPool, Breakpoint, Sequence, StateError, UsageError

DAY_S = 86_400.0


def compute(pool: BlockPool, tokens: range, **options: object) -> Sequence:
    seq = pool.open(tokens, **options)  # type: ignore[arg-type]
    pool.commit(pool.reserve(seq, seq.num_uncached_tokens))
    return seq


def test_sequences_closed_together_are_evicted_one_after_the_other_each_deepest_first() -> None:
    pool = BlockPool(8, block_size=4)
    a, b = compute(pool, range(8)), compute(pool, range(100, 108))
    order = [*a.block_ids[::-1], *b.block_ids[::-1]]
    pool.close([a, b])
    assert pool.snapshot().eviction_rank[order].tolist() == [0, 1, 2, 3]
    assert a.is_closed
    assert b.is_closed
    pool.check_integrity()


def test_a_refused_close_closes_none() -> None:
    pool, other = BlockPool(8, block_size=4), BlockPool(8, block_size=4)
    a, b, foreign = compute(pool, range(8)), compute(pool, range(100, 108)), compute(other, range(8))
    for seqs, error in (([a, a], StateError), ([a, foreign], UsageError), ([a, 7], UsageError)):
        with pytest.raises(error):
            pool.close(seqs)  # type: ignore[arg-type]
        assert not a.is_closed
    pool.close(b)
    with pytest.raises(StateError):
        pool.close([a, b])
    assert not a.is_closed
    pool.close([])
    pool.check_integrity()


def test_a_block_table_cannot_be_written_since_later_steps_believe_it() -> None:
    pool = BlockPool(8, block_size=4)
    seq = pool.open(range(6))
    tables = pool.prepare(pool.reserve(seq, 6))
    with pytest.raises(ValueError, match="read-only"):
        tables.block_table[:] = 7


def test_a_quota_set_after_weeks_of_rest_evicts_leaves_first() -> None:
    pool = BlockPool(16, block_size=4, clock="manual")
    compute(pool, range(12), cache_salt="t").close()
    pool.advance(49 * DAY_S)
    pool.touch(range(4), cache_salt="t")
    pool.advance(DAY_S)
    pool.set_quota("t", 3)
    pool.check_integrity()
    compute(pool, range(100, 108), cache_salt="t").close()
    pool.check_integrity()
    assert pool.match(range(12), cache_salt="t").num_tokens == 4


def test_many_ends_at_once_are_met_in_several_calls() -> None:
    pool = BlockPool(4000, block_size=1, clock="manual")
    compute(pool, range(3000), breakpoints=[Breakpoint(3000, 60.0)]).close()
    pool.advance(61)
    for _ in range(5):
        pool.evict(0)
        pool.check_integrity()
    assert set(pool.snapshot().priority.tolist()) == {35}


def test_the_operator_sees_a_salt_that_enters_later() -> None:
    pool = BlockPool(16, block_size=4)
    compute(pool, range(16), cache_salt="b", salt_from=8).close()
    assert pool.explain(range(16)).reason == "unknown"
    assert pool.explain(range(16), across_tenants=True).reason == "other_salt"
    found = pool.explain(range(16), cache_salt="a", salt_from=4, across_tenants=True)
    assert (found.reason, found.num_cached_tokens) == ("other_salt", 4)


def test_a_salt_position_without_salts_is_refused_in_a_queue() -> None:
    with pytest.raises(UsageError, match="salt_from: expected cache_salts with it"):
        BlockPool(4).match_lengths([np.arange(4)], salt_from=3)
