"""Reuse changes how much is computed and nothing else: every answer equals that of a run without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import random_tokens

from pagedkv.runner.engine import Engine
from pagedkv.runner.loader import load_model
from pagedkv.runner.model import Model
from pagedkv.runner.request import Request
from pagedkv.runner.sampling import SamplingParams

NUM_NEW = 20
PARAMS = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
ROOMY = 200


@pytest.fixture(scope="module")
def alone(tiny_model: Model) -> Any:
    """Answers as computed by themselves, without a cache; each prompt's once."""
    known: dict[tuple[Any, ...], list[int]] = {}

    def answer(prompt: Sequence[int], params: SamplingParams = PARAMS) -> list[int]:
        key = (tuple(prompt), params)
        if key not in known:
            engine = Engine(tiny_model, num_blocks=ROOMY, prefix_caching=False)
            known[key] = engine.generate([prompt], params)[0].output_ids
        return known[key]

    return answer


def assert_idle(engine: Engine) -> None:
    """No request is left, and none left a page behind."""
    stats = engine.cache.stats()
    assert not engine.has_work
    assert stats.num_writable_blocks == 0
    assert stats.num_committed_blocks == 0
    assert stats.num_free_blocks + stats.num_evictable_blocks == stats.num_blocks
    engine.cache.check_integrity()


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 33])
@pytest.mark.parametrize("num_new", [1, NUM_NEW])
def test_prompt_sent_twice_reuses_all_but_what_must_be_computed(
    tiny_model: Model, alone: Any, num_tokens: int, num_new: int
) -> None:
    engine = Engine(tiny_model, num_blocks=ROOMY)
    prompt = random_tokens(num_tokens, seed=num_tokens)
    first, second = (
        engine.generate([prompt], SamplingParams(max_tokens=num_new, ignore_eos=True))[0] for _ in range(2)
    )
    assert first.output_ids == second.output_ids == alone(prompt)[:num_new]
    assert first.num_cached_tokens == 0
    # Whole blocks were published, answers included; the last token is computed again for its logits.
    num_published = (num_tokens + num_new - 1) // 16 * 16
    assert second.num_cached_tokens == min(num_published, num_tokens - 1)
    assert_idle(engine)


@pytest.mark.parametrize("num_shared", [0, 1, 7, 15, 16, 17, 40, 47, 48, 49])
def test_prompt_that_diverges_inside_a_block_reuses_to_the_last_common_token(
    tiny_model: Model, alone: Any, num_shared: int
) -> None:
    first = random_tokens(64, seed=1)
    second = [*first[:num_shared], (first[num_shared] + 1) % 199, *random_tokens(30, seed=2)]
    engine = Engine(tiny_model, num_blocks=ROOMY)
    answers = [engine.generate([prompt], PARAMS)[0] for prompt in (first, second, first)]
    assert [answer.output_ids for answer in answers] == [alone(first), alone(second), alone(first)]
    assert [answer.num_cached_tokens for answer in answers] == [0, num_shared, 63]
    assert_idle(engine)


def test_conversation_reuses_its_own_answers(tiny_model: Model, alone: Any) -> None:
    engine = Engine(tiny_model, num_blocks=ROOMY)
    history = random_tokens(21, seed=3)
    for turn in range(4):
        (request,) = engine.generate([history], PARAMS)
        assert request.output_ids == alone(history)
        history = [*history, *request.output_ids, *random_tokens(9, seed=10 + turn)]
        # The last sampled token was never computed, and only whole blocks are published.
        published = (request.num_prompt_tokens + NUM_NEW - 1) // 16 * 16
        assert engine.cache.match(history).num_tokens == published
    assert_idle(engine)


