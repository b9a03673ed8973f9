"""In bfloat16, too, a hit changes no bit of an answer, where our kernels compute all of a layer."""

from __future__ import annotations

import pytest
import torch
from tiny_models import TINY, all_logits, random_tensors, random_tokens

from pagedkv.kernels import dense
from pagedkv.runner.engine import Engine
from pagedkv.runner.model import Model
from pagedkv.runner.sampling import SamplingParams


@pytest.fixture(scope="module")
def model() -> Model:
    if dense.pack(torch.zeros(2, 2, dtype=torch.bfloat16)) is None:
        pytest.skip("the instruction set has no products of pairs; torch's depend on the number of rows")
    tensors = random_tensors(TINY)
    return Model(TINY, {name: tensor.bfloat16() for name, tensor in tensors.items()})


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_logits_have_the_same_bits_in_chunks_of_any_size(model: Model, chunk: int) -> None:
    tokens = random_tokens(61, seed=1)
    whole, in_chunks = (all_logits(model, tokens, chunk=size, dtype="bfloat16") for size in (None, chunk))
    assert torch.equal(whole, in_chunks)


def test_answers_have_the_same_bits_cold_warm_and_beside_others(model: Model) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, num_top_logits=3)
    prompts = [random_tokens(50 + i, seed=i) for i in range(5)]
    alone = [Engine(model, num_blocks=40).generate([prompt], params)[0] for prompt in prompts]
    engine = Engine(model, num_blocks=80, max_batch_tokens=48)
    cold, warm = engine.generate(prompts, params), engine.generate(prompts, params)
    for first, *others in zip(alone, cold, warm, strict=True):
        for other in others:
            assert other.output_ids == first.output_ids
            assert other.top_logits == first.top_logits
    assert all(request.num_cached_tokens > 40 for request in warm)
