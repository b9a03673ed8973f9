"""Pages that a copy in flight reads: mistakes of other KV caches, as promises that this pool keeps."""

from __future__ import annotations

import contextlib
import gc

import pytest
from pool_driving import NotedKV, compute, digests, drain, num_block_tokens, observe, remember, run

from pagedkv import BlockPool, Fence, OutOfBlocksError, Sequence, StateError, hash_blocks


def compute_noted(pool: BlockPool, kv: NotedKV, seq: Sequence) -> None:
    step = pool.reserve(seq, seq.num_uncached_tokens)
    kv.execute(pool.prepare(step), [kv.causes(seq.token_ids.tolist())])
    pool.commit(step)
    pool.check_integrity()


def preempt_until_it_fits(pool: BlockPool, seq: Sequence, victims: list[Sequence]) -> list[Sequence]:
    """What a scheduler does: it asks first what a victim would give, and takes none in vain."""
    preempted = []
    for victim in victims:
        with contextlib.suppress(OutOfBlocksError):
            run(pool, seq)
            return preempted
        if victim.num_releasable_blocks > 0:
            victim.preempt()
            preempted.append(victim)
    with contextlib.suppress(OutOfBlocksError):
        run(pool, seq)
    return preempted


# ---------------------------------------------------------------------- preemption


def test_a_scheduler_preempts_nobody_whose_pages_would_not_come_free() -> None:
    """Pages were held until a running step had ended; victims that gave nothing were preempted (vLLM)."""
    pool = BlockPool(5, block_size=4)
    b, c = compute(pool, range(100, 107)), compute(pool, range(200, 207))
    waiting = pool.open(range(7))
    pool.allocate(1)
    fence = pool.fence([b])
    assert [seq.num_releasable_blocks for seq in (b, c)] == [0, 2]
    assert preempt_until_it_fits(pool, waiting, [b, c]) == [c]
    assert waiting.num_computed_tokens == 7
    assert not set(waiting.block_ids.tolist()) & set(b.block_ids.tolist())
    fence.release()
    assert b.num_releasable_blocks == 2


def test_where_all_is_fenced_nobody_is_preempted_and_the_request_waits() -> None:
    pool = BlockPool(4, block_size=4)
    b, c = compute(pool, range(100, 107)), compute(pool, range(200, 207))
    waiting = pool.open(range(7))
    fence = pool.fence([b, c])
    assert preempt_until_it_fits(pool, waiting, [b, c]) == []
    assert waiting.num_computed_tokens == 0
    fence.release()
    assert preempt_until_it_fits(pool, waiting, [b, c]) == [b]
    assert waiting.num_computed_tokens == 7


def test_pages_shared_with_somebody_are_not_promised() -> None:
    pool = BlockPool(8, block_size=4)
    seq = compute(pool, range(10))
    assert seq.num_releasable_blocks == 3
    other = compute(pool, range(9))
    assert (seq.num_releasable_blocks, other.num_releasable_blocks) == (1, 1)
    fork = seq.fork()
    assert seq.num_releasable_blocks == 0
    for each in (fork, other):
        each.close()
    before = pool.stats().num_free_blocks + pool.stats().num_evictable_blocks
    promised = seq.num_releasable_blocks
    seq.preempt()
    assert pool.stats().num_free_blocks + pool.stats().num_evictable_blocks == before + promised == 8
    assert seq.num_releasable_blocks == 0


# ---------------------------------------------------------------------- the copy


@pytest.mark.parametrize("end", [Sequence.preempt, Sequence.close], ids=["preempted", "closed"])
def test_a_page_that_is_being_copied_gets_no_new_owner_whatever_becomes_of_the_request(end: object) -> None:
    """Preempted while its pages were being stored, so the next owner's bytes were stored for them (vLLM)."""
    pool, kv = BlockPool(4, block_size=4), NotedKV(4)
    a = pool.open(range(7))
    compute_noted(pool, kv, a)
    pages = a.block_ids.tolist()
    fence = pool.fence(a)
    end(a)  # type: ignore[operator]
    copied = {
        slot: kv.slots[slot] for page in pages for slot in range(4 * page, 4 * page + 4) if slot in kv.slots
    }
    assert len(copied) == 7
    b = pool.open(range(100, 108))
    compute_noted(pool, kv, b)
    assert not set(pages) & set(b.block_ids.tolist())
    assert pool.evict(4) == 0
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)
    assert not pool.reset()
    assert {slot: kv.slots[slot] for slot in copied} == copied  # what the copy reads, at its very end
    assert pool.stats().num_fenced_blocks == 2
    fence.release()
    assert pool.stats().num_fenced_blocks == 0
    assert sorted(pool.allocate(2).tolist()) == sorted(pages)