def test_switched_off_cache_finds_nothing(tiny_model: Model, alone: Any) -> None:
    engine = Engine(tiny_model, num_blocks=ROOMY, prefix_caching=False)
    prompt = random_tokens(40, seed=4)
    for _ in range(2):
        (request,) = engine.generate([prompt], PARAMS)
        assert (request.num_cached_tokens, request.output_ids) == (0, alone(prompt))
    assert engine.cache.stats().num_evictable_blocks == 0
    assert_idle(engine)


def test_salts_share_with_themselves_only(tiny_model: Model, alone: Any) -> None:
    engine = Engine(tiny_model, num_blocks=ROOMY)
    prompt = random_tokens(40, seed=5)
    cached = {}
    for salt in (None, "a", b"b", "a", None, "b"):
        (request,) = engine.generate([prompt], PARAMS, cache_salt=salt)
        assert request.output_ids == alone(prompt)
        cached.setdefault(salt, []).append(request.num_cached_tokens)
    # Text counts as its UTF-8 bytes, so "b" is b"b".
    assert cached == {None: [0, 39], "a": [0, 39], b"b": [0], "b": [39]}


def family(count: int, seed: int) -> list[list[int]]:
    """Prompts of many lengths with shared beginnings of many lengths, some of them equal."""
    stem = random_tokens(100, seed=seed)
    prompts = [
        [*stem[: (13 * i) % 97], *random_tokens(1 + (29 * i) % 60, seed=100 * seed + i)] for i in range(count)
    ]
    return [*prompts, prompts[0], stem, stem]


