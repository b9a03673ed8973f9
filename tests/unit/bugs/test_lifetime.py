"""How long a page belongs to whom: mistakes of other KV caches, as promises that this pool keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from pool_driving import NotedKV, compute, digests, num_block_tokens, observe, remember, run

from pagedkv import BlockPool, OutOfBlocksError, Sequence, StateError, Step, hash_blocks

# ---------------------------------------------------------------------- what the index leads to


def test_a_page_taken_for_new_tokens_is_no_longer_found_under_the_old_ones() -> None:
    """A page got a new owner while the index still led to it, and served the new owner's KV (nano-vllm)."""
    pool = BlockPool(2, block_size=4)
    x, y, z = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]
    remember(pool, x)
    assert num_block_tokens(pool, x) == 4
    seqs = [pool.open(y), pool.open(z)]
    step = pool.reserve(seqs, [4, 4])
    assert num_block_tokens(pool, x) == 0  # taken, though not written yet
    pool.prepare(step)
    pool.commit(step)
    for seq in seqs:
        seq.close()
    assert [num_block_tokens(pool, tokens) for tokens in (x, y, z)] == [0, 4, 4]
    assert set(digests(pool)) == {hash_blocks(y, block_size=4)[0], hash_blocks(z, block_size=4)[0]}


def test_a_block_is_found_only_after_its_kv_was_written() -> None:
    """Pages entered the index when they were taken; whoever hit them meanwhile read garbage (TGI, vLLM)."""
    pool = BlockPool(8)
    tokens = list(range(32))
    first, same_moment = pool.open(tokens), pool.open(tokens)
    aborted = pool.reserve(first, 32)
    assert num_block_tokens(pool, tokens) == 0
    step = pool.reserve(same_moment, 32)
    assert step.num_new_tokens == [32]  # it plans all of them itself
    pool.abandon(aborted)
    first.close()
    assert num_block_tokens(pool, tokens) == 0
    pool.prepare(step)
    pool.commit(step)
    found = pool.match(tokens)
    assert found.num_block_tokens == 32
    assert found.block_ids.tolist() == same_moment.block_ids.tolist()


def test_two_sequences_of_one_step_do_not_read_each_others_unwritten_pages() -> None:
    """The same, with the two requests in one batch."""
    pool, kv = BlockPool(8, block_size=4), NotedKV(4)
    seqs = [pool.open([1] * 8), pool.open([1] * 8)]
    step = pool.reserve(seqs, [8, 8])
    assert not set(seqs[0].block_ids.tolist()) & set(seqs[1].block_ids.tolist())
    kv.execute(pool.prepare(step), [kv.causes([1] * 8)] * 2)
    pool.commit(step)


# ---------------------------------------------------------------------- a block computed twice


@pytest.mark.parametrize("survivor", [0, 1])
def test_evicting_one_copy_of_a_block_leaves_the_other_findable(survivor: int) -> None:
    """A block computed twice had one entry for two pages; evicting one page erased both (kvcached)."""
    pool = BlockPool(4)
    tokens = list(range(16))
    seqs = [pool.open(tokens), pool.open(tokens)]
    run(pool, *seqs)
    pages = [int(seq.block_ids[0]) for seq in seqs]
    assert pages[0] != pages[1]
    assert pool.digest_of(pages[0]) == pool.digest_of(pages[1]) == hash_blocks(tokens)[0]
    assert pool.stats().num_nodes == 1
    seqs[1 - survivor].close()
    seqs[survivor].close()
    assert pool.evict(1) == 1
    assert pool.match(tokens).block_ids.tolist() == [pages[survivor]]
    assert pool.evict(1) == 1
    assert num_block_tokens(pool, tokens) == 0
    assert pool.stats().num_free_blocks == 4


def test_evicting_a_surplus_copy_leaves_the_page_in_use_findable() -> None:
    pool = BlockPool(4)
    tokens = list(range(16))
    held, surplus = pool.open(tokens), pool.open(tokens)
    run(pool, held, surplus)
    surplus.close()
    assert pool.evict(4) == 1
    assert pool.match(tokens).block_ids.tolist() == held.block_ids.tolist()


# ---------------------------------------------------------------------- references


def test_a_page_listed_twice_in_one_release_is_not_freed_twice() -> None:
    """One release that named a page twice put it on the free list twice, and two owners got it (vLLM)."""
    pool = BlockPool(10)
    pages = pool.allocate(10).tolist()
    before = observe(pool)
    with pytest.raises(StateError):
        pool.free([pages[9], pages[9]])
    assert observe(pool) == before
    pool.free([pages[9]])
    pool.free(pages[:9])
    assert sorted(pool.allocate(10).tolist()) == list(range(10))
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)


