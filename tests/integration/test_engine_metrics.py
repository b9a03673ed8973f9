"""What an engine tells of its requests: every one counted once, and times that add up."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from toy_engine import toy_engine

from pagedkv.runner.engine import Engine
from pagedkv.runner.metrics import EngineCollector
from pagedkv.runner.request import Request
from pagedkv.runner.sampling import SamplingParams

prometheus_client = pytest.importorskip("prometheus_client")

# What vLLM's example dashboards ask for.
VLLM_NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_by_source_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_prefill_kv_computed_tokens_bucket",
}
PROMPT = [1 + i % 7 for i in range(30)]


def ticking_engine(**options: Any) -> Engine:
    """Make an engine on whose clock a second passes at each look."""
    ticks = count()
    return toy_engine(clock=lambda: float(next(ticks)), **options)


def samples(engine: Engine, prefix: str = "pagedkv") -> dict[str, float]:
    """Scrape an engine: sums over labels by name."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(EngineCollector(engine, prefix=prefix))
    found: dict[str, float] = {}
    for family in registry.collect():
        for sample in family.samples:
            assert sample.labels["model_name"] == "toy"
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_vllm_s_names_are_all_there() -> None:
    assert set(samples(toy_engine(), "vllm")) >= VLLM_NAMES


def test_each_request_is_counted_once_with_its_own_figures() -> None:
    engine = ticking_engine()
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    first = engine.generate([PROMPT], params)[0]
    second = engine.generate([PROMPT], params)[0]
    assert first.stats.num_cached_tokens_by_source == {"device": 0}
    assert first.stats.num_computed_tokens == 30
    found = second.stats.num_cached_tokens_by_source["device"]
    assert found == 29
    assert second.stats.num_computed_tokens == 1
    for request in (first, second):
        stats = request.stats
        assert stats.finish_reason == "length"
        assert stats.num_output_tokens == 5
        assert stats.queue_s is not None
        assert stats.time_to_first_token_s is not None
        assert stats.time_per_output_token_s is not None
        assert 0 < stats.queue_s < stats.time_to_first_token_s
        assert request.finished_s is not None
        # The parts of a request's time add up to all of it.
        total_s = stats.time_to_first_token_s + 4 * stats.time_per_output_token_s
        assert total_s == pytest.approx(request.finished_s - request.submitted_s)
    seen = samples(engine)
    assert seen["pagedkv:prefix_cache_queries_total"] == seen["pagedkv:prompt_tokens_total"] == 60
    assert seen["pagedkv:prefix_cache_hits_total"] == 29
    assert seen["pagedkv:generation_tokens_total"] == 10
    assert seen["pagedkv:request_success_total"] == 2
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "e2e_request_latency_seconds"):
        assert seen[f"pagedkv:{name}_count"] == 2
    waits_s = [request.time_to_first_token_s or 0.0 for request in (first, second)]
    assert seen["pagedkv:time_to_first_token_seconds_sum"] == pytest.approx(sum(waits_s))
    assert seen["pagedkv:inter_token_latency_seconds_count"] == 2 * 4
    assert seen["pagedkv:request_prefill_kv_computed_tokens_sum"] == 31


def test_answers_of_one_request_are_one_request_and_all_their_tokens() -> None:
    engine = ticking_engine()
    engine.generate([PROMPT], SamplingParams(n=3, max_tokens=4, temperature=1, seed=0, ignore_eos=True))
    seen = samples(engine)
    assert seen["pagedkv:request_success_total"] == 1
    assert seen["pagedkv:generation_tokens_total"] == 12
    assert seen["pagedkv:time_to_first_token_seconds_count"] == 1
    assert seen["pagedkv:inter_token_latency_seconds_count"] == 3 * 3


def test_ends_are_told_apart_and_an_abort_in_the_queue_has_no_latency() -> None:
    engine = ticking_engine(max_num_seqs=1)
    params = SamplingParams(max_tokens=3, ignore_eos=True)

    def fail(*_: object) -> None:
        raise RuntimeError("nobody listens")

    requests: list[Request] = [
        engine.submit(PROMPT, params, on_token=fail),
        engine.submit(PROMPT, params),
        engine.submit(PROMPT, params),
    ]
    engine.abort(requests[2])
    engine.run()
    assert engine.metrics.num_finished_by == {"stop": 0, "length": 1, "abort": 1, "deadline": 0, "error": 1}
    assert requests[2].stats.queue_s is None
    assert samples(engine)["pagedkv:time_to_first_token_seconds_count"] == 2