@pytest.mark.parametrize("max_batch_tokens", [1, 19, 64, 1024])
@pytest.mark.parametrize("num_blocks", [ROOMY, 24], ids=["roomy", "tight"])
def test_interleaved_requests_answer_as_alone(
    tiny_model: Model, alone: Any, max_batch_tokens: int, num_blocks: int
) -> None:
    engine = Engine(tiny_model, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, max_num_seqs=5)
    prompts = family(9, seed=6)
    if max_batch_tokens == 1:
        prompts = prompts[-4:]
    requests = []
    for prompt in prompts:  # one more every other step, while the others run
        requests.append(engine.submit(prompt, PARAMS))
        engine.step()
        engine.step()
        engine.cache.check_integrity()
    engine.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_ids == alone(prompt)
    assert_idle(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_requests_preempted_by_a_small_pool_answer_as_alone(
    tiny_model: Model, alone: Any, prefix_caching: bool
) -> None:
    engine = Engine(tiny_model, num_blocks=14, max_batch_tokens=64, prefix_caching=prefix_caching)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    prompts = [random_tokens(40 + 7 * i, seed=20 + i) for i in range(6)]
    requests = [engine.submit(prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
        engine.cache.check_integrity()
    assert [request.output_ids for request in requests] == [alone(prompt, params) for prompt in prompts]
    assert sum(request.num_preemptions for request in requests) >= 2
    assert requests[0].num_preemptions == 0  # the oldest never gives way
    assert engine.cache.stats().num_prompt_tokens == sum(map(len, prompts))  # each counted once
    assert_idle(engine)


def test_preempted_request_draws_the_same_random_answer(tiny_model: Model, alone: Any) -> None:
    params = [
        SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=seed, ignore_eos=True)
        for seed in range(5)
    ]
    prompts = [random_tokens(40, seed=30 + i) for i in range(5)]
    engine = Engine(tiny_model, num_blocks=12)
    requests = [engine.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    engine.run()
    assert sum(request.num_preemptions for request in requests) > 0
    for request, prompt, each in zip(requests, prompts, params, strict=True):
        assert request.output_ids == alone(prompt, each)


def test_same_prompt_sent_by_many_at_once_is_computed_once(tiny_model: Model, alone: Any) -> None:
    engine = Engine(tiny_model, num_blocks=ROOMY, max_batch_tokens=30)
    stem = random_tokens(80, seed=7)
    prompts = [[*stem, i, i + 1, i + 2] for i in range(4)]
    requests = engine.generate(prompts, PARAMS)
    assert [request.output_ids for request in requests] == [alone(prompt) for prompt in prompts]
    assert [request.num_cached_tokens for request in requests] == [0, 80, 80, 80]
    # They wait for the shared beginning only, not for the first answer.
    assert requests[1].first_token_s is not None
    assert requests[0].finished_s is not None
    assert requests[1].first_token_s < requests[0].finished_s


def test_warm_request_computes_only_what_is_new(tiny_model: Model) -> None:
    engine = Engine(tiny_model, num_blocks=ROOMY)
    prompt = random_tokens(160, seed=8)
    engine.generate([prompt], PARAMS)
    rows: list[int] = []
    forward = engine.model.forward

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(tiny_model, name)

        def forward(self, cache: Any, meta: Any) -> Any:
            rows.append(meta.num_tokens)
            return forward(cache, meta)

    engine.model = Counting()  # type: ignore[assignment]
    (request,) = engine.generate([[*prompt, 1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert request.num_cached_tokens == 160
    assert rows == [3, 1]


def test_eviction_between_requests_costs_reuse_but_no_correctness(tiny_model: Model, alone: Any) -> None:
    engine = Engine(tiny_model, num_blocks=10)
    prompts = [random_tokens(100, seed=40 + i) for i in range(3)]
    for prompt in [*prompts, *prompts]:
        (request,) = engine.generate([prompt], PARAMS)
        assert request.output_ids == alone(prompt)
    assert engine.cache.stats().num_evicted_blocks > 0
    assert_idle(engine)


PASSAGE = """
The library kept its oldest maps in a cold room below the reading hall. Marta Weiss, who had looked after
them for thirty-one years, allowed visitors on Tuesdays only, and never more than two at a time. In the
spring of 1987 a water pipe broke above cabinet nine. Nobody was hurt, but four charts of the northern coast
were soaked before the night guard, a student named Pavel, carried them upstairs in his coat. They were
dried between sheets of blotting paper for eleven days. Three of them survived. The fourth, drawn in 1652 by
an unknown hand, had lost its legend, and with it the only known list of the lighthouses that stood there.
"""


def test_bfloat16_answers_are_equal_up_to_the_first_near_tie(
    smollm2_path: Path, record_property: Callable[[str, object], None]
) -> None:
    model, tokenizer = load_model(smollm2_path, dtype="bfloat16")
    assert tokenizer is not None
    params = SamplingParams(max_tokens=16, ignore_eos=True, num_top_logits=2)
    questions = ("Who carried the charts upstairs?", "Write a short poem about it.")
    prompts = [tokenizer.encode_chat([{"role": "user", "content": PASSAGE + each}]) for each in questions]
    off, on = (Engine(model, tokenizer, num_blocks=60, prefix_caching=flag) for flag in (False, True))
    on.generate([prompts[0][:-20]], replace(params, max_tokens=1))
    for prompt in prompts:
        (cold,), (warm,) = (engine.generate([prompt], params) for engine in (off, on))
        assert warm.num_cached_tokens >= 160
        # Products of another number of rows are rounded differently; only near ties may change places.
        margins = [
            min(best - second for (_, best), (_, second) in pair)
            for pair in zip(cold.top_logits, warm.top_logits, strict=True)
        ]
        tie = next((step for step, margin in enumerate(margins) if margin <= 0.05), None)
        record_property("first near tie", tie)
        assert cold.output_ids[:tie] == warm.output_ids[:tie]
        assert tie != 0  # it would leave nothing to compare


def test_finished_request_reports_its_times(tiny_model: Model) -> None:
    request: Request = Engine(tiny_model, num_blocks=ROOMY).generate([random_tokens(20, seed=9)], PARAMS)[0]
    assert request.time_to_first_token_s is not None
    assert request.prefill_s is not None
    assert 0 < request.prefill_s <= request.time_to_first_token_s
    assert request.decode_tokens_per_s is not None
    assert request.decode_tokens_per_s > 0
    assert request.finish_reason == "length"
