"""Guesses copied from the text so far."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagedkv.runner.drafting import NGRAM_SIZES, PromptLookup

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def plain_draft(tokens: list[int], num_tokens: int) -> list[int]:
    for size in NGRAM_SIZES:
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                draft = list(tokens[end:])
                while len(draft) < num_tokens:
                    draft += tokens[end:]
                return draft[:num_tokens]
    return []


def test_text_goes_on_as_it_did_after_the_same_words() -> None:
    assert PromptLookup().draft([1, 2, 3, 4, 5, 9, 1, 2, 3], 3) == [4, 5, 9]


def test_latest_place_counts() -> None:
    assert PromptLookup().draft([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8]


def test_repetition_goes_on() -> None:
    assert PromptLookup().draft([1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_words_that_never_came_before_give_no_guess() -> None:
    assert PromptLookup().draft([1, 2, 3, 4], 4) == []
    assert PromptLookup().draft([1], 4) == []


@given(TOKENS, TOKENS, st.integers(1, 6))
def test_look_up_equals_a_search_of_the_whole_text(
    first: list[int], more: list[int], num_tokens: int
) -> None:
    lookup = PromptLookup()
    assert lookup.draft(first, num_tokens) == plain_draft(first, num_tokens)
    assert lookup.draft(first + more, num_tokens) == plain_draft(first + more, num_tokens)
