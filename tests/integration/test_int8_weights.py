"""Weights of 8 bits: near the model they are made from, a namespace of their own, and reuse as ever."""

from __future__ import annotations

from itertools import takewhile

import pytest
import torch
from tiny_models import TINY, random_tensors, random_tokens

from pagedkv import PagedKVCache
from pagedkv.runner.engine import Engine
from pagedkv.runner.loader import LoadedModel, load_model
from pagedkv.runner.model import Model
from pagedkv.runner.sampling import SamplingParams


def model(*, int8_weights: bool) -> Model:
    weights = {name: tensor.bfloat16() for name, tensor in random_tensors(TINY).items()}
    return Model(TINY, weights, int8_weights=int8_weights)


def logits_of(made: Model, token_ids: list[int]) -> torch.Tensor:
    cache = PagedKVCache(made.config.kv_spec("bfloat16"), 16)
    with cache.open(token_ids) as sequence:
        step = cache.reserve([sequence], [len(token_ids)])
        hidden = made.forward(cache, cache.prepare(step))
        cache.commit(step)
    return made.logits(hidden)


# Few tokens go through our kernels, many through torch's products.
@pytest.mark.parametrize("num_tokens", [7, 90])
def test_logits_are_near_those_of_the_weights_they_are_made_from(num_tokens: int) -> None:
    tokens = random_tokens(num_tokens, seed=1)
    whole, int8 = (logits_of(model(int8_weights=flag), tokens) for flag in (False, True))
    assert int8.dtype == torch.float32
    correlation = torch.corrcoef(torch.stack([whole.flatten(), int8.flatten()]))[0, 1]
    assert 0.995 < correlation < 1


def test_weights_are_kept_in_8_bits_and_kv_in_bfloat16() -> None:
    made = model(int8_weights=True)
    assert made.dtype == torch.bfloat16
    linears = [made.head, *(getattr(made.layers[0], n) for n in ("qkv", "output", "gate_up", "down"))]
    assert {linear.weight.dtype for linear in linears} == {torch.int8}


def test_kv_of_other_weights_has_another_namespace() -> None:
    assert model(int8_weights=True).namespace == model(int8_weights=True).namespace
    assert model(int8_weights=True).namespace != model(int8_weights=False).namespace


def test_reuse_changes_no_token_before_a_near_tie(smollm2_path: object) -> None:
    loaded: LoadedModel = load_model(smollm2_path, dtype="int8")  # type: ignore[arg-type]
    assert loaded.tokenizer is not None
    text = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
    prompt = loaded.tokenizer.encode(text)
    params = SamplingParams(max_tokens=8, num_top_logits=2)
    engine = Engine(*loaded, num_blocks=32)
    (cold,), (warm,) = engine.generate([prompt], params), engine.generate([prompt], params)
    assert warm.num_cached_tokens >= 16
    assert cold.text.strip().startswith("Madrid")
    sure = takewhile(lambda best: best[0][1] - best[1][1] > 0.05, cold.top_logits)
    count = sum(1 for _ in sure)
    assert warm.output_ids[:count] == cold.output_ids[:count]
