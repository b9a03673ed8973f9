"""However a request ends, it ends alone, says why, and leaves no page behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from tiny_models import random_tokens
from toy_engine import END, assert_answer, assert_completions, assert_idle, expected_answer, toy_engine

from pagedkv.errors import UsageError
from pagedkv.runner.completion import Completion
from pagedkv.runner.detokenizer import TextStream
from pagedkv.runner.engine import Engine
from pagedkv.runner.request import Request, RequestState
from pagedkv.runner.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
BEAMS = SamplingParams(max_tokens=12, ignore_eos=True, num_beams=2, n=2)


def prompt_of(index: int) -> list[int]:
    return random_tokens(14 + index, seed=index % 3, vocab_size=24)


class Clock:
    """Time that passes when it is told to."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Letters:
    """A tokenizer whose every token is a letter."""

    def stream(self) -> TextStream:
        return TextStream(lambda tokens: "".join(chr(97 + token) for token in tokens))


@pytest.fixture
def talking() -> Engine:
    return toy_engine(tokenizer=Letters())


def test_request_past_its_deadline_ends_with_what_it_has() -> None:
    clock = Clock()
    engine = toy_engine(clock=clock)
    late = [engine.submit(prompt_of(i), params, deadline_s=5.5) for i, params in enumerate((PARAMS, BEAMS))]
    several = engine.submit(prompt_of(2), replace(PARAMS, n=3, temperature=1.0, seed=1), deadline_s=5.5)
    free = engine.submit(prompt_of(3), PARAMS)
    for _ in range(6):
        assert engine.step() == []
        clock.now_s += 1
    assert set(engine.step()) == {*late, several}
    for request in (*late, several):
        assert {each.finish_reason for each in request.completions} == {"deadline"}
        assert {len(each.output_ids) for each in request.completions} == {6}
        assert request.finished_s == 106.0
    assert_completions(several, is_whole=False)
    engine.run()
    assert free.finish_reason == "length"
    assert_completions(free)
    assert_idle(engine)


def test_deadline_counts_the_time_in_the_queue() -> None:
    clock = Clock()
    engine = toy_engine(clock=clock, max_num_seqs=1)
    first = engine.submit(prompt_of(0), PARAMS)
    waiting = engine.submit(prompt_of(1), PARAMS, deadline_s=0)
    assert engine.step() == [waiting]
    assert (waiting.finish_reason, waiting.output_ids, waiting.queue_s) == ("deadline", [], None)
    assert first.state is RequestState.RUNNING


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), "soon"])
def test_deadline_without_a_meaning_is_refused(wrong: float) -> None:
    with pytest.raises(UsageError, match="deadline_s: expected"):
        toy_engine().submit([1], deadline_s=wrong)


@pytest.mark.parametrize("num_blocks", [16, 60])
def test_storm_of_aborts_loses_no_page_and_costs_nobody_else(num_blocks: int) -> None:
    engine = toy_engine(num_blocks=num_blocks, max_batch_tokens=16)
    kept: list[Request] = []
    for wave in range(8):
        kinds = [
            PARAMS,
            replace(PARAMS, n=3, temperature=1.0, seed=2),
            replace(PARAMS, num_speculative_tokens=3),
        ]
        doomed = [engine.submit(prompt_of(wave + i), params) for i, params in enumerate([*kinds, *kinds])]
        if num_blocks > 16:
            doomed.append(engine.submit(prompt_of(wave), BEAMS))
        kept.append(engine.submit(prompt_of(wave), PARAMS))
        for _ in range(wave % 4):
            engine.step()
        for request in doomed[::-1] if wave % 2 else doomed:
            engine.abort(request)
            engine.abort(request)
        engine.cache.check_integrity()
    engine.run()
    for request in kept:
        assert request.finish_reason == "length"
        assert_completions(request)
    assert_idle(engine)


def test_callbacks_may_abort_everybody() -> None:
    engine = toy_engine()
    requests: list[Request] = []

    def abort_all(_: Completion, __: str) -> None:
        for request in requests:
            engine.abort(request)

    requests += [engine.submit(prompt_of(i), PARAMS, on_token=abort_all) for i in range(4)]
    engine.run()
    assert [request.finish_reason for request in requests] == ["abort"] * 4
    assert_idle(engine)


def test_dead_callback_ends_all_answers_of_its_request() -> None:
    engine = toy_engine()

    def fail(completion: Completion, _: str) -> None:
        if completion.index == 1:
            raise BrokenPipeError("nobody reads")

    params = replace(PARAMS, n=3, temperature=1.0, seed=1)
    dead, other = engine.submit(prompt_of(0), params, on_token=fail), engine.submit(prompt_of(0), params)
    engine.run()
    assert isinstance(dead.error, BrokenPipeError)
    assert dead.finish_reason == "error"
    assert [len(each.output_ids) for each in dead.completions] == [1, 1, 1]
    assert_completions(other)
    assert_idle(engine)


def test_request_that_can_never_fit_is_refused_and_others_go_on() -> None:
    engine = toy_engine(num_blocks=8)
    running = engine.submit(prompt_of(0), PARAMS)
    engine.step()
    with pytest.raises(UsageError, match="request: expected at most 8 pages"):
        engine.submit(prompt_of(1), replace(PARAMS, max_tokens=40))
    engine.run()
    assert_completions(running)
    assert_idle(engine)


