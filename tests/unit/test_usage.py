"""A prompt's usage, and how others would report and price it: nothing is lost, nothing counted twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.errors import UsageError
from pagedkv.usage import Usage

TOKENS = st.integers(0, 5000)
TTLS = st.sampled_from([0.5, 60.0, 299.0, 300.0, 300.5, 3600.0, 86400.0])
USAGES = st.builds(Usage, TOKENS, TOKENS, st.dictionaries(TTLS, TOKENS, max_size=4))
LIMITS = st.integers(0, 6000)


def test_a_hit_of_96_in_100_tokens_is_told_as_it_is() -> None:
    usage = Usage(4, 96, {})
    assert usage.openai(min_tokens=0, step_tokens=1) == {
        "prompt_tokens": 100,
        "prompt_tokens_details": {"cached_tokens": 96},
    }
    assert usage.anthropic(min_tokens=0) == {
        "input_tokens": 4,
        "cache_read_input_tokens": 96,
        "cache_creation_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    }


@pytest.mark.parametrize(
    ("num_read", "num_cached"),
    [(0, 0), (96, 0), (1023, 0), (1024, 1024), (1151, 1024), (1152, 1152), (1999, 1920)],
)
def test_openai_knows_1024_tokens_and_then_steps_of_128(num_read: int, num_cached: int) -> None:
    report = Usage(2000 - num_read, num_read, {}).openai()
    assert report == {"prompt_tokens": 2000, "prompt_tokens_details": {"cached_tokens": num_cached}}


def test_anthropic_takes_what_is_too_short_back_into_the_input() -> None:
    assert Usage(10, 1000, {}).anthropic()["input_tokens"] == 1010
    assert Usage(10, 1024, {}).anthropic()["input_tokens"] == 10
    # Its own 50 tokens are few, but the prefix that they end has 1,050.
    usage = Usage(10, 1000, {300.0: 50})
    assert usage.anthropic() == {
        "input_tokens": 1010,
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 50,
        "cache_creation": {"ephemeral_5m_input_tokens": 50, "ephemeral_1h_input_tokens": 0},
    }
    assert usage.anthropic(min_tokens=2048)["input_tokens"] == 1060


def test_writes_stand_in_the_prompt_by_falling_time() -> None:
    usage = Usage(0, 0, {60.0: 500, 3600.0: 1000})
    assert usage.round_down(min_tokens=1024) == Usage(1000, 0, {60.0: 500})
    assert usage.anthropic(min_tokens=0)["cache_creation"] == {
        "ephemeral_5m_input_tokens": 500,
        "ephemeral_1h_input_tokens": 1000,
    }


def test_the_price_is_what_the_factors_say() -> None:
    usage = Usage(1000, 10_000, {300.0: 2000, 3600.0: 4000})
    assert usage.cost(3.0) == pytest.approx((1000 + 1000 + 2500 + 8000) * 3e-6)
    assert usage.cost(3.0, read_factor=0, short_write_factor=1, long_write_factor=0.5) == pytest.approx(
        (1000 + 0 + 2000 + 2000) * 3e-6
    )


@given(USAGES, LIMITS, st.integers(1, 300))
def test_rounding_down_keeps_the_sum_and_moves_tokens_to_the_input_only(
    usage: Usage, min_tokens: int, step_tokens: int
) -> None:
    rounded = usage.round_down(min_tokens=min_tokens, step_tokens=step_tokens)
    assert rounded.num_tokens == usage.num_tokens
    assert rounded.input >= usage.input
    assert 0 <= rounded.cache_read <= usage.cache_read
    assert rounded.cache_write_by_ttl.items() <= usage.cache_write_by_ttl.items()
    assert rounded.cache_read % step_tokens == 0
    assert rounded.cache_read == 0 or rounded.cache_read >= min_tokens


@given(USAGES)
def test_without_a_least_length_and_steps_nothing_is_rounded(usage: Usage) -> None:
    assert usage.round_down(min_tokens=0, step_tokens=1) == usage


@given(USAGES, LIMITS, st.integers(1, 300))
def test_every_report_sums_to_the_prompt(usage: Usage, min_tokens: int, step_tokens: int) -> None:
    openai = usage.openai(min_tokens=min_tokens, step_tokens=step_tokens)
    assert openai["prompt_tokens"] == usage.num_tokens
    assert 0 <= openai["prompt_tokens_details"]["cached_tokens"] <= usage.cache_read
    anthropic = usage.anthropic(min_tokens=min_tokens)
    total = anthropic["input_tokens"] + anthropic["cache_read_input_tokens"]
    assert total + anthropic["cache_creation_input_tokens"] == usage.num_tokens
    created = anthropic["cache_creation"]
    both = created["ephemeral_5m_input_tokens"] + created["ephemeral_1h_input_tokens"]
    assert both == anthropic["cache_creation_input_tokens"]


@given(USAGES, st.floats(0, 1000))
def test_with_all_factors_one_every_token_costs_the_base_price(usage: Usage, price: float) -> None:
    cost = usage.cost(price, read_factor=1, short_write_factor=1, long_write_factor=1)
    assert cost == pytest.approx(usage.num_tokens * price / 1e6)


@given(USAGES)
def test_reading_never_costs_more_than_computing(usage: Usage) -> None:
    assert usage.cost(1.0) <= usage._replace(input=usage.input + usage.cache_read, cache_read=0).cost(1.0)


NO_PRICE: Any = "3 dollars"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda u: u.round_down(min_tokens=-1), "min_tokens: expected an integer from 0 to"),
        (lambda u: u.openai(step_tokens=0), "step_tokens: expected an integer from 1 to"),
        (lambda u: u.cost(-1.0), "price_per_million: expected a finite number of at least 0, got -1"),
        (lambda u: u.cost(NO_PRICE), "price_per_million: expected a number, got '3 dollars' (str)"),
        (lambda u: u.cost(1.0, read_factor=float("nan")), "read_factor: expected a finite number"),
    ],
)
def test_a_bad_argument_is_named(call: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        call(Usage(1, 2, {}))
    assert str(error.value).startswith(message)


def test_usages_add_up() -> None:
    total = sum([Usage(1, 2, {300.0: 4}), Usage(10, 20, {300.0: 40, 3600.0: 5})], Usage(0, 0, {}))
    assert total == Usage(11, 22, {300.0: 44, 3600.0: 5})
    assert total.__add__((1, 2, {})) is NotImplemented  # type: ignore[arg-type]