def test_a_page_of_two_sequences_is_evictable_only_after_both_let_go() -> None:
    """References were counted by entries rather than owners, so one close took the page from the other."""
    pool = BlockPool(4, block_size=4)
    first = compute(pool, [1] * 5)
    second = compute(pool, [1] * 4 + [2])
    assert first.block_ids[0] == second.block_ids[0]
    for seq, evictable in ((first, 0), (second, 1)):
        seq.close()
        assert pool.stats().num_evictable_blocks == evictable
    assert pool.stats().num_free_blocks == 3


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_closing_a_family_in_any_order_spares_the_kv_of_those_that_stay(order: tuple[int, ...]) -> None:
    """A fork took no reference on what it shared, so closing one broke the other (MLC, TVM)."""
    pool, kv = BlockPool(12, block_size=4), NotedKV(4)

    def decode(seq: Sequence) -> None:
        step = pool.reserve(seq, seq.num_uncached_tokens)
        kv.execute(pool.prepare(step), [kv.causes(seq.token_ids.tolist())])
        pool.commit(step)

    seq = pool.open(range(18))
    decode(seq)
    child = seq.fork()
    family = [seq, child, child.fork()]
    for step, i in enumerate(order):
        family[i].close()
        taken = pool.allocate(pool.stats().num_free_blocks)
        assert len(taken) > 0
        kv.spoil(taken)
        pool.free(taken)
        for j in order[step + 1 :]:
            family[j].append(100 * j + step)
            decode(family[j])  # reads all that it has
        pool.check_integrity()
    assert pool.stats().num_writable_blocks == pool.stats().num_committed_blocks == 0
    taken = pool.allocate(12)
    assert sorted(taken.tolist()) == list(range(12))


def test_a_page_that_two_samples_hold_is_published_once() -> None:
    """Full pages that a quota had kept back were forked, and published by each of the two samples."""
    pool = BlockPool(8, block_size=4)
    pool.set_quota("red", 0)
    seq = compute(pool, range(8), cache_salt="red")
    fork = seq.fork()
    assert seq.num_committed_tokens == 0
    pool.set_quota("red", None)
    for i, each in enumerate((seq, fork)):
        each.append(8 + i)
        run(pool, each)
        pool.check_integrity()
        assert each.num_committed_tokens == 8
    assert pool.match(range(8), cache_salt="red").block_ids.tolist() == seq.block_ids[:2].tolist()
    assert pool.tenant_usage("red").num_blocks == pool.stats().num_committed_blocks == 2
    for each in (seq, fork):
        each.close()
    assert pool.evict(8) == 2


# ---------------------------------------------------------------------- aborted at any moment


def _begin(pool: BlockPool) -> tuple[Sequence, Step | None]:
    return pool.open(range(10)), None


def _reserve(pool: BlockPool) -> tuple[Sequence, Step | None]:
    seq = pool.open(range(10))
    return seq, pool.reserve(seq, 10)


def _prepare(pool: BlockPool) -> tuple[Sequence, Step | None]:
    seq, step = _reserve(pool)
    assert step is not None
    pool.prepare(step)
    return seq, step


def _commit_a_chunk(pool: BlockPool) -> tuple[Sequence, Step | None]:
    seq = pool.open(range(10))
    pool.commit(pool.reserve(seq, 6))
    return seq, None


def _reserve_a_second_chunk(pool: BlockPool) -> tuple[Sequence, Step | None]:
    seq, _ = _commit_a_chunk(pool)
    return seq, pool.reserve(seq, 4)


def _preempt_after_a_chunk(pool: BlockPool) -> tuple[Sequence, Step | None]:
    seq, _ = _commit_a_chunk(pool)
    seq.preempt()
    return seq, None


@pytest.mark.parametrize(
    ("stop", "num_published"),
    [
        (_begin, 0),
        (_reserve, 0),
        (_prepare, 0),
        (_commit_a_chunk, 4),
        (_reserve_a_second_chunk, 4),
        (_preempt_after_a_chunk, 4),
    ],
)
@pytest.mark.parametrize("end", ["close", "abandon then close", "close then abandon", "close then commit"])
def test_a_request_aborted_at_any_moment_leaves_what_it_had_published_and_nothing_else(
    stop: Callable[[BlockPool], tuple[Sequence, Step | None]], num_published: int, end: str
) -> None:
    """After a cancelled prefill its pages stayed in the index, unwritten (vLLM)."""
    pool = BlockPool(8, block_size=4)
    seq, step = stop(pool)
    if step is not None and end == "abandon then close":
        pool.abandon(step)
    seq.close()
    if step is not None and end == "close then commit":
        pool.commit(step)
    elif step is not None and end != "abandon then close":
        pool.abandon(step)
    pool.check_integrity()
    assert pool.match(range(10)).num_tokens == num_published
    assert pool.stats().num_evictable_blocks == num_published // 4
    assert pool.stats().num_free_blocks == 8 - num_published // 4
    again = compute(pool, range(10))
    assert again.num_cached_tokens == num_published
    again.close()
    assert num_block_tokens(pool, range(10)) == 8
