"""What Prometheus is told of a pool: its counters, under names that dashboards know."""

from __future__ import annotations

import subprocess
import sys
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_driving import remember, run

from pagedkv import BackendUnavailableError, BlockPool, UsageError
from pagedkv.prometheus import Histogram, Metrics, MetricsServer
from pagedkv.stats import CacheCollector

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

HUNDRED = list(range(100))
Sample = tuple[str, frozenset[tuple[str, str]]]


def scrape(text: str) -> dict[Sample, float]:
    """Parse what a scrape gives: the value of each sample by its name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(pool: BlockPool, **options: str) -> dict[Sample, float]:
    registry = CollectorRegistry()
    registry.register(CacheCollector(pool, **options))
    return scrape(generate_latest(registry).decode())


def value(samples: dict[Sample, float], name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


@pytest.mark.parametrize("prefix", ["pagedkv", "vllm"])
def test_scrape_shows_the_pool_s_counters_in_tokens(prefix: str) -> None:
    pool = BlockPool(8)
    remember(pool, HUNDRED[:48])
    seq = pool.open([*HUNDRED[:40], *range(500, 520)])
    run(pool, seq)
    stats, samples = pool.stats(), scraped(pool, prefix=prefix)
    assert stats.num_cached_tokens == 40
    assert value(samples, f"{prefix}:prefix_cache_queries_total") == 108
    assert value(samples, f"{prefix}:prefix_cache_hits_total") == 40
    assert value(samples, f"{prefix}:prompt_tokens_cached_by_source_total", source="device") == 40
    held = stats.num_writable_blocks + stats.num_committed_blocks
    assert value(samples, f"{prefix}:kv_cache_usage_perc") == held / 8 == 0.5


def test_usage_counts_what_is_held_and_not_what_is_only_cached() -> None:
    pool = BlockPool(8)
    assert value(scraped(pool), "pagedkv:kv_cache_usage_perc") == 0
    remember(pool, HUNDRED)
    assert value(scraped(pool), "pagedkv:kv_cache_usage_perc") == 0
    ids = pool.allocate(8)
    assert value(scraped(pool), "pagedkv:kv_cache_usage_perc") == 1
    pool.free(ids)


def test_evictions_are_told_by_reason_and_pages_by_state() -> None:
    pool = BlockPool(8)
    for first in (1000, 2000):
        remember(pool, [first + i for i in range(96)])
    pool.evict(1)
    stats, samples = pool.stats(), scraped(pool)
    assert stats.num_evicted_blocks > 1
    for reason, count in stats.num_evicted_by.items():
        assert value(samples, "pagedkv:kv_cache_evictions_total", reason=reason) == count
    states = ("free", "writable", "committed", "evictable")
    assert sum(value(samples, "pagedkv:kv_cache_blocks", state=state) for state in states) == 8
    assert value(samples, "pagedkv:kv_block_lifetime_seconds_bucket", le="+Inf") == stats.num_evicted_blocks


def test_labels_are_on_every_metric() -> None:
    for _, labels in scraped(BlockPool(2), labels={"model_name": "tiny"}):
        assert ("model_name", "tiny") in labels


@given(st.lists(st.floats(0, 2000)))
def test_histogram_counts_each_value_at_its_bound(values: list[float]) -> None:
    histogram = Histogram([1, 10, 100])
    for each in values:
        histogram.add(each)
    registry = CollectorRegistry()
    family = Metrics().histogram("x", "", histogram.bounds, histogram.counts, histogram.total)
    registry.register(type("One", (), {"collect": lambda self: [family]})())
    samples = scrape(generate_latest(registry).decode())
    for bound in (1, 10, 100):
        assert value(samples, "pagedkv:x_bucket", le=f"{bound}.0") == sum(v <= bound for v in values)
    assert value(samples, "pagedkv:x_count") == len(values)
    assert value(samples, "pagedkv:x_sum") == pytest.approx(sum(values))


@pytest.mark.parametrize("wrong", ["", "a-b", "1a", "a:b", None])
def test_prefix_that_is_no_name_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="prefix: expected letters, digits and underscores, got"):
        CacheCollector(BlockPool(2), prefix=wrong)


def test_server_answers_until_it_is_closed_and_names_a_taken_port() -> None:
    pool = BlockPool(2)
    with MetricsServer(CacheCollector(pool), port=0) as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as reply:
            assert "pagedkv:kv_cache_usage_perc" in reply.read().decode()
        with pytest.raises(UsageError, match=f"port: expected one that is free, got {server.port}"):
            MetricsServer(CacheCollector(pool), port=server.port)
    server.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=10)


def test_without_prometheus_client_the_extra_is_named() -> None:
    code = """
import sys
sys.modules["prometheus_client"] = None
import pagedkv
from pagedkv.stats import CacheCollector
try:
    CacheCollector(pagedkv.BlockPool(2))
except pagedkv.BackendUnavailableError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install 'pagedkv[metrics]'" in result.stdout, result.stderr
    assert issubclass(BackendUnavailableError, ImportError)
