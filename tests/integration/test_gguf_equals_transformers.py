"""A GGUF file of each architecture, written as llama.cpp's converter does, equals transformers' own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import all_logits, random_tokens

pytest.importorskip("transformers")

from gguf_files import write_reference_gguf
from tiny_transformers import VOCAB_SIZE, assert_greedy, make_reference, reference_logits

from pagedkv.runner.engine import Engine
from pagedkv.runner.gguf_config import read_gguf_config
from pagedkv.runner.loader import load_model
from pagedkv.runner.sampling import SamplingParams

NAMES = [
    "llama", "llama_biases", "llama_own_head_dim", "llama_llama3", "llama_linear", "mistral", "qwen2",
    "qwen2_windows", "qwen2_yarn", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_linear",
    "gemma3_long_window",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_answers_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    reference = make_reference(name)
    write_reference_gguf(tmp_path / "model.gguf", reference)
    model = load_model(tmp_path / "model.gguf").model
    prompt = random_tokens(100, seed=2, vocab_size=VOCAB_SIZE)
    torch.testing.assert_close(
        all_logits(model, prompt), reference_logits(reference, prompt), atol=2e-4, rtol=1e-5
    )
    engine = Engine(model, num_blocks=40)
    for num_cached in (0, 99):
        (request,) = engine.generate([prompt], SamplingParams(max_tokens=13, ignore_eos=True))
        assert request.num_cached_tokens == num_cached
        assert_greedy(reference, prompt, request.output_ids)


def metadata(architecture: str, num_layers: int, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "block_count": num_layers, "context_length": 8192, "embedding_length": 4608, "vocab_size": 100,
        "feed_forward_length": 64, "attention.head_count": 32, "attention.head_count_kv": 16,
        "attention.key_length": 128, "attention.layer_norm_rms_epsilon": 1e-6, **changes,
    }  # fmt: skip
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in values.items()},
    }


@pytest.mark.parametrize(("architecture", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_largest_gemma_scales_queries_by_the_hidden_size(architecture: str, num_layers: int) -> None:
    largest, other = (
        read_gguf_config(metadata(architecture, count), frozenset(), where="x") for count in (num_layers, 26)
    )
    assert largest.attention_scale == pytest.approx((4608 / 32) ** -0.5)
    assert other.attention_scale is None  # head_dim ** -0.5


def test_what_gemma_2_files_leave_out_is_what_its_makers_chose() -> None:
    config = read_gguf_config(metadata("gemma2", 4), frozenset(), where="x")
    assert config.windows == (4096, None, 4096, None)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    assert config.tie_word_embeddings


def test_what_gemma_3_files_leave_out_is_what_its_makers_chose() -> None:
    window = {"attention.sliding_window": 512}
    config = read_gguf_config(metadata("gemma3", 7, **window), frozenset(), where="x")
    assert config.windows == (512, 512, 512, 512, 512, None, 512)
    assert (config.rope_theta, config.window_rope_theta) == (1e6, 1e4)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (None, None)
