"""Every explanation reads as one sentence that names the place and the cause."""

from __future__ import annotations

import pytest

from pagedkv.explanation import REASONS, Explanation

SENTENCES = {
    "hit": (Explanation(48, 32, "hit", 48), "48 tokens cached: the whole prompt."),
    "short_tail": (
        Explanation(32, 32, "short_tail", 32),
        "32 tokens cached: all whole blocks; what follows from token 32 on fills none.",
    ),
    "differs": (
        Explanation(37, 32, "differs", 37, expected_token=11),
        "37 tokens cached: at token 37 the prompt differs from a cached block, which has token id 11 there.",
    ),
    "window": (
        Explanation(20, 20, "window", 20),
        "20 tokens cached: more is known, but not the pages of a window in front of where it ends.",
    ),
    "generation": (
        Explanation(0, 0, "generation", 0),
        "no tokens cached: the block of token 0 is of an older generation, and no longer valid.",
    ),
    "other_salt": (
        Explanation(16, 16, "other_salt", 16),
        "16 tokens cached: the block of token 16 is cached under another salt, adapter or extra.",
    ),
    "unknown": (
        Explanation(1, 0, "unknown", 1),
        "1 token cached: the block of token 1 was never cached, "
        "or evicted longer ago than the history reaches.",
    ),
}


@pytest.mark.parametrize("reason", SENTENCES)
def test_an_explanation_is_a_sentence(reason: str) -> None:
    explanation, sentence = SENTENCES[reason]
    assert explanation.reason == reason
    assert str(explanation) == f"{explanation}" == sentence


def test_blocks_that_differ_in_no_token_there_are_not_said_to() -> None:
    explanation = Explanation(20, 16, "differs", 20)
    sentence = "the block of token 20 differs from a cached one, later on or in its extras."
    assert str(explanation) == f"20 tokens cached: {sentence}"


@pytest.mark.parametrize(
    ("evicted_by", "cause"),
    [
        ("capacity", "to make room"),
        ("request", "because a caller asked for it"),
        ("quota", "because its tenant was over quota"),
        ("reset", "by a reset"),
    ],
)
def test_an_eviction_is_told_with_its_cause_and_time(evicted_by: str, cause: str) -> None:
    explanation = Explanation(16, 16, "evicted", 16, evicted_at_s=2.5, evicted_by=evicted_by)
    expected = (
        f"16 tokens cached: the block of token 16 was evicted {cause}, 2.500 s after the pool was made."
    )
    assert str(explanation) == expected


def test_every_reason_has_its_sentence_here() -> None:
    assert {*SENTENCES, "evicted"} == set(REASONS)
