"""The same weights in a GGUF file and in a Hugging Face folder are the same model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import gguf_name, permuted
from safetensors.torch import save_file
from tiny_models import TINY, all_logits, random_tensors, random_tokens
from torch import Tensor

from pagedkv.runner.config import ModelConfig
from pagedkv.runner.loader import load_model
from pagedkv.runner.rope import llama3_freq_factors

# Rows of a multiple of 32, the block of Q8_0.
CONFIG = replace(
    TINY, hidden_size=64, intermediate_size=96, head_dim=16, num_heads=4, tie_word_embeddings=False
)
BYTES_TO_UNICODE = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256)]]
VOCAB = [*BYTES_TO_UNICODE, *(f"<unused{i}>" for i in range(CONFIG.vocab_size - len(BYTES_TO_UNICODE)))]


def write_gguf(
    path: Path, config: ModelConfig, tensors: dict[str, Tensor], kind: gguf.GGMLQuantizationType
) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCAB)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(VOCAB))
    writer.add_token_merges([])
    if config.rope_freq_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(config.rope_freq_factors, dtype=np.float32))
    for name, tensor in tensors.items():
        rows = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            rows = permuted(rows, config.num_heads if "q_proj" in name else config.num_kv_heads)
        if rows.ndim == 1:
            writer.add_tensor(gguf_name(name), rows)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(path: Path, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path / "model.safetensors")
    contents = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }
    (path / "config.json").write_text(json.dumps(contents), encoding="utf-8")


def as_stored(tensor: Tensor, kind: gguf.GGMLQuantizationType) -> Tensor:
    """What is left of a matrix after it was stored as `kind`."""
    if tensor.ndim == 1:
        return tensor
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind).copy())


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("variant", ["untied", "tied", "biases"])
def test_gguf_file_equals_the_folder_of_the_same_weights(tmp_path: Path, kind: str, variant: str) -> None:
    config = replace(
        CONFIG,
        tie_word_embeddings=variant == "tied",
        attention_bias=variant == "biases",
        output_bias=variant == "biases",
        mlp_bias=variant == "biases",
    )
    stored_as = gguf.GGMLQuantizationType[kind]
    tensors = random_tensors(config, seed=1)
    write_gguf(tmp_path / "model.gguf", config, tensors, stored_as)
    write_folder(tmp_path, config, {name: as_stored(tensor, stored_as) for name, tensor in tensors.items()})
    prompt = random_tokens(60, seed=6)
    from_gguf, from_folder = load_model(tmp_path / "model.gguf"), load_model(tmp_path)
    assert torch.equal(all_logits(from_gguf.model, prompt), all_logits(from_folder.model, prompt))
    assert from_gguf.tokenizer is not None
    assert from_folder.tokenizer is None


def test_rope_factors_of_a_gguf_file_are_used(tmp_path: Path) -> None:
    factors = llama3_freq_factors(
        CONFIG.rope_theta, CONFIG.head_dim,
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=64,
    )  # fmt: skip
    config = replace(CONFIG, rope_freq_factors=factors)
    write_gguf(tmp_path / "m.gguf", config, random_tensors(config), gguf.GGMLQuantizationType.F32)
    assert load_model(tmp_path / "m.gguf").model.config.rope_freq_factors == pytest.approx(factors)


def test_progress_counts_every_tensor_to_the_last(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG), gguf.GGMLQuantizationType.F32)
    seen: list[tuple[int, int]] = []
    load_model(tmp_path / "m.gguf", progress=lambda done, total: seen.append((done, total)))
    total = len(random_tensors(CONFIG))
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_bfloat16_loads_the_nearest_weights(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    write_gguf(tmp_path / "m.gguf", CONFIG, tensors, gguf.GGMLQuantizationType.F32)
    model = load_model(tmp_path / "m.gguf", dtype="bfloat16").model
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.embedding, tensors["model.embed_tokens.weight"].bfloat16())
