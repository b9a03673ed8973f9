"""Whatever happens to requests on the way, each is answered as if it were alone."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import assert_completions, assert_idle, toy_engine

from pagedkv.errors import UsageError
from pagedkv.runner.engine import Engine
from pagedkv.runner.request import Request
from pagedkv.runner.sampling import SamplingParams

STEM = [5, 9, 3, 17, 2, 11, 8, 14, 21, 6, 1, 19, 4, 7, 13, 22]

PROMPTS = st.tuples(
    st.integers(0, len(STEM)), st.lists(st.integers(1, 3), max_size=6), st.integers(1, 23)
).map(lambda parts: [*STEM[: parts[0]], *parts[1], parts[2]])

# Few values of each, so that the oracle answers many examples at once.
SAMPLING = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([20, 9, 1])},
    optional={
        "n": st.sampled_from([3, 2]),
        "temperature": st.just(1.5),
        "top_k": st.just(5),
        "min_p": st.just(0.1),
        "repetition_penalty": st.just(1.3),
        "frequency_penalty": st.just(0.5),
        "prompt_logprobs": st.just(0),
        "num_speculative_tokens": st.sampled_from([4, 4, 1]),
        "logit_bias": st.just(((1, 8.0), (2, 8.0), (3, 8.0))),  # few words, so that guesses often hold
        "ignore_eos": st.just(True),
    },
).map(lambda chosen: SamplingParams(seed=7, **chosen))
BEAMS = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([9, 2]),
    num_beams=st.sampled_from([2, 3]),
    length_penalty=st.sampled_from([1.0, 0.0]),
)

REQUESTS = st.lists(
    st.tuples(
        PROMPTS,
        st.integers(0, 4).flatmap(lambda kind: SAMPLING if kind else BEAMS),
        st.sampled_from([None, None, "a"]),
    ),
    min_size=4,
    max_size=8,
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.sampled_from(["abort", "preempt"]), st.integers(0, 7)),
    ),
    min_size=8,
    max_size=20,
)
ENGINES = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([11, 13, 20, 60]),
        "max_batch_tokens": st.sampled_from([3, 7, 16, 64]),
        "max_num_seqs": st.sampled_from([3, 4, 8]),
        "schedule": st.sampled_from(["fcfs", "longest-prefix", "depth-first"]),
        "max_overtakes": st.sampled_from([1, 64]),
        "prefix_caching": st.sampled_from([True, True, True, False]),
    }
)


def add(engine: Engine, prompt: list[int], params: SamplingParams, salt: str | None) -> list[Request]:
    try:
        return [engine.submit(prompt, params, cache_salt=salt)]
    except UsageError:
        assert params.num_beams > 1  # such a pool can't hold them
        return []


def act(engine: Engine, requests: list[Request], verb: str, number: int) -> None:
    running = engine._scheduler.running
    if verb == "abort":
        engine.abort(requests[number % len(requests)])
    elif verb == "preempt" and running:
        engine._scheduler.preempt(running[number % len(running)])
    for _ in range(number if verb == "step" else 0):
        engine.step()
        engine.cache.check_integrity()
    engine.cache.check_integrity()


@settings(max_examples=settings.default.max_examples // 4)  # each is a whole run
@given(ENGINES, REQUESTS, ACTIONS)
def test_any_interleaving_answers_as_alone_and_loses_no_page(
    options: dict[str, Any], queue: list[tuple[Any, ...]], actions: list[tuple[str, int]]
) -> None:
    engine = toy_engine(**options)
    requests: list[Request] = []
    for index, (verb, number) in enumerate(actions):
        if queue and (index % 2 == 0 or not requests):
            requests += add(engine, *queue.pop())
        if requests:
            act(engine, requests, verb, number)
    # Every step brings somebody on, so their number is bounded by the tokens that there are.
    num_tokens = sum(
        len(r.prompt_ids) + r.params.max_tokens * max(r.params.n, r.params.num_beams) for r in requests
    )
    for _ in range(20 + 4 * num_tokens):
        if not engine.has_work:
            break
        engine.step()
    assert_idle(engine)
    for request in requests:
        assert request.finish_reason in ("stop", "length", "abort")
        is_aborted = "abort" in chain(each.finish_reason for each in request.completions)
        assert_completions(request, is_whole=not is_aborted)
        if request.params.prompt_logprobs is not None and not is_aborted:
            assert [each and each.token_id for each in request.prompt_logprobs[1:]] == request.prompt_ids[1:]
