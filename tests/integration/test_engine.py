"""What an engine does besides answering: refusals, aborts, callbacks, interrupts, order."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import TINY, all_logits, random_tensors, random_tokens

from pagedkv.errors import OutOfBlocksError, UsageError
from pagedkv.runner.completion import Completion
from pagedkv.runner.detokenizer import TextStream
from pagedkv.runner.engine import Engine
from pagedkv.runner.loader import LoadedModel
from pagedkv.runner.model import Model
from pagedkv.runner.request import Request, RequestState
from pagedkv.runner.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture
def engine(tiny_model: Model) -> Engine:
    return Engine(tiny_model, num_blocks=40)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt: expected at least one token, got none"),
        (None, {}, "token_ids: expected"),
        ([[1, 2]], {}, "token_ids"),
        ([1, -1], {}, "token"),
        ([1, 2**32], {}, "token"),
        ([1, 1.5], {}, "token"),
        ([1, TINY.vocab_size], {}, f"prompt: expected token ids below {TINY.vocab_size}"),
        ([1] * 512, {}, "prompt: expected fewer tokens than the model's context of 512, got 512"),
        (
            [1] * 500,
            {},
            "request: expected at most 20 pages of 16 tokens .the pool., got 32 for 500 prompt tokens",
        ),
        ([1], {"cache_salt": ""}, "cache_salt"),
        ([1], {"cache_salt": 7}, "cache_salt"),
        ([1], {"extras": [object()]}, "extras"),
        ([1], {"extras": 5}, "extras: expected a sequence, got 5"),
        ("text", {}, "prompt: expected token ids and no stop strings"),
        ([1], {"params": SamplingParams(stop="x")}, "prompt: expected token ids and no stop strings"),
    ],
)
def test_request_that_can_never_run_is_refused_at_once(
    tiny_model: Model, prompt: Any, options: dict[str, Any], message: str
) -> None:
    engine = Engine(tiny_model, num_blocks=20)
    with pytest.raises(UsageError, match=message):
        engine.submit(prompt, **options)
    with pytest.raises(UsageError, match=message):
        engine.generate([[1, 2], prompt], **options)  # one bad prompt queues none
    assert not engine.has_work
    assert engine.cache.stats().num_prompt_tokens == 0


def test_request_that_just_fits_the_pool_runs(tiny_model: Model) -> None:
    engine = Engine(tiny_model, num_blocks=4)
    prompt = random_tokens(40, seed=1)
    # 64 slots: the last of the new tokens is never computed.
    (request,) = engine.generate([prompt], SamplingParams(max_tokens=25, ignore_eos=True))
    assert len(request.output_ids) == 25
    with pytest.raises(UsageError, match="request: expected at most 4 pages"):
        engine.submit(prompt, SamplingParams(max_tokens=26))


def test_answer_is_clipped_to_the_model_s_context(engine: Engine) -> None:
    (request,) = engine.generate([random_tokens(509, seed=2)], PARAMS)
    assert len(request.output_ids) == 3
    assert request.finish_reason == "length"


@pytest.mark.parametrize(
    "wrong", [{"max_batch_tokens": 0}, {"max_num_seqs": 0}, {"memory": "1 zloty"}, {"memory": 1}]
)
def test_engine_of_impossible_size_is_refused(tiny_model: Model, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong))}: expected"):
        Engine(tiny_model, **wrong)


def test_memory_decides_the_number_of_pages(tiny_model: Model) -> None:
    bytes_per_block = 3 * 2 * 16 * 2 * 8 * 4
    assert Engine(tiny_model, memory=10 * bytes_per_block + 1).cache.pool.num_blocks == 10


def test_waiting_requests_hold_no_pages(tiny_model: Model) -> None:
    engine = Engine(tiny_model, num_blocks=40, max_num_seqs=1)
    requests = [engine.submit(random_tokens(30, seed=i), PARAMS) for i in range(3)]
    engine.step()
    stats = engine.cache.stats()
    assert stats.num_writable_blocks + stats.num_committed_blocks == 2
    assert [request.state for request in requests] == [
        RequestState.RUNNING,
        RequestState.WAITING,
        RequestState.WAITING,
    ]


def test_request_waits_for_a_prompt_that_begins_like_its_own(tiny_model: Model) -> None:
    engine = Engine(tiny_model, num_blocks=40)
    prompt = random_tokens(60, seed=3)
    requests = [engine.submit(prompt, PARAMS) for _ in range(2)]
    engine.step()
    assert [request.state for request in requests] == [RequestState.RUNNING, RequestState.WAITING]
    engine.step()
    assert [request.num_cached_tokens for request in requests] == [0, 48]


def test_request_does_not_wait_for_one_that_it_cannot_share_with(tiny_model: Model) -> None:
    prompt = random_tokens(60, seed=3)
    salted = Engine(tiny_model, num_blocks=40)
    off = Engine(tiny_model, num_blocks=40, prefix_caching=False)
    for engine, salts in ((salted, ("a", "b")), (off, (None, None))):
        requests = [engine.submit(prompt, PARAMS, cache_salt=salt) for salt in salts]
        engine.step()
        assert [len(request.output_ids) for request in requests] == [1, 1]


def test_nobody_is_admitted_after_pages_ran_out_until_somebody_has_left(tiny_model: Model) -> None:
    engine = Engine(tiny_model, num_blocks=12)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    requests = [engine.submit(random_tokens(40, seed=i), params) for i in range(4)]
    may_grow, num_running, num_preempted = True, 0, 0
    while engine.has_work:
        has_finished = bool(engine.step())
        before, num_running = num_running, sum(each.state is RequestState.RUNNING for each in requests)
        assert may_grow or has_finished or num_running <= before
        total = sum(each.num_preemptions for each in requests)
        may_grow = has_finished or (may_grow and total == num_preempted)
        num_preempted = total
    assert 0 < num_preempted <= 6


def test_decoding_goes_on_while_a_long_prompt_is_computed(tiny_model: Model) -> None:
    engine = Engine(tiny_model, num_blocks=40, max_batch_tokens=32)
    first = engine.submit(random_tokens(10, seed=1), PARAMS)
    engine.step()
    second = engine.submit(random_tokens(100, seed=2), PARAMS)
    for num_tokens in (2, 3, 4):
        engine.step()
        assert len(first.output_ids) == num_tokens
        assert second.output_ids == []
    engine.step()
    assert len(second.output_ids) == 1


def test_aborted_requests_release_their_pages_and_others_go_on(engine: Engine) -> None:
    prompts = [random_tokens(40, seed=i) for i in range(3)]
    expected = [request.output_ids for request in engine.generate(prompts, PARAMS)]
    assert engine.cache.reset()
    running, kept = (engine.submit(prompt, PARAMS) for prompt in prompts[:2])
    engine.step()
    engine.step()
    waiting = engine.submit(prompts[2], PARAMS)
    engine.abort(running)
    engine.abort(waiting)
    engine.run()
    engine.abort(kept)  # too late, changes nothing
    assert kept.output_ids == expected[1]
    assert (running.finish_reason, running.output_ids) == ("abort", expected[0][:2])
    assert (waiting.finish_reason, waiting.output_ids, kept.finish_reason) == ("abort", [], "length")
    assert engine.cache.reset()  # nobody holds a page


def test_request_may_be_aborted_from_a_callback(engine: Engine) -> None:
    def stop_after_three(completion: Completion, _: str) -> None:
        if len(completion.output_ids) == 3:
            engine.abort(completion.request)

    stopped = engine.submit(random_tokens(20, seed=1), PARAMS, on_token=stop_after_three)
    other = engine.submit(random_tokens(20, seed=2), PARAMS)
    engine.run()
    assert (stopped.finish_reason, len(stopped.output_ids)) == ("abort", 3)
    assert (other.finish_reason, len(other.output_ids)) == ("length", 12)
    assert engine.cache.reset()


@pytest.fixture
def model_with_a_bad_token() -> Model:
    """Token 7 makes all logits after it NaN, and changes nothing for requests that don't have it."""
    config = replace(TINY, tie_word_embeddings=False)
    model = Model(config, random_tensors(config))
    model.embedding[7] = torch.nan
    return model


