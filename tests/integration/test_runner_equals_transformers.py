"""A Hugging Face folder, loaded and computed by the runner, equals transformers' own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import all_logits, random_tokens

from pagedkv.runner.engine import Engine
from pagedkv.runner.loader import load_model
from pagedkv.runner.sampling import SamplingParams

transformers = pytest.importorskip("transformers")

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "one_kv_head": {"num_key_value_heads": 1},
    "as_many_kv_heads": {"num_key_value_heads": 6},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "own_head_dim": {"head_dim": 20},
    "llama3_rope": {
        "max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


@pytest.fixture(scope="module", params=VARIANTS)
def folder_and_reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    shape = {
        "vocab_size": 211,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "eos_token_id": 7,
    }
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**shape, **VARIANTS[request.param]})
    reference = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in reference.named_parameters():
        if name.endswith("bias"):  # initialised to zero, which would test nothing
            torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    return folder, reference


def reference_logits(reference: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits


def test_logits_equal_those_of_transformers_at_every_position(folder_and_reference: tuple[Path, Any]) -> None:
    folder, reference = folder_and_reference
    prompt = random_tokens(150, seed=2, vocab_size=211)
    model, tokenizer = load_model(folder)
    assert tokenizer is None
    torch.testing.assert_close(
        all_logits(model, prompt), reference_logits(reference, prompt), atol=1e-3, rtol=1e-4
    )


@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
def test_prompt_computed_in_chunks_has_the_same_logits(
    folder_and_reference: tuple[Path, Any], chunk: int
) -> None:
    folder, reference = folder_and_reference
    prompt = random_tokens(70, seed=3, vocab_size=211)
    torch.testing.assert_close(
        all_logits(load_model(folder).model, prompt, chunk=chunk),
        reference_logits(reference, prompt),
        atol=1e-3,
        rtol=1e-4,
    )


def test_greedy_answer_equals_that_of_transformers(folder_and_reference: tuple[Path, Any]) -> None:
    folder, reference = folder_and_reference
    prompt = random_tokens(30, seed=4, vocab_size=211)
    expected = list(prompt)
    for _ in range(24):
        expected.append(int(reference_logits(reference, expected)[-1].argmax()))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    (request,) = Engine(load_model(folder).model, num_blocks=16).generate([prompt], params)
    assert prompt + request.output_ids == expected


def test_sharded_folder_loads_the_same_model(folder_and_reference: tuple[Path, Any], tmp_path: Path) -> None:
    folder, reference = folder_and_reference
    reference.save_pretrained(tmp_path, max_shard_size="100kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    prompt = random_tokens(20, seed=5, vocab_size=211)
    whole, sharded = load_model(folder).model, load_model(tmp_path).model
    assert torch.equal(all_logits(whole, prompt), all_logits(sharded, prompt))
    assert whole.config.eos_token_ids == sharded.config.eos_token_ids == {7}