@pytest.mark.parametrize("num_speculative_tokens", [0, 4])
def test_stop_string_ends_the_answer_wherever_in_a_step_it_comes(num_speculative_tokens: int) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, logit_bias={1: 9.0, 2: 9.0, 3: 9.0})
    prompt = prompt_of(0)
    whole = "".join(chr(97 + token) for token in expected_answer(tuple(prompt), params))
    for start in (3, 9, 17, 30):
        stop = whole[start : start + 5]
        engine = toy_engine(tokenizer=Letters())
        stopping = replace(params, stop=stop, num_speculative_tokens=num_speculative_tokens)
        (request,) = engine.generate([prompt], stopping)
        end = whole.index(stop)
        assert request.text == whole[:end]
        assert (request.finish_reason, request.completions[0].stop_reason) == ("stop", stop)
        assert len(request.output_ids) == end + 5
        assert_idle(engine)


def test_stream_gives_the_answer_s_text_while_others_get_on(talking: Engine) -> None:
    other = talking.submit(prompt_of(1), PARAMS)
    texts = talking.stream(prompt_of(0), PARAMS)
    pieces = list(texts)
    assert "".join(pieces) == texts.request.text
    assert len(pieces) == len(texts.request.output_ids) == 12
    assert_answer(texts.request.output_ids, expected_answer(tuple(prompt_of(0)), PARAMS))
    assert len(other.output_ids) == 12


def test_stream_that_is_closed_or_dropped_ends_its_request(talking: Engine) -> None:
    other = talking.submit(prompt_of(1), PARAMS)
    with talking.stream(prompt_of(0), PARAMS) as closed:
        next(closed)
    assert closed.request.finish_reason == "abort"
    assert list(closed) == []
    dropped: Iterator[str] = talking.stream(prompt_of(2), PARAMS)
    next(dropped)
    request = dropped.request  # type: ignore[attr-defined]
    del dropped
    talking.run()
    assert request.finish_reason == "abort"
    assert len(request.output_ids) == 1
    assert_completions(other)
    assert_idle(talking)


def test_stream_raises_what_its_request_failed_by(talking: Engine) -> None:
    forbidden = replace(PARAMS, logit_bias={token: float("-inf") for token in range(24)})
    with pytest.raises(FloatingPointError, match="logits: expected finite ones"):
        list(talking.stream(prompt_of(0), forbidden))
    with pytest.raises(UsageError, match="n: expected 1, got 2, in Engine"):
        talking.stream(prompt_of(0), replace(PARAMS, n=2))
    assert_idle(talking)


def test_end_token_is_no_text(talking: Engine) -> None:
    (request,) = talking.generate([prompt_of(0)], replace(PARAMS, logit_bias={END: 99.0}, ignore_eos=False))
    assert (request.output_ids, request.text, request.finish_reason) == ([END], "", "stop")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": {"max_tokens": 3}}, "params: expected SamplingParams"),
        ({"params": {}}, "params: expected SamplingParams"),
        ({"on_token": 5}, "on_token: expected what can be called, got 5"),
    ],
)
def test_what_would_fail_in_the_middle_of_a_step_is_refused_at_once(
    options: dict[str, Any], message: str
) -> None:
    engine = toy_engine()
    with pytest.raises(UsageError, match=message):
        engine.submit(prompt_of(0), **options)
    assert_idle(engine)


def test_more_beams_than_there_are_words_end_all_the_same() -> None:
    engine = toy_engine()
    (request,) = engine.generate([prompt_of(0)], SamplingParams(max_tokens=3, num_beams=30, n=30))
    answers = [tuple(each.output_ids) for each in request.completions]
    assert len(set(answers)) == 30
    assert {each.finish_reason for each in request.completions} <= {"stop", "length"}
    assert_idle(engine)


@pytest.mark.parametrize("seed", range(8))
def test_callbacks_that_abort_submit_fail_and_interrupt_at_random_lose_no_page(seed: int) -> None:
    rng = random.Random(seed)
    engine = toy_engine(num_blocks=rng.choice([16, 30, 80]), max_batch_tokens=rng.choice([4, 16, 64]))
    requests: list[Request] = []
    kinds = [
        PARAMS,
        BEAMS,
        replace(PARAMS, n=3, temperature=1.0, seed=2),
        replace(PARAMS, num_speculative_tokens=3, logit_bias={1: 9.0, 2: 9.0}),
        replace(PARAMS, prompt_logprobs=0),
    ]

    def submit(params: SamplingParams) -> None:
        deadline_s = rng.choice([None, None, 0.002])
        with suppress(UsageError):  # a small pool can't hold all beams
            requests.append(
                engine.submit(prompt_of(rng.randrange(4)), params, on_token=hear, deadline_s=deadline_s)
            )

    def hear(_: Completion, __: str) -> None:
        chance = rng.random()
        if chance < 0.05:
            engine.abort(rng.choice(requests))
        elif chance < 0.08:
            submit(replace(PARAMS, max_tokens=2))
        elif chance < 0.11:
            raise BrokenPipeError
        elif chance < 0.13:
            raise KeyboardInterrupt

    for _ in range(10):
        submit(rng.choice(kinds))
    for _ in range(2_000):
        if not engine.has_work:
            break
        with suppress(KeyboardInterrupt):
            engine.step()
        engine.cache.check_integrity()
    assert all(each.finish_reason for request in requests for each in request.completions)
    assert_idle(engine)
