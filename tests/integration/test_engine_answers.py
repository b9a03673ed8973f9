"""Several answers to one prompt, guesses, and how sure the model was."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tiny_models import random_tokens
from toy_engine import MODEL, assert_answer, assert_completions, assert_idle, expected_answer, toy_engine

from pagedkv.extras import Media
from pagedkv.runner.sampling import SamplingParams

PROMPT = random_tokens(18, seed=1, vocab_size=24)
RANDOM = SamplingParams(max_tokens=10, temperature=1.5, seed=3, ignore_eos=True)
# Few words, so that the text repeats itself and guesses hold.
CHATTY = SamplingParams(max_tokens=40, ignore_eos=True, logit_bias={1: 9.0, 2: 9.0, 3: 9.0})


def test_samples_share_the_prompt_and_differ() -> None:
    engine = toy_engine()
    request = engine.submit(PROMPT, replace(RANDOM, n=4))
    engine.step()
    stats = engine.cache.stats()
    assert stats.num_committed_blocks + stats.num_writable_blocks == 5  # 18 tokens in pages of 4, once
    engine.run()
    assert_completions(request)
    assert len({tuple(each.output_ids) for each in request.completions}) == 4
    assert (request.num_output_tokens, request.finish_reason) == (40, "length")
    assert engine.cache.stats().num_prompt_tokens == 18
    assert_idle(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_samples_that_do_not_fit_at_once_take_turns(prefix_caching: bool) -> None:
    # One answer takes 7 pages: two of four can't run side by side without sharing.
    engine = toy_engine(num_blocks=8, prefix_caching=prefix_caching)
    (request,) = engine.generate([PROMPT], replace(RANDOM, n=4))
    assert_completions(request)
    assert request.num_preemptions > 0
    assert_idle(engine)


def test_more_samples_than_may_run_at_once_take_turns() -> None:
    engine = toy_engine(max_num_seqs=2)
    request = engine.submit(PROMPT, replace(RANDOM, n=5))
    while engine.has_work:
        engine.step()
        assert engine.num_running <= 2
    assert_completions(request)
    assert_idle(engine)


def test_sample_does_not_depend_on_how_many_there_are() -> None:
    alone, several = (toy_engine().generate([PROMPT], replace(RANDOM, n=n))[0] for n in (1, 3))
    assert alone.output_ids == several.output_ids


def test_callback_hears_of_every_answer() -> None:
    heard: Counter[int] = Counter()
    toy_engine().generate(
        [PROMPT], replace(RANDOM, n=3), on_token=lambda completion, _: heard.update([completion.index])
    )
    assert heard == {0: 10, 1: 10, 2: 10}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_blocks", [200, 16])
def test_guesses_change_speed_and_nothing_else(temperature: float, num_blocks: int) -> None:
    params = replace(CHATTY, temperature=temperature, seed=5, n=2, frequency_penalty=0.1)
    engine = toy_engine(num_blocks=num_blocks)
    requests = [
        engine.submit(PROMPT[: 18 - i], replace(params, num_speculative_tokens=k))
        for i, k in enumerate((0, 1, 5))
    ]
    engine.run()
    for request in requests:
        prompt, plain = tuple(request.prompt_ids), replace(params, num_speculative_tokens=0)
        for each in request.completions:
            assert_answer(each.output_ids, expected_answer(prompt, plain, each.index))
    assert requests[0].num_draft_tokens == 0
    assert all(0 < r.num_accepted_tokens < r.num_draft_tokens for r in requests[1:])
    assert_idle(engine)


def test_accepted_guesses_save_steps_and_show_every_token() -> None:
    num_steps = []
    for num_guesses in (0, 4):
        engine, shown = toy_engine(), Counter[int]()
        request = engine.submit(
            PROMPT,
            replace(CHATTY, num_speculative_tokens=num_guesses),
            on_token=lambda completion, _, shown=shown: shown.update([completion.index]),  # type: ignore[misc]
        )
        num_steps.append(0)
        while engine.has_work:
            engine.step()
            num_steps[-1] += 1
        assert shown[0] == 40
        assert num_steps[-1] == 40 - request.num_accepted_tokens
    assert num_steps[1] < num_steps[0]


def test_rejected_guesses_are_never_published() -> None:
    engine = toy_engine()
    (request,) = engine.generate([PROMPT], replace(CHATTY, num_speculative_tokens=5))
    assert request.num_accepted_tokens < request.num_draft_tokens
    whole = [*request.prompt_ids, *request.output_ids]
    published = (len(whole) - 1) // 4 * 4
    assert engine.cache.match(whole).num_tokens == published
    assert engine.cache.stats().num_evictable_blocks == published // 4


def test_guesses_end_with_the_answer() -> None:
    whole = expected_answer(tuple(PROMPT), CHATTY)
    for length in range(1, 12):
        (request,) = toy_engine().generate(
            [PROMPT], replace(CHATTY, max_tokens=length, num_speculative_tokens=8)
        )
        assert (request.output_ids, request.finish_reason) == (whole[:length], "length")
    # The last token ends the answer wherever in a step it comes, also as a guess that holds.
    stop = whole[-1]
    params = replace(CHATTY, num_speculative_tokens=8, stop_token_ids={stop})
    (request,) = toy_engine().generate([PROMPT], params)
    assert request.output_ids == whole[: whole.index(stop) + 1]


def test_guesses_stay_within_the_step_s_tokens() -> None:
    engine = toy_engine(max_batch_tokens=3)
    seen = []
    forward = MODEL.forward

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(MODEL, name)

        def forward(self, cache: object, meta: object) -> object:
            seen.append(meta.num_tokens)  # type: ignore[attr-defined]
            return forward(cache, meta)  # type: ignore[arg-type]

    engine.model = Counting()  # type: ignore[assignment]
    params = replace(CHATTY, num_speculative_tokens=9)
    requests = engine.generate([PROMPT, PROMPT[:5]], params)
    assert max(seen) == 3
    for request in requests:
        assert_answer(request.output_ids, expected_answer(tuple(request.prompt_ids), CHATTY))


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs_are_the_model_s_own(num_top: int) -> None:
    params = replace(RANDOM, logprobs=num_top, frequency_penalty=1.0, logit_bias={3: 5.0})
    (request,) = toy_engine().generate([PROMPT], params)
    assert len(request.logprobs) == len(request.output_ids) == 10
    for index, (token_id, found) in enumerate(zip(request.output_ids, request.logprobs, strict=True)):
        logits = torch.from_numpy(MODEL.expected_logits([*PROMPT, *request.output_ids[:index]]))
        expected = logits.log_softmax(-1)
        assert found.token_id == token_id
        assert found.logprob == pytest.approx(float(expected[token_id]), abs=1e-4)
        assert found.rank == int((expected > expected[token_id]).sum()) + 1
        best = expected.topk(num_top)
        assert [token for token, _ in found.top] == best.indices.tolist()
        assert [logprob for _, logprob in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("max_batch_tokens", [5, 64])
@pytest.mark.parametrize("num_top", [0, 2])
def test_prompt_logprobs_are_whole_on_a_warm_cache(max_batch_tokens: int, num_top: int) -> None:
    prompt = random_tokens(57, seed=2, vocab_size=24)
    engine = toy_engine(max_batch_tokens=max_batch_tokens)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    (cold,) = engine.generate([prompt], replace(params, prompt_logprobs=num_top))
    assert engine.cache.match(prompt).num_tokens >= 56  # it fills the cache
    (warm,) = engine.generate([prompt], replace(params, prompt_logprobs=num_top))
    (plain,) = engine.generate([prompt], params)
    assert [request.num_cached_tokens for request in (cold, warm, plain)] == [0, 0, 56]
    assert plain.prompt_logprobs == []
    assert cold.output_ids == warm.output_ids == plain.output_ids
    for request in (cold, warm):
        assert len(request.prompt_logprobs) == 57
        assert request.prompt_logprobs[0] is None
        for index, found in enumerate(request.prompt_logprobs[1:], 1):
            assert found is not None
            expected = torch.from_numpy(MODEL.expected_logits(prompt[:index])).log_softmax(-1)
            assert found.token_id == prompt[index]
            assert found.logprob == pytest.approx(float(expected[prompt[index]]), abs=1e-4)
            assert len(found.top) == num_top
    assert_idle(engine)


def test_prompt_logprobs_survive_a_preemption_half_way() -> None:
    engine = toy_engine(max_batch_tokens=6)
    request = engine.submit(PROMPT, SamplingParams(max_tokens=2, prompt_logprobs=0))
    engine.step()
    engine._scheduler.preempt(engine._scheduler.running[0])
    engine.run()
    assert [each and each.token_id for each in request.prompt_logprobs[1:]] == PROMPT[1:]
    assert_idle(engine)


def test_prompt_logprobs_of_one_token_are_none() -> None:
    (request,) = toy_engine().generate([[5]], SamplingParams(max_tokens=1, prompt_logprobs=3))
    assert request.prompt_logprobs == [None]


def test_prompt_logprobs_beside_media_and_beams_are_those_without() -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    (plain,) = toy_engine().generate([PROMPT], params)
    engine, media = toy_engine(max_batch_tokens=5), [Media(3, 2, bytes(32))]
    beams = replace(params, num_beams=2)
    for wanted in (params, beams):
        for request in engine.generate([PROMPT, PROMPT], wanted, extras=media):
            assert [each and each.token_id for each in request.prompt_logprobs[1:]] == PROMPT[1:]
            for ours, theirs in zip(request.prompt_logprobs[1:], plain.prompt_logprobs[1:], strict=True):
                assert ours is not None
                assert theirs is not None
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    # What was computed is found by those who want no such thing, and by nobody without the picture.
    assert engine.cache.match(PROMPT, extras=media).num_tokens >= 16
    assert engine.cache.match(PROMPT).num_tokens == 3
    assert engine.cache.stats().num_prompt_tokens == 0
    assert_idle(engine)
