"""What an engine accepts it can finish, with windows or without, in the smallest pool that it asks for."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

pytest.importorskip("torch")

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_models import TINY, random_tensors, random_tokens

from pagedkv.errors import UsageError
from pagedkv.runner.engine import Engine
from pagedkv.runner.model import Model
from pagedkv.runner.request import Request
from pagedkv.runner.sampling import SamplingParams

BLOCK_SIZE = 4
WINDOWS = [(None, None), (None, 6), (None, 1), (9, 9), (5, 14)]
PARAMS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 20)},
    optional={
        "n": st.sampled_from([2, 3]),
        "num_beams": st.sampled_from([2, 3]),
        "num_speculative_tokens": st.just(4),
        "prompt_logprobs": st.just(0),
    },
)
PROMPTS = st.tuples(st.integers(1, 50), st.integers(0, 1))
ENGINES = st.fixed_dictionaries(
    {
        "max_batch_tokens": st.sampled_from([3, 7, 16, 64]),
        "max_num_seqs": st.sampled_from([3, 8]),
        "prefix_caching": st.sampled_from([True, True, False]),
    }
)


@cache
def model(windows: tuple[int | None, int | None]) -> Model:
    config = replace(TINY, num_layers=2, hidden_size=12, intermediate_size=8, vocab_size=9, windows=windows)
    return Model(config, random_tensors(config))


def submit(engine: Engine, prompt: tuple[int, int], params: SamplingParams) -> Request:
    return engine.submit(random_tokens(prompt[0], seed=prompt[1], vocab_size=9), params)


def smallest_pool(
    make: Any, asked: list[tuple[tuple[int, int], SamplingParams]], pool: list[int]
) -> list[int]:
    """Grow groups as refusals ask for it, until none is refused."""
    spec, pool = make(pool).cache.spec, pool[:]
    windows = {"" if window is None else str(window): g for g, window in enumerate(spec.windows)}
    while True:
        try:
            for prompt, params in asked:
                submit(make(pool), prompt, params)
        except UsageError as error:
            [(window, needed)] = re.findall(r"pool(?:'s for a window of (\d+))?\), got (\d+)", str(error))
            pool[windows[window]] = int(needed)
        else:
            return pool


@settings(max_examples=settings.default.max_examples // 2)
@given(st.sampled_from(WINDOWS), ENGINES, st.lists(st.tuples(PROMPTS, PARAMS), min_size=1, max_size=4))
def test_whatever_is_accepted_ends_in_the_smallest_pool_that_takes_it(
    windows: tuple[int | None, int | None], options: dict[str, Any], queue: list[tuple[Any, dict[str, Any]]]
) -> None:
    asked = []
    for prompt, params in queue:
        num_beams = params.get("num_beams", 1)
        if num_beams > 1:
            params = {**params, "n": min(params.get("n", 1), num_beams), "num_speculative_tokens": 0}
            assume(num_beams <= min(options["max_batch_tokens"], options["max_num_seqs"]))
        asked.append((prompt, SamplingParams(ignore_eos=True, **params)))

    def make(pool: list[int]) -> Engine:
        return Engine(model(windows), num_blocks=pool, block_size=BLOCK_SIZE, **options)

    pool = smallest_pool(make, asked, [1] * len(set(windows)))
    engine = make(pool)
    requests = [submit(engine, prompt, params) for prompt, params in asked]
    num_tokens = sum(
        r.num_prompt_tokens + r.params.max_tokens * max(r.params.n, r.params.num_beams) for r in requests
    )
    for _ in range(20 + 8 * num_tokens):
        if not engine.has_work:
            break
        engine.step()
        engine.cache.check_integrity()
    assert [request.finish_reason for request in requests] == ["length"] * len(requests)
    for group in engine.cache.stats().groups:
        assert group.num_free_blocks + group.num_evictable_blocks == group.num_blocks
    for g in range(len(pool)):  # not a page more than is needed was asked for
        smaller = [n - (i == g) for i, n in enumerate(pool)]
        if smaller[g]:
            assert smallest_pool(make, asked, smaller) == pool
