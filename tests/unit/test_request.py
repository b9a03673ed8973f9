"""How a request's answer ends, and what of its text is shown by then."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from pagedkv.runner.detokenizer import TextStream
from pagedkv.runner.request import Draw, Request
from pagedkv.runner.sampling import SamplingParams

END = 0


def answer(
    data: bytes, *, end_tokens: frozenset[int] = frozenset({END}), **params: Any
) -> tuple[list[str], Request]:
    """Feed one token a byte until the answer ends; return the pieces shown and the request."""
    request = Request(
        prompt_ids=[1],
        params=SamplingParams(**{"max_tokens": len(data), **params}),
        end_tokens=end_tokens,
        submitted_s=0.0,
        stream=TextStream(lambda tokens: bytes(tokens).decode(errors="replace")),
    )
    pieces = []
    for count, token in enumerate(data, 1):
        pieces.append(request.accept(Draw(token, []), now_s=float(count)))
        if request.finish_reason is not None:
            break
    assert "".join(pieces) == request.text
    return pieces, request


def test_answer_of_full_length_ends_by_length() -> None:
    pieces, request = answer(b"abc")
    assert pieces == ["a", "b", "c"]
    assert request.finish_reason == "length"


def test_end_token_stops_and_shows_nothing_of_itself() -> None:
    pieces, request = answer(b"ab\0c")
    assert pieces == ["a", "b", ""]
    assert (request.finish_reason, request.output_ids) == ("stop", [97, 98, END])


def test_end_token_on_the_last_place_is_a_stop() -> None:
    assert answer(b"ab\0")[1].finish_reason == "stop"


def test_stop_string_cuts_the_text_and_keeps_the_tokens() -> None:
    pieces, request = answer(b"one. two", stop=". ")
    assert pieces == ["o", "n", "e", "", ""]
    assert (request.finish_reason, bytes(request.output_ids)) == ("stop", b"one. ")


@pytest.mark.parametrize(("data", "reason"), [(b"one.", "length"), (b"one.\0", "stop")])
def test_beginning_of_a_stop_string_is_shown_when_the_answer_ends_there(data: bytes, reason: str) -> None:
    pieces, request = answer(data, stop=". ")
    assert pieces[-2:] == (["e", "."] if reason == "length" else ["", "."])
    assert (request.finish_reason, request.text) == (reason, "one.")


def test_character_cut_off_by_the_answer_s_end_is_shown_as_broken() -> None:
    pieces, request = answer("a€".encode()[:3])
    assert pieces == ["a", "", "\ufffd"]
    assert request.finish_reason == "length"


def test_stop_string_completed_by_what_was_kept_back_still_stops() -> None:
    _, request = answer("a€".encode()[:3], stop="\ufffd")
    assert (request.finish_reason, request.text) == ("stop", "a")


def test_times_are_measured_from_submission() -> None:
    _, request = answer(b"abc")
    request.scheduled_s, request.finished_s = 0.25, 3.0
    assert request.time_to_first_token_s == 1.0
    assert request.prefill_s == 0.75
    assert request.decode_tokens_per_s == 1.0


def test_times_are_unknown_before_they_are_reached() -> None:
    request = Request(prompt_ids=[1], params=SamplingParams(), end_tokens=frozenset(), submitted_s=0.0)
    assert request.time_to_first_token_s is None
    assert request.prefill_s is None
    assert request.decode_tokens_per_s is None
    assert not request.is_finished


def test_repr_stays_short_however_long_prompt_and_answer_are() -> None:
    _, request = answer(b"abc" * 1000)
    request.prompt_ids = [1] * 1000
    request.top_logits = [[(1, 0.5)]] * 1000
    assert len(repr(request)) < 600