def test_who_goes_on_writing_behind_a_fence_writes_elsewhere() -> None:
    """The partly filled last page was being stored while its request wrote the next token into it."""
    pool, kv = BlockPool(4, block_size=4), NotedKV(4)
    seq = pool.open(range(6))
    compute_noted(pool, kv, seq)
    tail = int(seq.block_ids[1])
    with pool.fence(seq):
        seq.append([6, 7])
        step = pool.reserve(seq, 2)
        assert step.copies == [(tail, seq.block_ids[1], 2)]
        kv.execute(pool.prepare(step), [kv.causes(range(8))])
        pool.commit(step)
        assert 4 * tail + 2 not in kv.slots
    assert num_block_tokens(pool, range(8)) == 8
    seq.append([8])
    compute_noted(pool, kv, seq)


# ---------------------------------------------------------------------- release


def test_a_fence_gives_back_exactly_what_it_took() -> None:
    pool = BlockPool(8, block_size=4)
    a = compute(pool, range(9))
    b = compute(pool, range(8))  # shares two pages
    before = observe(pool, a, b)
    fences = [pool.fence([a, b]), pool.fence([b]), pool.fence([a, a]), pool.fence([])]
    assert pool.stats().num_fenced_blocks == 3
    for fence in (fences[1], fences[3], fences[0], fences[2]):
        assert not fence.is_released
        fence.release()
        assert fence.is_released
        pool.check_integrity()
    assert observe(pool, a, b) == before


def test_a_fence_released_twice_says_so_and_changes_nothing() -> None:
    """A release that came twice took a reference that belonged to somebody else (SGLang)."""
    pool = BlockPool(4, block_size=4)
    seq = compute(pool, range(6))
    with pool.fence(seq) as fence:
        pass
    before = observe(pool, seq)
    with pytest.raises(StateError, match="expected a fence that holds, got a released one"):
        fence.release()
    assert observe(pool, seq) == before
    assert pool.allocate(2).tolist() != seq.block_ids.tolist()


def test_a_fence_is_released_by_the_end_of_its_block_and_by_the_garbage_collector() -> None:
    pool = BlockPool(4, block_size=4)
    seq = compute(pool, range(6))
    with contextlib.suppress(KeyError), pool.fence(seq):
        raise KeyError
    assert pool.stats().num_fenced_blocks == 0
    fence: Fence | None = pool.fence(seq)
    seq.close()
    assert pool.stats().num_fenced_blocks == 2
    del fence
    gc.collect()
    assert pool.stats().num_fenced_blocks == 0
    assert pool.stats().num_free_blocks + pool.stats().num_evictable_blocks == 4
    pool.check_integrity()


def test_pages_released_late_are_evicted_in_the_order_of_those_released_at_once() -> None:
    """The path that waited for a copy released pages in another order than the direct one (vLLM)."""
    pool = BlockPool(8, block_size=4)
    a, b = compute(pool, range(12)), compute(pool, range(50, 58))
    fence = pool.fence([a, b])
    a.close()
    b.close()
    assert pool.stats().num_evictable_blocks == 0
    fence.release()
    names = digests(pool)
    expected = hash_blocks(range(12), block_size=4)[::-1] + hash_blocks(range(50, 58), block_size=4)[::-1]
    assert [names[page] for page in drain(pool)] == expected


def test_a_fence_on_blocks_of_an_older_generation_keeps_them_and_nobody_finds_them() -> None:
    pool = BlockPool(4, block_size=4)
    seq = compute(pool, range(8))
    fence = pool.fence(seq)
    pool.bump_generation()
    seq.close()
    assert pool.evict(4) == 0
    assert pool.match(range(8)).num_tokens == 0
    fence.release()
    assert pool.evict(4) == 2
    remember(pool, range(8))
    assert num_block_tokens(pool, range(8)) == 8
