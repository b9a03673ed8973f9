"""Workloads that are made up are what their names say, and the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv import UsageError
from pagedkv.policy import WORKLOADS, Trace, make_workload, simulate

# What a pool without end hits, in per cent of all blocks: from, to.
REUSE = {
    "shared-prompt": (70, 95),
    "multi-turn": (50, 90),
    "rag": (20, 90),
    "tree-of-thoughts": (50, 95),
    "agents": (75, 98),
    "random": (0, 0),
}


def rows(trace: Trace) -> list[tuple[float, int, list[int]]]:
    return [(r.time_s, r.num_tokens, r.content.tolist()) for r in trace.requests]


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_gives_the_same_requests_by_time(name: str) -> None:
    trace = make_workload(name, num_requests=300, seed=5)
    assert rows(trace) == rows(make_workload(name, num_requests=300, seed=5))
    assert rows(trace) != rows(make_workload(name, num_requests=300, seed=6))
    assert len(trace.requests) == 300
    times = [request.time_s for request in trace.requests]
    assert times == sorted(times)
    assert all(request.num_tokens == 16 * len(request.content) for request in trace.requests)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_shorter_workload_begins_the_longer_one(name: str) -> None:
    long, short = (make_workload(name, num_requests=count) for count in (200, 80))
    assert rows(long)[:80] == rows(short)


@pytest.mark.parametrize("name", WORKLOADS)
def test_reuse_is_what_the_name_promises(name: str) -> None:
    trace = make_workload(name, num_requests=2000, seed=1)
    [result] = simulate(trace, policies=["infinite"], blocks=[1])
    low, high = REUSE[name]
    assert low <= 100 * result.block_hit_rate <= high


def test_documents_come_in_any_order() -> None:
    trace = make_workload("rag", num_requests=400)
    first = [int(request.content[19]) for request in trace.requests]  # behind the system prompt
    assert np.unique(first).size > 10
    assert len({int(request.content[0]) for request in trace.requests}) == 1


@pytest.mark.parametrize(("name", "count", "seed"), [("chat", 5, 0), ("rag", 0, 0), ("rag", 5, -1)])
def test_what_is_no_workload_is_refused(name: str, count: int, seed: int) -> None:
    with pytest.raises(UsageError):
        make_workload(name, num_requests=count, seed=seed)