BAD = [7, 7, 7]
RANDOM = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True, num_top_logits=2)


def test_logits_that_are_not_finite_fail_their_request_alone(model_with_a_bad_token: Model) -> None:
    prompt = [token for token in random_tokens(40, seed=1) if token != 7]
    engine = Engine(model_with_a_bad_token, num_blocks=40)
    (alone,) = engine.generate([prompt], RANDOM)
    assert 7 not in alone.output_ids
    good = engine.submit(prompt, RANDOM)
    engine.step()
    engine.step()
    bad = [engine.submit(BAD * 6, replace(RANDOM, **kind)) for kind in ({}, {"n": 3}, {"prompt_logprobs": 1})]
    beams = engine.submit(BAD * 6, SamplingParams(num_beams=2, max_tokens=4))
    finished = []
    for _ in range(4):  # one waits for the other's beginning, which never comes
        finished += engine.step()
        engine.cache.check_integrity()
    assert set(finished) == {*bad, beams}
    for request in finished:
        assert request.finish_reason == "error"
        assert isinstance(request.error, FloatingPointError)
        assert request.num_output_tokens == 0
    assert engine.cache.match(BAD * 6).num_tokens == 0  # nothing of it was published
    engine.run()
    assert good.output_ids == alone.output_ids
    assert len(good.top_logits) == 12
    assert engine.cache.reset()


