"""The answer to "why was this not found?" is the true one, and tells nobody what others have sent."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from pool_driving import observe, remember

from pagedkv import Adapter, BlockPool, Explanation, Media
from pagedkv.explanation import REASONS


def reason(pool: BlockPool, tokens: object, **options: object) -> str:
    return pool.explain(tokens, **options).reason  # type: ignore[arg-type]


# ---------------------------------------------------------------------- each reason


def test_a_hit_is_a_hit_and_a_short_tail_is_one() -> None:
    pool = BlockPool(8, block_size=4)
    remember(pool, range(8))
    assert pool.explain(range(8)) == Explanation(8, 8, "hit", 8)
    assert pool.explain(range(6)) == Explanation(6, 4, "hit", 6)  # a run inside the second block
    assert pool.explain(range(10)) == Explanation(8, 8, "short_tail", 8)
    assert pool.explain([]) == Explanation(0, 0, "hit", 0)
    assert reason(pool, [9, 9]) == "short_tail"


def test_the_first_token_that_differs_is_named_with_what_stands_there() -> None:
    pool = BlockPool(8, block_size=4)
    remember(pool, range(8))
    assert pool.explain([0, 1, 2, 3, 4, 5, 70, 71]) == Explanation(6, 4, "differs", 6, expected_token=6)
    assert pool.explain([*range(4), 90, 91, 92, 93]) == Explanation(4, 4, "differs", 4, expected_token=4)


def test_a_token_that_is_said_to_differ_does_stand_at_the_position() -> None:
    """Where only whole blocks are reused, and where it is a picture that differs, no token does."""
    whole = BlockPool(8, block_size=4, token_granular=False)
    remember(whole, range(8))
    answer = whole.explain([0, 1, 2, 3, 4, 5, 70, 71])
    assert (answer.reason, answer.position, answer.expected_token) == ("differs", 4, None)

    pool = BlockPool(8, block_size=4)
    remember(pool, [7] * 8, extras=[Media(5, 2, b"a" * 32)])
    answer = pool.explain([7, 7, 7, 7, 7, 7, 7, 9], extras=[Media(5, 2, b"b" * 32)])
    assert (answer.reason, answer.position, answer.expected_token) == ("differs", 5, None)


@pytest.mark.parametrize("by", ["capacity", "request", "quota", "reset"])
def test_what_was_evicted_is_said_to_be_with_the_time_and_the_cause(by: str) -> None:
    pool = BlockPool(2, block_size=4, clock="manual")
    if by == "quota":
        pool.set_quota("s", 1)
    remember(pool, range(4), cache_salt="s")
    assert reason(pool, range(4), cache_salt="s") == "hit"
    pool.advance(1.5)
    if by == "capacity":
        pool.free(pool.allocate(2))
    elif by == "request":
        pool.evict(1)
    elif by == "quota":
        remember(pool, range(50, 54), cache_salt="s")
    else:
        assert pool.reset()
    pool.advance(1.0)
    answer = pool.explain(range(4), cache_salt="s")
    assert answer == Explanation(0, 0, "evicted", 0, evicted_at_s=1.5, evicted_by=by)
    remember(pool, range(4), cache_salt="s")
    assert reason(pool, range(4), cache_salt="s") == "hit"


def test_the_history_has_as_many_entries_as_the_pool_has_blocks() -> None:
    pool = BlockPool(4, block_size=4)
    prompts = [[i] * 4 for i in range(12)]
    remember(pool, *prompts)
    pool.free(pool.allocate(4))
    reasons = [reason(pool, prompt) for prompt in prompts]
    assert reasons == ["unknown"] * 8 + ["evicted"] * 4
    assert reason(pool, [99] * 4) == "unknown"


# ---------------------------------------------------------------------- the newest event counts


@pytest.mark.parametrize("num_bumps", [1, 2, 5])
def test_blocks_of_any_older_generation_are_said_to_be_of_one(num_bumps: int) -> None:
    pool = BlockPool(8, block_size=4)
    remember(pool, range(8))
    for _ in range(num_bumps):
        pool.bump_generation()
    assert reason(pool, range(8)) == "generation"
    remember(pool, range(4))
    assert pool.explain(range(8)).num_block_tokens == 4
    assert reason(pool, range(8)) == "generation"


def test_an_eviction_before_the_block_was_there_again_is_forgotten() -> None:
    pool = BlockPool(8, block_size=4)
    remember(pool, range(8))
    pool.evict(8)
    assert reason(pool, range(8)) == "evicted"
    remember(pool, range(8))
    pool.bump_generation()
    assert reason(pool, range(8)) == "generation"


# ---------------------------------------------------------------------- tenants


def test_another_salt_is_told_to_operators_only() -> None:
    pool = BlockPool(16, block_size=4)
    remember(pool, range(8), cache_salt="theirs")
    for options in ({"cache_salt": "ours"}, {}, {"extras": [Adapter("a", b"1")]}):
        assert pool.explain(range(8), **options) == Explanation(0, 0, "unknown", 0)
        assert pool.explain(range(8), **options, across_tenants=True) == Explanation(0, 0, "other_salt", 0)
    assert reason(pool, range(90, 98), across_tenants=True) == "unknown"


def test_another_salt_is_seen_wherever_in_the_prompt_its_block_stands() -> None:
    pool = BlockPool(16, block_size=4)
    remember(pool, range(4), cache_salt="ours")
    remember(pool, range(12), cache_salt="theirs")
    answer = pool.explain(range(12), cache_salt="ours", across_tenants=True)
    assert answer == Explanation(4, 4, "other_salt", 4)
    assert reason(pool, range(12), cache_salt="ours") == "unknown"


def test_another_salt_is_seen_where_ours_would_enter_later() -> None:
    pool = BlockPool(8, block_size=4)
    remember(pool, range(12), cache_salt="theirs", salt_from=4)
    options = {"cache_salt": "ours", "salt_from": 8, "across_tenants": True}
    assert pool.explain([*range(8), 50, 51, 52, 53], **options) == Explanation(4, 4, "other_salt", 4)


def test_another_salt_is_seen_with_pictures_too() -> None:
    pool, picture = BlockPool(16, block_size=4), Media(1, 2, b"a" * 32)
    remember(pool, range(4), cache_salt="theirs", extras=[picture])
    assert reason(pool, range(4), cache_salt="ours", extras=[picture], across_tenants=True) == "other_salt"
    other = Media(1, 2, b"b" * 32)
    assert reason(pool, range(4), cache_salt="ours", extras=[other], across_tenants=True) == "unknown"


SALTS = st.sampled_from([None, "a", "b"])
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=8)


@given(
    history=st.lists(
        st.tuples(
            PROMPTS, SALTS, st.sampled_from(["remember", "remember", "remember", "evict", "bump", "reset"])
        ),
        max_size=10,
    ),
    asked=PROMPTS,
    others=st.lists(PROMPTS, max_size=4),
)
def test_what_other_tenants_do_changes_no_answer_but_by_pushing_blocks_out(
    history: list[tuple[list[int], str | None, str]], asked: list[int], others: list[list[int]]
) -> None:
    """Two pools with the same history of ours, one of them with other tenants besides."""
    alone, shared = (BlockPool(64, block_size=2, clock="manual") for _ in range(2))
    for tokens, _, verb in history:
        for pool in (alone, shared):
            if verb == "remember":
                remember(pool, tokens, cache_salt="ours")
            elif verb == "bump":
                pool.bump_generation()
            elif verb == "reset":
                pool.reset()
            else:
                pool.evict(64)
        for theirs in others:
            remember(shared, theirs, cache_salt="theirs")
    before = observe(shared)
    answer = shared.explain(asked, cache_salt="ours")
    assert answer == alone.explain(asked, cache_salt="ours")
    assert observe(shared) == before
    assert answer.reason in REASONS
    found = shared.match(asked, cache_salt="ours")
    assert (answer.num_cached_tokens, answer.num_block_tokens) == (found.num_tokens, found.num_block_tokens)
    assert answer.position == answer.num_cached_tokens
    assert (answer.reason == "hit") == (found.num_tokens == len(asked))
    assert (answer.evicted_by is not None) == (answer.reason == "evicted")
    if answer.expected_token is not None:
        assert answer.expected_token != asked[answer.position]
