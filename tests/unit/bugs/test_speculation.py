"""Tokens that may be rejected: mistakes of other KV caches, as promises that this pool keeps."""

from __future__ import annotations

import pytest
from pool_driving import NotedKV, compute, num_block_tokens, observe

from pagedkv import BlockPool, OutOfBlocksError, Sequence, hash_blocks
from pagedkv.events import BlockStored


def prefill(pool: BlockPool, kv: NotedKV, seq: Sequence, num_accepted: int | None = None) -> None:
    step = pool.reserve(seq, seq.num_uncached_tokens)
    kv.execute(pool.prepare(step), [kv.causes(seq.token_ids.tolist())])
    pool.commit(step, num_accepted)
    pool.check_integrity()


def speculate(pool: BlockPool, kv: NotedKV, seq: Sequence, draft: list[int], num_accepted: int) -> None:
    """Compute a draft and keep its first tokens, as a verifier does."""
    seq.append(draft)
    prefill(pool, kv, seq, num_accepted)


def test_pages_for_a_draft_are_taken_before_any_of_it_is_written() -> None:
    """Look-ahead wrote past the last page that the request had (exllamav2, vLLM)."""
    pool = BlockPool(3)
    seq = compute(pool, range(14))
    assert len(seq.block_ids) == 1
    seq.append([90, 91, 92, 93])
    step = pool.reserve(seq, 4)
    first, second = seq.block_ids.tolist()
    tables = pool.prepare(step)
    assert tables.positions.tolist() == [14, 15, 16, 17]
    assert tables.slot_mapping.tolist() == [16 * first + 14, 16 * first + 15, 16 * second, 16 * second + 1]
    assert tables.block_table.tolist() == [[first, second]]


def test_a_draft_without_room_is_refused_whole_and_its_beginning_still_fits() -> None:
    """At 30 of 32 tokens five more were computed: three were written behind the last page (vLLM)."""
    pool, kv = BlockPool(2), NotedKV(16)
    seq = pool.open(range(30))
    prefill(pool, kv, seq)
    seq.append([90, 91, 92, 93, 94])
    before = observe(pool, seq)
    with pytest.raises(OutOfBlocksError) as refusal:
        pool.reserve(seq, 5)
    assert (refusal.value.needed, refusal.value.free, refusal.value.evictable) == (1, 0, 0)
    assert observe(pool, seq) == before
    step = pool.reserve(seq, 2)
    tables = pool.prepare(step)
    assert tables.positions.tolist() == [30, 31]
    assert tables.slot_mapping.tolist() == [16 * seq.block_ids[1] + 14, 16 * seq.block_ids[1] + 15]
    kv.execute(tables, [kv.causes(seq.token_ids.tolist())])
    pool.commit(step)
    seq.truncate(32)
    assert (seq.num_tokens, seq.num_uncached_tokens, seq.num_committed_tokens) == (32, 0, 32)


@pytest.mark.parametrize("num_accepted", range(8))
@pytest.mark.parametrize("num_before", [5, 6, 7, 8])
def test_rejected_tokens_leave_no_page_no_name_and_no_event(num_before: int, num_accepted: int) -> None:
    """A draft that crossed a block was published with the tokens that were rejected (vLLM)."""
    pool, kv = BlockPool(8, block_size=4, events=True), NotedKV(4)
    tokens, draft = list(range(num_before)), list(range(90, 97))
    seq = pool.open(tokens)
    prefill(pool, kv, seq)
    speculate(pool, kv, seq, draft, num_accepted)
    accepted = tokens + draft[:num_accepted]
    assert seq.token_ids.tolist() == accepted
    assert seq.num_computed_tokens == len(accepted)
    assert len(seq.block_ids) == -(-len(accepted) // 4)
    assert seq.num_committed_tokens == num_block_tokens(pool, tokens + draft) == len(accepted) // 4 * 4
    stored = [event for event in pool.take_events() if isinstance(event, BlockStored)]
    assert [token for event in stored for token in event.token_ids] == accepted[: len(accepted) // 4 * 4]
    # And it goes on from there as if there had been no draft.
    speculate(pool, kv, seq, [50, 51, 52, 53], 4)
    assert seq.block_hashes == hash_blocks([*accepted, 50, 51, 52, 53], block_size=4)
    assert num_block_tokens(pool, [*accepted, 50, 51, 52, 53]) == (len(accepted) + 4) // 4 * 4


def test_a_draft_of_one_sample_is_nothing_to_its_siblings() -> None:
    pool, kv = BlockPool(8, block_size=4), NotedKV(4)
    seq = pool.open(range(6))
    prefill(pool, kv, seq)
    sibling = seq.fork()
    speculate(pool, kv, seq, [90, 91, 92], 1)
    assert sibling.token_ids.tolist() == list(range(6))
    speculate(pool, kv, sibling, [60, 61], 2)
    assert seq.token_ids.tolist() == [*range(6), 90]
    assert num_block_tokens(pool, [*range(6), 60, 61]) == 8
    assert num_block_tokens(pool, [*range(6), 90, 91]) == 4