def test_bias_that_forbids_every_token_fails_the_request(engine: Engine) -> None:
    bias = tuple((token, -math.inf) for token in range(TINY.vocab_size))
    forbidden, other = (
        engine.submit(random_tokens(20, seed=1), replace(PARAMS, logit_bias=each)) for each in (bias, ())
    )
    engine.run()
    assert (forbidden.finish_reason, other.finish_reason) == ("error", "length")
    assert engine.cache.reset()


class InterruptedText:
    """A tokenizer whose `at`-th text is interrupted."""

    def __init__(self, at: int) -> None:
        self._num_left = at

    def stream(self) -> TextStream:
        return TextStream(self._decode)

    def _decode(self, token_ids: list[int]) -> str:
        self._num_left -= 1
        if self._num_left == 0:
            raise KeyboardInterrupt
        return "".join(f"{token} " for token in token_ids)


@pytest.mark.parametrize("at", [1, 4, 9])
def test_interrupt_while_answers_are_extended_aborts_them_and_no_others(tiny_model: Model, at: int) -> None:
    prompts = [random_tokens(20, seed=1), random_tokens(20, seed=2), random_tokens(200, seed=3)]
    (expected,) = Engine(tiny_model, num_blocks=40).generate(prompts[2:], PARAMS)
    tokenizer: Any = InterruptedText(at)
    engine = Engine(tiny_model, tokenizer, num_blocks=40, max_batch_tokens=48)
    answering = [engine.submit(prompt, PARAMS) for prompt in prompts[:2]]
    prefilling = engine.submit(prompts[2], PARAMS)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert [request.finish_reason for request in answering] == ["abort", "abort"]
    engine.run()
    assert prefilling.output_ids == expected.output_ids
    assert engine.cache.reset()


def test_exception_in_a_callback_fails_its_request_and_costs_nobody_their_text(engine: Engine) -> None:
    shown: dict[Request, int] = {}
    error = ValueError("a pipe that nobody reads")

    def show(completion: Completion, _: str) -> None:
        shown[completion.request] = shown.get(completion.request, 0) + 1
        if completion.request is requests[1] and len(completion.output_ids) == 2:
            raise error

    requests = [engine.submit(random_tokens(20, seed=i), PARAMS, on_token=show) for i in range(4)]
    engine.step()
    assert engine.step() == [requests[1]]
    assert (requests[1].finish_reason, requests[1].error) == ("error", error)
    engine.run()
    assert [shown[request] for request in requests] == [12, 2, 12, 12]
    assert [request.finish_reason for request in requests] == ["length", "error", "length", "length"]
    assert engine.cache.reset()


def test_exception_in_the_callback_of_the_last_token_is_not_lost(engine: Engine) -> None:
    def fail_at_the_end(completion: Completion, _: str) -> None:
        if completion.finish_reason is not None:
            raise ValueError("late")

    (request,) = engine.generate([random_tokens(20, seed=1)], PARAMS, on_token=fail_at_the_end)
    assert request.finish_reason == "error"
    assert isinstance(request.error, ValueError)
    assert len(request.output_ids) == 12


def test_interrupt_in_a_callback_comes_when_all_have_been_called(engine: Engine) -> None:
    shown: dict[Request, int] = {}
    interrupts = [KeyboardInterrupt()]

    def show(completion: Completion, _: str) -> None:
        shown[completion.request] = shown.get(completion.request, 0) + 1
        if interrupts and len(completion.output_ids) == 2:
            raise interrupts.pop()

    requests = [engine.submit(random_tokens(20, seed=i), PARAMS, on_token=show) for i in range(4)]
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.run()
    assert [shown[request] for request in requests] == [12] * 4


