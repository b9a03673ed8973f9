"""An answer that ends at a text, whatever the pieces it comes in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagedkv.runner.stop_strings import StopStrings

TEXTS = st.text("ab\n", max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def feed(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops)
    shown = [matcher.put(piece) for piece in pieces]
    return [*shown, matcher.flush()], matcher.matched


def test_stop_split_over_pieces_is_found_and_nothing_of_it_shown() -> None:
    shown, matched = feed(["<end>"], ["text<", "en", "d>", "more"])
    assert shown == ["text", "", "", "", ""]
    assert matched == "<end>"


def test_beginning_of_a_stop_is_shown_once_it_goes_on_differently() -> None:
    assert feed(["<end>"], ["a<", "en", "g>", "b"]) == (["a", "", "<eng>", "b", ""], None)


def test_beginning_of_a_stop_is_shown_when_the_answer_ends_there() -> None:
    assert feed(["<end>"], ["a<en"]) == (["a", "<en"], None)


def test_overlapping_repetition_is_found() -> None:
    assert feed(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", "", ""], "aab")


def test_the_stop_complete_first_wins() -> None:
    assert feed(["abcd", "bc"], ["abcd"]) == (["a", ""], "bc")


def test_without_stops_everything_is_shown_at_once() -> None:
    assert feed([], ["a", "", "b"]) == (["a", "", "b", ""], None)


@given(TEXTS, STOPS, st.data())
def test_result_does_not_depend_on_the_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, matched = feed(stops, pieces)
    by_character, expected = feed(stops, list(text))
    assert "".join(shown) == "".join(by_character)
    assert matched == expected


@given(TEXTS, STOPS)
def test_shown_text_equals_a_search_of_the_whole(text: str, stops: list[str]) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    shown, matched = feed(stops, list(text))
    assert "".join(shown) == expected
    assert (matched is None) == (not ends)


@given(TEXTS, STOPS)
def test_no_more_is_kept_back_than_the_longest_stop_less_one(text: str, stops: list[str]) -> None:
    matcher, num_shown = StopStrings(stops), 0
    longest = max(map(len, stops), default=1)
    for count, character in enumerate(text, 1):
        num_shown += len(matcher.put(character))
        if matcher.matched is None:
            assert count - num_shown < longest
