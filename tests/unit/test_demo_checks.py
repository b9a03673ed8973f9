"""The demo fails when a promise of reuse is broken, and only then."""

from __future__ import annotations

import pytest

from pagedkv.cli.demo_checks import (
    MIN_RATIO,
    MIN_SHARED_TOKENS,
    Answer,
    Waits,
    check_isolation,
    check_ratio,
    check_reuse,
    check_same_answers,
    wait_cold_and_warm,
)

Steps = list[tuple[int, float]]
"""The token of each step, and by how much its logit leads the second best."""


def answer(steps: Steps, *, user: str = "Ada", num_cached_tokens: int = 0, seconds: float = 1.0) -> Answer:
    return Answer(
        user=user,
        question="?",
        num_prompt_tokens=5000,
        num_cached_tokens=num_cached_tokens,
        time_to_first_token_s=seconds,
        decode_tokens_per_s=None,
        token_ids=[token for token, _ in steps],
        top_logits=[[(token, 10.0 + lead), (99, 10.0)] for token, lead in steps],
        text="",
    )


CLEAR: Steps = [(1, 2.0), (2, 3.0), (3, 1.0)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_answers_hold_whatever_the_logits(dtype: str) -> None:
    for steps in (CLEAR, [(1, 0.0), (2, 0.01)], []):
        verdict = check_same_answers("a and b", [answer(steps)], [answer(steps)], dtype=dtype)
        assert verdict == (True, "answers a and b are equal, token for token", ())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("other", "step"),
    [
        ([(1, 2.0), (7, 3.0), (3, 1.0)], 1),
        ([(7, 2.0), (2, 3.0), (3, 1.0)], 0),
        ([(1, 2.0), (2, 3.0)], 2),
        ([*CLEAR, (4, 1.0)], 3),
    ],
    ids=["middle", "first", "shorter", "longer"],
)
def test_one_different_token_breaks_the_promise_and_is_named(dtype: str, other: Steps, step: int) -> None:
    same = answer(CLEAR, user="Ben")
    verdict = check_same_answers("a and b", [same, answer(CLEAR)], [same, answer(other)], dtype=dtype)
    assert not verdict.holds
    assert "expected equal tokens, got different ones" in verdict.text
    (note,) = verdict.notes
    assert note.startswith(f"Ada: step {step} differs: ")


def test_near_tie_excuses_what_follows_it_in_bfloat16_but_not_in_float32() -> None:
    left = [answer([(1, 2.0), (2, 0.05), (3, 1.0)])]
    right = [answer([(1, 2.0), (5, 0.01), (6, 1.0)])]
    assert not check_same_answers("a and b", left, right, dtype="float32").holds
    verdict = check_same_answers("a and b", left, right, dtype="bfloat16")
    assert verdict.holds
    assert verdict.text == "answers a and b are equal, up to the first near tie"
    (note,) = verdict.notes
    assert "step 1 is a near tie: token 2 (10.0500) or 99 (10.0000)" in note


def test_near_tie_excuses_nothing_before_it_and_nothing_wider() -> None:
    late_tie = answer([(1, 2.0), (5, 3.0), (3, 0.01)])
    assert not check_same_answers("a and b", [answer(CLEAR)], [late_tie], dtype="bfloat16").holds
    wide = answer([(1, 2.0), (5, 0.06), (3, 1.0)])
    assert not check_same_answers("a and b", [wide], [answer(CLEAR)], dtype="bfloat16").holds


def test_a_single_shared_token_breaks_isolation() -> None:
    assert check_isolation([answer(CLEAR), answer(CLEAR)]).holds
    verdict = check_isolation([answer(CLEAR), answer(CLEAR, num_cached_tokens=1)])
    assert verdict == (False, "tenants: expected 0 tokens shared between salts, got 1", ())


def test_reuse_counts_every_shared_token_of_every_later_user() -> None:
    warm = [answer(CLEAR, num_cached_tokens=n) for n in (4100, 4101)]
    assert check_reuse(warm, 4100).holds
    assert "expected 4,101 cached tokens for later users, got 4,100" in check_reuse(warm, 4101).text
    assert not check_reuse(warm, 4101).holds


def test_short_shared_prefix_is_no_demonstration() -> None:
    warm = [answer(CLEAR, num_cached_tokens=5000)]
    assert check_reuse(warm, MIN_SHARED_TOKENS).holds
    verdict = check_reuse(warm, MIN_SHARED_TOKENS - 1)
    assert not verdict.holds
    assert "expected at least 4,000 tokens, got 3,999" in verdict.text


def test_ratio_is_that_of_the_medians_of_all_cold_and_all_warm_waits() -> None:
    shared = [answer(CLEAR, seconds=s) for s in (900.0, 9.0, 1.0, 0.5)]
    uncached = [answer(CLEAR, seconds=s) for s in (MIN_RATIO, 1.0)]
    waits = wait_cold_and_warm(shared, uncached)
    assert (waits.cold_s, waits.warm_s, waits.ratio) == (MIN_RATIO, 1.0, MIN_RATIO)
    assert check_ratio(waits).holds
    assert "10.00 s cold (median of 3), 1.000 s warm (median of 3)" in check_ratio(waits).text
    verdict = check_ratio(Waits([9.9], [1.0]))
    assert not verdict.holds
    assert "expected at least 10 times shorter when warm, got 9.9 times" in verdict.text
