"""How a request's answer ends, and what of its text is shown by then."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from pagedkv.runner.completion import Completion
from pagedkv.runner.detokenizer import TextStream
from pagedkv.runner.draw import Draw
from pagedkv.runner.request import Request
from pagedkv.runner.sampling import SamplingParams

END = 0


def answer(
    data: bytes, *, end_tokens: frozenset[int] = frozenset({END}), **params: Any
) -> tuple[list[str], Completion]:
    """Feed one token a byte until the answer ends; return the pieces shown and the answer."""
    request = Request(
        prompt_ids=[1],
        params=SamplingParams(**{"max_tokens": len(data), **params}),
        end_tokens=end_tokens,
        submitted_s=0.0,
        make_stream=lambda: TextStream(lambda tokens: bytes(tokens).decode(errors="replace")),
    )
    [completion] = request.completions
    pieces = []
    for token in data:
        pieces.append(completion.accept(Draw(token, [], None)))
        if completion.finish_reason is not None:
            break
    assert "".join(pieces) == completion.text == request.text
    return pieces, completion


def test_answer_of_full_length_ends_by_length() -> None:
    pieces, completion = answer(b"abc")
    assert pieces == ["a", "b", "c"]
    assert completion.finish_reason == "length"


def test_end_token_stops_and_shows_nothing_of_itself() -> None:
    pieces, completion = answer(b"ab\0c")
    assert pieces == ["a", "b", ""]
    assert (completion.finish_reason, completion.output_ids) == ("stop", [97, 98, END])


def test_end_token_on_the_last_place_is_a_stop() -> None:
    assert answer(b"ab\0")[1].finish_reason == "stop"


def test_stop_string_cuts_the_text_and_keeps_the_tokens() -> None:
    pieces, completion = answer(b"one. two", stop=". ")
    assert pieces == ["o", "n", "e", "", ""]
    assert (completion.finish_reason, bytes(completion.output_ids)) == ("stop", b"one. ")


@pytest.mark.parametrize(("data", "reason"), [(b"one.", "length"), (b"one.\0", "stop")])
def test_beginning_of_a_stop_string_is_shown_when_the_answer_ends_there(data: bytes, reason: str) -> None:
    pieces, completion = answer(data, stop=". ")
    assert pieces[-2:] == (["e", "."] if reason == "length" else ["", "."])
    assert (completion.finish_reason, completion.text) == (reason, "one.")


def test_character_cut_off_by_the_answer_s_end_is_shown_as_broken() -> None:
    pieces, completion = answer("a€".encode()[:3])
    assert pieces == ["a", "", "\ufffd"]
    assert completion.finish_reason == "length"


def test_stop_string_completed_by_what_was_kept_back_still_stops() -> None:
    _, completion = answer("a€".encode()[:3], stop="\ufffd")
    assert (completion.finish_reason, completion.text) == ("stop", "a")


@pytest.mark.parametrize(
    ("data", "params", "reason"),
    [
        (b"ab\0c", {}, END),
        (b"one. two", {"stop": ". "}, ". "),
        (b"abc", {}, None),
        (b"abc", {"stop_token_ids": {98}}, None),
    ],
)
def test_what_ended_the_answer_is_named(data: bytes, params: dict[str, Any], reason: Any) -> None:
    assert answer(data, **params)[1].stop_reason == reason


def test_times_are_measured_from_submission() -> None:
    request = answer(b"abc")[1].request
    request.scheduled_s, request.first_token_s, request.finished_s = 0.25, 1.0, 3.0
    assert request.queue_s == 0.25
    assert request.time_to_first_token_s == 1.0
    assert request.prefill_s == 0.75
    assert request.decode_tokens_per_s == 1.0


def test_times_are_unknown_before_they_are_reached() -> None:
    request = Request(prompt_ids=[1], params=SamplingParams(), end_tokens=frozenset(), submitted_s=0.0)
    assert request.queue_s is None
    assert request.time_to_first_token_s is None
    assert request.prefill_s is None
    assert request.decode_tokens_per_s is None
    assert not request.is_finished
    assert request.finish_reason is None


def test_request_has_as_many_answers_as_were_asked_for() -> None:
    request = Request(prompt_ids=[1], params=SamplingParams(n=3), end_tokens=frozenset(), submitted_s=0.0)
    assert [completion.index for completion in request.completions] == [0, 1, 2]
    request.completions[0].accept(Draw(5, [(5, 1.0)], None))
    assert (request.output_ids, request.top_logits, request.num_output_tokens) == ([5], [[(5, 1.0)]], 1)


def test_repr_stays_short_however_long_prompt_and_answer_are() -> None:
    request = answer(b"abc" * 1000)[1].request
    request.prompt_ids = [1] * 1000
    request.completions[0].top_logits = [[(1, 0.5)]] * 1000
    assert len(repr(request)) < 1000
    assert len(repr(request.completions[0])) < 300