def test_request_aborted_by_a_callback_is_called_no_more(engine: Engine) -> None:
    requests: list[Request] = []
    shown: list[Request] = []

    def end_the_other(completion: Completion, _: str) -> None:
        shown.append(completion.request)
        engine.abort(requests[1])

    requests += [engine.submit(random_tokens(20, seed=i), PARAMS, on_token=end_the_other) for i in range(2)]
    engine.run()
    assert shown == [requests[0]] * 12
    assert (requests[1].finish_reason, len(requests[1].output_ids)) == ("abort", 1)


def test_no_extras_may_be_written_as_none(engine: Engine) -> None:
    prompt = random_tokens(20, seed=1)
    engine.generate([prompt], PARAMS)
    engine.submit(prompt, PARAMS, extras=None)
    engine.run()
    (request,) = engine.generate([prompt], PARAMS, extras=None)
    assert request.num_cached_tokens == 16


def test_interrupted_step_can_be_repeated(tiny_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_tokens(50, seed=3)
    expected = Engine(tiny_model, num_blocks=40).generate([prompt], PARAMS)[0].output_ids
    engine = Engine(tiny_model, num_blocks=40, max_batch_tokens=30)
    request = engine.submit(prompt, PARAMS)
    num_calls = 0
    logits_of_norm = tiny_model._norm

    def interrupted(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls in (4, 15, 40):  # in the middle of a chunk, of another one and of decoding
            raise KeyboardInterrupt
        return logits_of_norm(*args)

    monkeypatch.setattr(tiny_model, "_norm", interrupted)
    num_interrupts = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
        engine.cache.check_integrity()
    assert num_interrupts == 3
    assert request.output_ids == expected


def test_pages_held_by_somebody_else_are_an_error_and_no_endless_loop(engine: Engine) -> None:
    foreign = engine.cache.pool.allocate(39)
    request = engine.submit(random_tokens(20, seed=4), PARAMS)
    with pytest.raises(OutOfBlocksError):
        engine.step()
    assert request.state is RequestState.WAITING
    engine.cache.pool.free(foreign)
    engine.run()
    assert len(request.output_ids) == 12


def test_stop_token_ends_the_answer_and_is_its_last_token(engine: Engine) -> None:
    prompt = random_tokens(20, seed=5)
    whole = engine.generate([prompt], PARAMS)[0].output_ids
    stop = whole[5]
    end = whole.index(stop) + 1
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=frozenset({stop}))
    (request,) = engine.generate([prompt], params)
    assert request.output_ids == whole[:end]
    assert request.finish_reason == "stop"


def test_best_logits_are_kept_for_every_token_when_asked_for(engine: Engine) -> None:
    prompt = random_tokens(20, seed=8)
    params = SamplingParams(max_tokens=5, ignore_eos=True, num_top_logits=3)
    (request,) = engine.generate([prompt], params)
    assert [best[0][0] for best in request.top_logits] == request.output_ids  # greedy takes the best
    for index, best in enumerate(request.top_logits):
        logits = all_logits(engine.model, [*prompt, *request.output_ids[:index]])[-1].topk(3)
        assert [token for token, _ in best] == logits.indices.tolist()
        assert [logit for _, logit in best] == pytest.approx(logits.values.tolist(), abs=1e-4)
    assert engine.generate([prompt], PARAMS)[0].top_logits == []


def test_random_answer_does_not_depend_on_the_batch(engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=11, ignore_eos=True)
    prompt = random_tokens(20, seed=6)
    (alone,) = engine.generate([prompt], params)
    together = engine.generate([random_tokens(25, seed=7), prompt, prompt], params)
    assert together[1].output_ids == together[2].output_ids == alone.output_ids


def test_streamed_text_joined_is_the_answer_s_text(smollm2: LoadedModel) -> None:
    engine = Engine(*smollm2, num_blocks=64)
    pieces: dict[int, list[str]] = {}
    requests = [
        engine.submit(
            prompt,
            SamplingParams(max_tokens=16, temperature=1.2, seed=3),
            on_token=lambda completion, text: pieces.setdefault(id(completion.request), []).append(text),
        )
        for prompt in ("Smileys: 😀😃", "日本の首都は", "One, two,")
    ]
    engine.run()
    for request in requests:
        assert "".join(pieces[id(request)]) == request.text
        assert len(pieces[id(request)]) == len(request.output_ids)
