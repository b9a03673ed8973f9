"""The real model on a device: reuse changes no token, and the first one comes sooner."""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

import pytest
import torch

from pagedkv.errors import BackendUnavailableError
from pagedkv.runner.bundled import bundled_model_path
from pagedkv.runner.engine import Engine
from pagedkv.runner.loader import load_model
from pagedkv.runner.model import Model
from pagedkv.runner.request import Request
from pagedkv.runner.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, num_top_logits=2)
NUM_SHARED, NUM_NEW, NUM_USERS = 4_000, 48, 3
NEAR_TIE = 0.05


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8"])
def model(request: pytest.FixtureRequest) -> Any:
    try:
        path = bundled_model_path()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    return request.param, load_model(path, dtype=request.param, device="cuda").model


def ask(model: Model, prompts: list[list[int]], **options: Any) -> list[Request]:
    engine = Engine(model, num_blocks=1_200, **options)
    engine.generate([[1] * 64], SamplingParams(max_tokens=2, ignore_eos=True))  # warms up
    engine.cache.reset()
    return [engine.generate([prompt], PARAMS)[0] for prompt in prompts]


def test_warm_answers_equal_cold_ones_and_come_sooner(model: tuple[str, Model]) -> None:
    dtype, on_device = model
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(100, 49_000, (count,), generator=generator).tolist()

    shared = draw(NUM_SHARED)
    prompts = [shared + draw(NUM_NEW) for _ in range(NUM_USERS)]
    warm, cold = ask(on_device, prompts), ask(on_device, prompts, prefix_caching=False)
    assert [request.num_cached_tokens for request in warm] == [0, NUM_SHARED, NUM_SHARED]
    for with_reuse, without in zip(warm, cold, strict=True):
        step = next((i for i in range(24) if with_reuse.output_ids[i] != without.output_ids[i]), None)
        if step is not None:
            assert dtype != "float32", f"token {step} differs"
            (_, best), (_, second) = without.top_logits[step]
            assert best - second <= NEAR_TIE, f"token {step} differs, and was no near tie"
    warm_s, cold_s = (median(r.time_to_first_token_s or 0.0 for r in answers[1:]) for answers in (warm, cold))
    sys.stdout.write(f"{dtype}: first token after {1000 * cold_s:.1f} ms cold, {1000 * warm_s:.1f} ms warm\n")
    assert warm_s < cold_s
