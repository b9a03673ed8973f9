"""Who runs when: shared beginnings, the order of the queue, victims, and pages kept for those that wait."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_models import random_tokens
from toy_engine import assert_completions, assert_idle, toy_engine

from pagedkv.runner.request import Request, RequestState
from pagedkv.runner.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
STEM = random_tokens(24, seed=1, vocab_size=24)


def tokens(count: int, seed: int) -> list[int]:
    return random_tokens(count, seed=seed, vocab_size=24)


def states(requests: list[Request]) -> str:
    return "".join(request.state.value[0] for request in requests)


def test_request_that_waits_for_a_prefix_holds_up_nobody_behind_it() -> None:
    engine = toy_engine()
    requests = [engine.submit(prompt, PARAMS) for prompt in ([*STEM, 1], [*STEM, 2], tokens(9, seed=2))]
    engine.step()
    assert states(requests) == "rwr"
    engine.step()
    assert [request.num_cached_tokens for request in requests] == [0, 24, 0]
    engine.run()
    for request in requests:
        assert_completions(request)


def test_prefix_shared_by_many_is_computed_once_in_chunks() -> None:
    engine = toy_engine(max_batch_tokens=10)
    requests = engine.generate([[*STEM, i] for i in range(6)], PARAMS)
    assert [request.num_cached_tokens for request in requests] == [0, 24, 24, 24, 24, 24]


def test_policies_admit_in_their_order() -> None:
    first = {}
    for schedule in ("fcfs", "longest-prefix", "depth-first"):
        engine = toy_engine(max_num_seqs=1, schedule=schedule)
        engine.generate([STEM], PARAMS)
        prompts = [[20, 1], [3, 1], [*STEM, 5], [20, 2], [3, 2]]
        requests = [engine.submit(prompt, PARAMS) for prompt in prompts]
        done: list[Request] = []
        while engine.has_work:
            done += engine.step()
        first[schedule] = [requests.index(request) for request in done]
    assert first["fcfs"] == [0, 1, 2, 3, 4]
    # Each answer leaves something that the next prompt with the same first token hits.
    assert first["longest-prefix"] == [2, 0, 3, 1, 4]
    # The walk goes on behind the stem that was answered last: its own continuation, then up and around.
    assert first["depth-first"] == sorted(range(5), key=lambda i: (prompts[i] < STEM, prompts[i]))


def test_old_request_is_not_passed_over_for_ever() -> None:
    engine = toy_engine(max_num_seqs=1, schedule="longest-prefix", max_overtakes=3)
    engine.generate([STEM], PARAMS)
    old = engine.submit(tokens(8, seed=9), PARAMS)
    num_before = 0
    for index in range(200):
        if old.state is not RequestState.WAITING:
            break
        engine.submit([*STEM, index % 24], replace(PARAMS, max_tokens=1))  # always one that hits
        num_before += len(engine.step())
    assert num_before == 3
    engine.run()
    assert_completions(old)
    assert_idle(engine)


def test_victim_is_one_that_has_pages_to_give() -> None:
    """Requests that share all their pages with others give nothing by themselves."""
    engine = toy_engine(num_blocks=14)
    params = replace(PARAMS, max_tokens=20)
    oldest = engine.submit(tokens(9, seed=3), params)
    older = engine.submit(tokens(16, seed=4), params)
    engine.step()
    samples = engine.submit(tokens(15, seed=5), replace(params, n=2, temperature=1.0, seed=1))
    while engine.has_work:
        engine.step()
        engine.cache.check_integrity()
    assert oldest.num_preemptions == 0
    for request in (oldest, older, samples):
        assert_completions(request)
    assert_idle(engine)


def test_preempted_request_finds_its_own_pages_again() -> None:
    engine = toy_engine(num_blocks=30)
    requests = [engine.submit(tokens(17, seed=i), replace(PARAMS, max_tokens=12)) for i in range(2)]
    for _ in range(4):
        engine.step()
    engine._scheduler.preempt(engine._scheduler.running[1])
    engine.step()
    # 20 tokens were computed, all in whole pages; the last is computed again for its logits.
    assert requests[1].sequences[0].num_cached_tokens == 20
    assert len(requests[1].output_ids) == 5
    engine.run()
    assert requests[1].num_preemptions == 1
    for request in requests:
        assert_completions(request)


def test_prefixes_of_waiting_requests_are_evicted_last() -> None:
    engine = toy_engine(num_blocks=20, max_num_seqs=1)
    kept, other = tokens(20, seed=6), tokens(20, seed=7)
    for prompt in (kept, other):  # so that the kept one is the older
        engine.generate([prompt], replace(PARAMS, max_tokens=1))
    big = engine.submit(tokens(52, seed=8), PARAMS)
    waiting = engine.submit([*kept, 1], PARAMS)
    engine.step()
    assert states([big, waiting]) == "rw"
    assert engine.cache.match(kept).num_tokens == 20
    assert engine.cache.match(other).num_tokens < 20
    engine.run()
    assert waiting.num_cached_tokens == 20


@pytest.mark.parametrize("max_batch_tokens", [1, 2, 5])
def test_few_tokens_a_step_still_bring_everybody_on(max_batch_tokens: int) -> None:
    engine = toy_engine(num_blocks=14, max_batch_tokens=max_batch_tokens)
    requests = [engine.submit(tokens(3 + 5 * i, seed=i), PARAMS) for i in range(5)]
    for _ in range(500):
        engine.step()
    assert_idle(engine)
    for request in requests:
        assert_completions(request)
