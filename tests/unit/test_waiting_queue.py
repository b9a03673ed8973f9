"""Who is admitted next, by each policy, and that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st
from toy_engine import MODEL

from pagedkv.cache import PagedKVCache
from pagedkv.errors import UsageError
from pagedkv.runner.job import Job
from pagedkv.runner.policies import POLICIES, DepthFirst, LongestPrefix, make_policy
from pagedkv.runner.request import Request
from pagedkv.runner.sample_job import SampleJob
from pagedkv.runner.sampling import SamplingParams
from pagedkv.runner.waiting import WaitingQueue


def make_cache() -> PagedKVCache:
    return PagedKVCache(MODEL.config.kv_spec("float32", block_size=4), 40)


def make_job(cache: PagedKVCache, prompt: Sequence[int], salt: str | None = None) -> Job:
    request = Request(
        prompt_ids=list(prompt),
        params=SamplingParams(),
        end_tokens=frozenset(),
        submitted_s=0.0,
        cache_salt=salt,
    )
    return SampleJob(request.completions[0], cache)


def compute(cache: PagedKVCache, prompt: list[int]) -> None:
    with cache.open(prompt) as sequence:
        step = cache.reserve(sequence, len(prompt))
        cache.prepare(step)
        cache.commit(step)


def first_tokens(jobs: Sequence[Job]) -> list[int]:
    return [job.request.prompt_ids[0] for job in jobs]


def test_first_come_is_first_served() -> None:
    cache = make_cache()
    queue = WaitingQueue(make_policy("fcfs"), max_overtakes=9)
    for token in (3, 1, 2):
        queue.add(make_job(cache, [token]))
    assert first_tokens(queue.candidates(cache.pool, 9)) == [3, 1, 2]
    assert first_tokens(queue.candidates(cache.pool, 2)) == [3, 1]


def test_longest_cached_prefix_comes_first_and_the_oldest_among_equals() -> None:
    cache = make_cache()
    for length in (4, 12, 8):
        compute(cache, [length] * length)
    queue = WaitingQueue(make_policy("longest-prefix"), max_overtakes=9)
    for token in (1, 4, 12, 2, 8):
        queue.add(make_job(cache, [token] * 13))
    assert first_tokens(queue.candidates(cache.pool, 9)) == [12, 8, 4, 1, 2]


def test_longest_prefix_looks_all_of_a_long_queue_up_in_turn() -> None:
    cache = make_cache()
    policy = LongestPrefix(window=3)
    jobs = [make_job(cache, [token] * 5) for token in range(1, 9)]
    policy.order(jobs, cache.pool)
    compute(cache, [8] * 4)
    assert first_tokens(list(policy.order(jobs, cache.pool)))[0] == 1  # not looked up yet
    assert first_tokens(list(policy.order(jobs, cache.pool)))[0] == 8
    compute(cache, [2] * 4)
    for _ in range(3):
        order = first_tokens(list(policy.order(jobs, cache.pool)))
    assert order[:2] == [2, 8]


def test_depth_first_keeps_together_what_begins_alike_and_walks_on() -> None:
    cache = make_cache()
    policy = DepthFirst()
    prompts = [[7, 1, 1], [2, 1], [7, 1, 2], [2, 2], [7, 1, 1], [300, 1]]
    jobs = [make_job(cache, prompt) for prompt in prompts]
    in_order = [job.request.prompt_ids for job in policy.order(jobs, cache.pool)]
    assert in_order == [[2, 1], [2, 2], [7, 1, 1], [7, 1, 1], [7, 1, 2], [300, 1]]
    policy.admitted(jobs[0])
    in_order = [job.request.prompt_ids for job in policy.order(jobs[1:], cache.pool)]
    assert in_order == [[7, 1, 1], [7, 1, 2], [300, 1], [2, 1], [2, 2]]


def test_depth_first_keeps_tenants_apart() -> None:
    cache = make_cache()
    jobs = [make_job(cache, [token], salt) for token, salt in ((1, "b"), (1, None), (2, "b"), (2, None))]
    order = DepthFirst().order(jobs, cache.pool)
    assert [job.request.cache_salt for job in order] == [None, None, "b", "b"]


def test_preempted_come_first_in_the_order_of_their_admission() -> None:
    cache = make_cache()
    queue = WaitingQueue(make_policy("fcfs"), max_overtakes=9)
    for token in (1, 2, 3):
        queue.add(make_job(cache, [token]))
    for rank, token in ((5, 4), (2, 5)):
        job = make_job(cache, [token])
        job.rank = rank
        queue.put_back(job)
    assert first_tokens(queue.candidates(cache.pool, 9)) == [5, 4, 1, 2, 3]
    assert len(queue) == 5


@given(st.sampled_from(["longest-prefix", "depth-first"]), st.integers(1, 5), st.integers(1, 400), st.data())
def test_nobody_is_overtaken_more_often_than_the_bound(
    schedule: str, max_overtakes: int, num_waiting: int, data: st.DataObject
) -> None:
    """Without end new requests arrive that the policy likes better."""
    cache = make_cache()
    compute(cache, [9] * 8)
    queue = WaitingQueue(make_policy(schedule), max_overtakes=max_overtakes)
    tokens = data.draw(st.lists(st.integers(1, 30), min_size=8, max_size=8))
    jobs = [make_job(cache, [tokens[i % 8], i]) for i in range(num_waiting)]
    for job in jobs:
        queue.add(job)
    for num_admitted in range(12):
        queue.add(make_job(cache, [9] * 8 + [num_admitted]))
        queue.admit(queue.candidates(cache.pool, 1)[0])
    assert all(job.num_overtakes <= max_overtakes for job in jobs)
    if num_waiting < 5:
        assert not set(jobs) & set(queue.candidates(cache.pool, 999)) or max_overtakes + num_waiting > 10


def test_any_may_leave_a_long_queue_in_any_order() -> None:
    cache = make_cache()
    queue = WaitingQueue(make_policy("longest-prefix"), max_overtakes=1)
    jobs = [make_job(cache, [token % 20, token]) for token in range(3000)]
    for job in jobs:
        queue.add(job)
    queue.admit(jobs[1500])  # those before it were overtaken once, which is often enough
    del jobs[1500]
    assert queue.candidates(cache.pool, 2) == jobs[:2]
    for job in reversed(jobs):
        queue.remove(job)
    assert len(queue) == 0
    assert queue.candidates(cache.pool, 9) == []


@pytest.mark.parametrize("wrong", ["lifo", "", None, 3])
def test_unknown_policy_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="schedule: expected one of 'fcfs', 'longest-prefix', 'depth-first'"):
        make_policy(wrong)


def test_policy_of_one_s_own_will_do() -> None:
    policy = DepthFirst()
    assert make_policy(policy) is policy
    assert {type(make_policy(name)) for name in POLICIES} == set(POLICIES.values())
