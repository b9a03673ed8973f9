"""A Hugging Face folder, loaded and computed by the runner, equals transformers' own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import all_logits, random_tokens

pytest.importorskip("transformers")

import tiny_transformers
from tiny_transformers import VARIANTS, VOCAB_SIZE, assert_greedy, reference_logits, save_reference

from pagedkv.runner.engine import Engine
from pagedkv.runner.loader import load_model
from pagedkv.runner.sampling import SamplingParams

TOLERANCE = {"atol": 2e-4, "rtol": 1e-5}
NUM_NEW = 16
PARAMS = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)


@pytest.fixture(scope="module", params=VARIANTS)
def folder_and_reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_reference(request.param, folder)


def tokens(num_tokens: int, seed: int) -> list[int]:
    return random_tokens(num_tokens, seed, vocab_size=VOCAB_SIZE)


def test_logits_equal_those_of_transformers_at_every_position(folder_and_reference: tuple[Path, Any]) -> None:
    folder, reference = folder_and_reference
    prompt = tokens(150, seed=2)
    model, tokenizer = load_model(folder)
    assert tokenizer is None
    torch.testing.assert_close(all_logits(model, prompt), reference_logits(reference, prompt), **TOLERANCE)


def test_prompt_computed_in_chunks_has_the_same_logits(folder_and_reference: tuple[Path, Any]) -> None:
    folder, reference = folder_and_reference
    prompt = tokens(70, seed=3)
    expected = reference_logits(reference, prompt)
    model = load_model(folder).model
    for chunk in (1, 7, 16, 40):
        torch.testing.assert_close(all_logits(model, prompt, chunk=chunk), expected, **TOLERANCE)


def test_answers_cold_warm_and_partly_warm_equal_those_of_transformers(
    folder_and_reference: tuple[Path, Any],
) -> None:
    folder, reference = folder_and_reference
    engine = Engine(load_model(folder).model, num_blocks=40)
    first = tokens(60, seed=4)
    inside_a_block = [*first[:37], *tokens(9, seed=5)]
    for prompt, num_cached in ((first, 0), (inside_a_block, 37), (first, 59)):
        (request,) = engine.generate([prompt], PARAMS)
        assert request.num_cached_tokens == num_cached
        assert_greedy(reference, prompt, request.output_ids)
    for request in engine.generate([first, inside_a_block, first[:20]], PARAMS):
        assert request.num_cached_tokens > 0
        assert_greedy(reference, request.prompt_ids, request.output_ids)


def test_bfloat16_stays_near_the_reference(folder_and_reference: tuple[Path, Any]) -> None:
    folder, reference = folder_and_reference
    prompt = tokens(40, seed=6)
    model = load_model(folder, dtype="bfloat16").model
    expected = reference_logits(reference, prompt)
    actual = all_logits(model, prompt, dtype="bfloat16")
    assert torch.nn.functional.cosine_similarity(actual, expected, dim=-1).min() > 0.98


def test_sharded_folder_loads_the_same_model(tmp_path: Path) -> None:
    reference = save_reference("llama", tmp_path / "whole")
    reference.save_pretrained(tmp_path / "sharded", max_shard_size="100kB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    prompt = tokens(20, seed=5)
    whole, sharded = load_model(tmp_path / "whole").model, load_model(tmp_path / "sharded").model
    assert torch.equal(all_logits(whole, prompt), all_logits(sharded, prompt))
    assert whole.config.eos_token_ids == sharded.config.eos_token_ids == {7}


# Written by releases before 5, which most models on the Hub are from.
OLD_FILES: dict[str, dict[str, Any]] = {
    "llama_linear": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama_llama3": {"rope_theta": 5e5, "rope_scaling": tiny_transformers.LLAMA3},
    "qwen2_yarn": {"rope_theta": 1e4, "rope_scaling": {**tiny_transformers.YARN, "type": "yarn"}},
    "qwen2_windows": {"rope_theta": 1e4, "layer_types": None},
    "gemma2": {"rope_theta": 1e4, "layer_types": None, "attn_logit_softcapping": None},
    "gemma3": {
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None, "layer_types": None,
        "sliding_window_pattern": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OLD_FILES)
def test_configuration_of_an_old_release_means_the_same(tmp_path: Path, name: str) -> None:
    reference = save_reference(name, tmp_path)
    path = tmp_path / "config.json"
    values = {**json.loads(path.read_text()), **OLD_FILES[name]}
    del values["rope_parameters"]
    absent = [
        key for key in ("layer_types", "attn_logit_softcapping") if key in values and values[key] is None
    ]
    for key in absent:
        del values[key]
    path.write_text(json.dumps(values))
    prompt = tokens(100, seed=7)
    torch.testing.assert_close(
        all_logits(load_model(tmp_path).model, prompt), reference_logits(reference, prompt), **TOLERANCE
    )


@pytest.mark.parametrize("names", ["new", "old"])
def test_text_part_of_a_model_that_sees_is_computed(tmp_path: Path, names: str) -> None:
    import safetensors.torch
    import transformers

    text = transformers.Gemma3TextConfig(**{**tiny_transformers.SHAPE, **tiny_transformers.GEMMA})
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=28, patch_size=14,
    )  # fmt: skip
    torch.manual_seed(2)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4,
        image_token_id=5, boi_token_id=6, eoi_token_id=7, eos_token_id=[7, 9],
    )  # fmt: skip
    reference = transformers.Gemma3ForConditionalGeneration(config).eval()
    tiny_transformers.randomise(reference)
    reference.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = safetensors.torch.load_file(path)
    assert any("vision_tower" in name for name in stored)
    if names == "new":
        stored = {_new_name(name): tensor for name, tensor in stored.items()}
    else:
        stored = {_old_name(name): tensor for name, tensor in stored.items()}
    safetensors.torch.save_file(stored, path)
    prompt = [each + 10 if each < 10 else each for each in tokens(60, seed=8)]
    model = load_model(tmp_path).model
    assert model.config.eos_token_ids == {7, 9}
    torch.testing.assert_close(all_logits(model, prompt), reference_logits(reference, prompt), **TOLERANCE)


def _new_name(name: str) -> str:
    inner = _old_name(name)
    if inner.startswith("language_model.model."):
        return "model.language_model." + inner.removeprefix("language_model.model.")
    return f"model.{inner}"


def _old_name(name: str) -> str:
    if name.startswith("model.language_model."):
        return "language_model.model." + name.removeprefix("model.language_model.")
    return name.removeprefix("model.")
