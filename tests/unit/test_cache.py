"""PagedKVCache end to end on a toy model: every step's logits are held to an oracle that has no cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pool_driving import observe
from toy_cache import MODEL, OTHER, PROMPT, checked_cache, generate, make_cache, remember
from toy_model import HEAD_DIM, NUM_KV_HEADS, SPEC

import pagedkv
from pagedkv import (
    PagedKVCache,
    UsageError,
)


@pytest.fixture
def cache() -> Iterator[PagedKVCache]:
    yield from checked_cache()


# --------------------------------------------------------------------------------- warm equals cold


@pytest.mark.parametrize("arrangement", ["block", "layer"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_every_storage_gives_the_same_answers(arrangement: Any, layout: Any) -> None:
    spec = pagedkv.KVCacheSpec.uniform(SPEC.num_layers, NUM_KV_HEADS, HEAD_DIM, layout=layout)
    cache = PagedKVCache(spec, 12, arrangement=arrangement)
    cache.pages.blocks.fill_(float("inf"))
    remember(cache, PROMPT[:48])
    with cache.open(PROMPT[:37] + OTHER[37:50]) as seq:
        assert seq.num_cached_tokens == 37
        assert generate(cache, seq, 3) == MODEL.greedy(PROMPT[:37] + OTHER[37:50], 3)


@pytest.mark.parametrize("num_shared", [1, 15, 16, 17, 31, 32, 33, 47])
def test_a_hit_that_ends_anywhere_gives_the_cold_answer(cache: PagedKVCache, num_shared: int) -> None:
    remember(cache, PROMPT[:64])
    prompt = PROMPT[:num_shared] + OTHER[num_shared:50]
    with cache.open(prompt) as seq:
        assert seq.num_cached_tokens == num_shared
        assert generate(cache, seq, 4) == MODEL.greedy(prompt, 4)
    # What the copy was taken from is as before.
    with cache.open(PROMPT[:64]) as seq:
        assert generate(cache, seq, 2) == MODEL.greedy(PROMPT[:64], 2)


def test_a_full_hit_shares_every_page_and_writes_nothing(cache: PagedKVCache) -> None:
    remember(cache, PROMPT[:48])
    before = cache.pages.blocks.clone()
    first, second = cache.open(PROMPT[:48]), cache.open(PROMPT[:48])
    assert first.num_cached_tokens == 47
    assert first.block_ids.tolist() == second.block_ids.tolist()
    step = cache.reserve([first, second], [1, 1])
    meta = cache.prepare(step)
    assert (meta.slot_mapping.tolist(), meta.seq_lens.tolist()) == ([-1, -1], [48, 48])
    MODEL.check(MODEL.forward(cache, meta), meta, [first, second])
    cache.commit(step)
    assert torch.equal(cache.pages.blocks.view(torch.int32), before.view(torch.int32))
    assert cache.stats().num_writable_blocks == 0
    # Both go on, each in pages of its own.
    for seq, token in ((first, 3), (second, 5)):
        cache.append(seq, token)
    MODEL.step(cache, [first, second])
    assert first.block_ids[:3].tolist() == second.block_ids[:3].tolist()
    assert first.block_ids[3] != second.block_ids[3]


def test_sequences_in_one_step_get_their_own_answers(cache: PagedKVCache) -> None:
    remember(cache, PROMPT[:40])
    prompts = [[*PROMPT[:40], 1, 2], PROMPT[:20] + OTHER[20:33], OTHER[:50], PROMPT[:32], [7]]
    seqs = [cache.open(prompt) for prompt in prompts]
    # Two whole blocks were published; a hit may end in one, and a full one leaves its last token.
    assert [seq.num_cached_tokens for seq in seqs] == [32, 20, 0, 31, 0]
    MODEL.step(cache, seqs)
    for _ in range(3):
        cache.append(seqs, [11] * 5)
        MODEL.step(cache, list(reversed(seqs)))
    for seq in seqs:
        seq.close()


@pytest.mark.parametrize("chunk", [1, 5, 16, 23])
def test_a_prompt_in_chunks_gives_the_answer_of_one_prefill(cache: PagedKVCache, chunk: int) -> None:
    remember(cache, PROMPT[:20])
    with cache.open(PROMPT[:60]) as seq:
        while seq.num_uncached_tokens:
            MODEL.step(cache, seq, [min(chunk, seq.num_uncached_tokens)])
        cache.append(seq, 3)
        MODEL.step(cache, seq)
        assert cache.match(PROMPT[:60]).num_block_tokens == 48


@pytest.mark.parametrize("num_kept", [0, 1, 15, 16, 17, 31, 32, 40, 48])
def test_truncate_and_append_gives_the_answer_of_the_new_tokens(cache: PagedKVCache, num_kept: int) -> None:
    remember(cache, PROMPT[:48])
    with cache.open(PROMPT[:48]) as seq, cache.open(PROMPT[:48]) as other:
        MODEL.step(cache, [seq, other])
        cache.truncate(seq, num_kept)
        cache.append(seq, OTHER[num_kept:55])
        assert generate(cache, seq, 2) == MODEL.greedy(PROMPT[:num_kept] + OTHER[num_kept:55], 2)
        # The page that the cut went through is somebody else's too.
        cache.append(other, 3)
        MODEL.step(cache, other)
    with cache.open(PROMPT[:48]) as seq:
        assert seq.num_cached_tokens == 47
        assert generate(cache, seq, 2) == MODEL.greedy(PROMPT[:48], 2)


def test_truncate_to_nothing_new_needs_one_token_to_compute(cache: PagedKVCache) -> None:
    with cache.open(PROMPT[:20]) as seq:
        MODEL.step(cache, seq)
        cache.truncate(seq, 18)
        assert seq.num_uncached_tokens == 0
        with pytest.raises(UsageError, match="num_new_tokens"):
            cache.reserve(seq, 1)


@pytest.mark.parametrize("num_tokens", [20, 32, 45])
def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened(
    cache: PagedKVCache, num_tokens: int
) -> None:
    seq = cache.open(PROMPT[:num_tokens])
    tokens = generate(cache, seq, 2)
    cache.preempt(seq)
    assert seq.block_ids.tolist() == []
    stats = cache.stats()
    assert stats.num_free_blocks + stats.num_evictable_blocks == 24
    remember(cache, OTHER[:60])  # others use the pages meanwhile
    step = cache.reserve(seq, seq.num_uncached_tokens)
    meta = cache.prepare(step)
    assert seq.num_cached_tokens == num_tokens // 16 * 16
    MODEL.check(MODEL.forward(cache, meta), meta, [seq])
    cache.commit(step)
    assert cache.stats().num_prompts == 2
    cache.append(seq, 3)
    MODEL.step(cache, seq)
    assert seq.token_ids.tolist() == PROMPT[:num_tokens] + tokens + [3]
    seq.close()


def test_a_preempted_sequence_whose_pages_were_taken_computes_again() -> None:
    cache = make_cache(4)
    seq = cache.open(PROMPT[:33])
    tokens = generate(cache, seq, 3)
    cache.preempt(seq)
    remember(cache, OTHER[:64])  # all four pages
    assert cache.match(PROMPT[:33]).num_tokens == 0
    assert generate(cache, seq, 3) == MODEL.greedy(PROMPT[:33] + tokens, 3)
    cache.check_integrity()


@pytest.mark.parametrize("written", [False, True])
def test_an_abandoned_step_can_be_tried_again(cache: PagedKVCache, written: bool) -> None:
    remember(cache, PROMPT[:48])
    with cache.open(PROMPT[:37] + OTHER[37:60]) as seq:
        assert seq.num_cached_tokens == 37
        before = observe(cache.pool, seq)
        step = cache.reserve(seq, 23)
        meta = cache.prepare(step)
        if written:  # rubbish, as from a kernel that failed half way
            rubbish = torch.full((23, NUM_KV_HEADS, HEAD_DIM), float("nan"))
            cache.write(0, rubbish, rubbish, meta)
        cache.abandon(step)
        assert observe(cache.pool, seq) == before
        assert generate(cache, seq, 3) == MODEL.greedy(PROMPT[:37] + OTHER[37:60], 3)


def test_rejected_tokens_leave_no_trace(cache: PagedKVCache) -> None:
    with cache.open(PROMPT[:30]) as seq:
        MODEL.step(cache, seq)
        cache.append(seq, OTHER[:6])  # a draft, of which two tokens hold
        step = cache.reserve(seq, 6)
        MODEL.forward(cache, cache.prepare(step))
        cache.commit(step, 2)
        assert seq.token_ids.tolist() == PROMPT[:30] + OTHER[:2]
        assert seq.num_computed_tokens == 32
        assert generate_after(cache, seq, 9) == MODEL.greedy(PROMPT[:30] + OTHER[:2] + [9], 3)
        assert cache.match(PROMPT[:30] + OTHER[:6]).num_tokens == 32


def generate_after(cache: PagedKVCache, seq: pagedkv.Sequence, token: int) -> list[int]:
    cache.append(seq, token)
    return generate(cache, seq, 3)


# -------------------------------------------------------------------------------------------- tenants


def test_two_salts_share_nothing(cache: PagedKVCache) -> None:
    remember(cache, PROMPT[:48], cache_salt="a")
    assert cache.match(PROMPT[:48], cache_salt="a").num_tokens == 48
    for salt in ("b", b"ab", None):
        assert cache.match(PROMPT[:48], cache_salt=salt).num_tokens == 0
        with cache.open(PROMPT[:48], cache_salt=salt) as seq, cache.open(PROMPT[:48], cache_salt="a") as mine:
            assert (seq.num_cached_tokens, mine.num_cached_tokens) == (0, 47)
            MODEL.step(cache, [seq, mine])
            assert not set(seq.block_ids) & set(mine.block_ids)
    assert cache.match(PROMPT[:48], cache_salt=b"a").num_tokens == 48


def test_a_cache_without_prefix_caching_finds_nothing() -> None:
    cache = make_cache(prefix_caching=False)
    remember(cache, PROMPT[:48])
    with cache.open(PROMPT[:48]) as seq:
        assert seq.num_cached_tokens == 0
        assert generate(cache, seq, 2) == MODEL.greedy(PROMPT[:48], 2)
    assert cache.stats().num_free_blocks == 24


def test_without_token_granularity_only_whole_blocks_are_found() -> None:
    cache = make_cache(token_granular=False)
    remember(cache, PROMPT[:48])
    with cache.open(PROMPT[:40] + OTHER[40:50]) as seq:
        assert seq.num_cached_tokens == 32
        MODEL.step(cache, seq)


def test_reset_forgets_everything_once_nothing_is_open(cache: PagedKVCache) -> None:
    with cache.open(PROMPT[:20]) as seq:
        MODEL.step(cache, seq)
        assert not cache.reset()
        assert cache.match(PROMPT[:20]).num_block_tokens == 16
    assert cache.reset()
    assert cache.match(PROMPT[:20]).num_tokens == 0
    assert cache.stats().num_free_blocks == 24
