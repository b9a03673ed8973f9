"""Every path that leads to no usable model gives one clear error."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
safetensors_torch = pytest.importorskip("safetensors.torch")

from pagedkv.errors import ShapeError, UsageError  # noqa: E402
from pagedkv.runner.loader import load_model, open_source  # noqa: E402
from pagedkv.runner.weights import tensor_shapes  # noqa: E402

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 4, "sliding_window": 16}
GGUF_GEMMA3 = {"architecture": "gemma3", "attention.sliding_window": 16}
FULL: dict[str, Any] = {"full_attention": {}}


def write_folder(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write a whole little model; return its tensors."""
    values = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    save(folder, {})
    config = open_source(folder).config
    tensors = {name: torch.zeros(shape) for name, shape in tensor_shapes(config).items()}
    save(folder, tensors)
    return tensors


def save(folder: Path, tensors: dict[str, Any]) -> None:
    safetensors_torch.save_file(tensors, folder / "model.safetensors")


def write_gguf(path: Path, architecture: str = "llama", **changes: Any) -> bytes:
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {
        "block_count": 1, "context_length": 32, "embedding_length": 8, "feed_forward_length": 12,
        "vocab_size": 11, "attention.head_count": 2, **changes,
    }  # fmt: skip
    for key, value in values.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", torch.zeros(11, 8).numpy())
    writer.add_tensor("output_norm.weight", torch.zeros(8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load_model(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert ": expected " in message
    assert ", got " in message
    return message


def test_missing_path_is_named(tmp_path: Path) -> None:
    message = refusal(tmp_path / "nowhere.gguf")
    assert "No such file" in message
    assert str(tmp_path / "nowhere.gguf") in message


@pytest.mark.parametrize("contents", [b"", b"GG", b"hello, this is text", b"\x89PNG\r\n\x1a\n" + bytes(64)])
def test_file_of_another_kind_is_refused(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(contents)
    assert "a file of another kind" in refusal(tmp_path / "model.gguf")


def test_gguf_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf")
    for size in [*range(4, len(whole) - 32, 7), len(whole) - 40]:
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        refusal(tmp_path / "cut.gguf")


def test_gguf_file_with_damaged_header_is_refused_or_read_but_never_crashes(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf")
    generator = random.Random(1)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[generator.randrange(4, 500)] = generator.randrange(256)
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        refusal(tmp_path / "damaged.gguf")  # whole or not, this file lacks tensors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architecture": "gptneox"},
            "general.architecture: expected one of 'llama', 'qwen2', 'qwen3', 'gemma', 'gemma2', 'gemma3', "
            "got 'gptneox'",
        ),
        (
            {"rope.scaling.type": "longrope"},
            "llama.rope.scaling.type: expected 'none' or 'linear' or 'yarn', got 'longrope'",
        ),
        (
            {"architecture": "qwen2", "attention.sliding_window": 16},
            "qwen2.attention.sliding_window: expected none, since the file doesn't say of which layers",
        ),
        (
            {
                "architecture": "gemma3",
                "attention.sliding_window": 16,
                "attention.sliding_window_pattern": "x",
            },
            "gemma3.attention.sliding_window_pattern: expected an integer, got 'x'",
        ),
        ({"rope.dimension_count": 2}, "llama.rope.dimension_count: expected 4, got 2"),
        ({"expert_count": 8}, "llama.expert_count: expected 0, got 8"),
        ({"attention.head_count": 0}, "num_heads: expected an integer from 1"),
        ({"attention.head_count_kv": 3}, "num_heads: expected a multiple of num_kv_heads"),
        ({"block_count": "two"}, "llama.block_count: expected an integer, got 'two'"),
        (
            {},
            "tensors: expected 'model.layers.0.input_layernorm.weight' and 8 more, got nothing by that name",
        ),
    ],
)
def test_gguf_model_that_is_not_computed_here_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_gguf(tmp_path / "model.gguf", **changes)
    assert message in refusal(tmp_path / "model.gguf")


def test_empty_folder_has_no_config(tmp_path: Path) -> None:
    assert "model: expected a config.json, got a folder without one" in refusal(tmp_path)


def test_folder_without_weights_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "expected model.safetensors, got no such file" in refusal(tmp_path)


@pytest.mark.parametrize("contents", ["", "{", "[1]", "\xff"])
def test_config_that_is_no_json_object_is_refused(tmp_path: Path, contents: str) -> None:
    (tmp_path / "config.json").write_bytes(contents.encode("latin-1"))
    assert refusal(tmp_path).startswith("config.json: expected a JSON")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["PhiForCausalLM"]},
            "architecture: expected one of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, "
            "Qwen3ForCausalLM, GemmaForCausalLM, Gemma2ForCausalLM, Gemma3ForCausalLM, "
            "Gemma3ForConditionalGeneration, got 'PhiForCausalLM'",
        ),
        ({"architectures": None}, "Gemma3ForConditionalGeneration, got None"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "got 'Qwen3MoeForCausalLM'"),
        (
            {"hidden_act": "relu"},
            "hidden_act: expected 'silu' or 'gelu' or 'gelu_pytorch_tanh', got 'relu'",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0, got 0.5"),
        (
            {**GEMMA3, "use_bidirectional_attention": True},
            "use_bidirectional_attention: expected False, got True",
        ),
        (
            {**GEMMA3, "layer_types": ["full"]},
            "layer_types: expected 1 times full_attention or sliding_attention",
        ),
        (
            {
                **GEMMA3,
                "rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear"}},
            },
            "rope scaling of layers with a window: expected 'default', got 'linear'",
        ),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false, got 'no'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: expected none"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope scaling: expected 'default' or 'linear' or 'llama3' or 'yarn', got 'dynamic'",
        ),
        ({"rope_scaling": {"type": "longrope"}}, "or 'yarn', got 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "factor: expected a number above 0, got None"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor: expected a number above 0, got None"),
        ({"rope_scaling": "llama3"}, "rope_scaling: expected an object, got 'llama3'"),
        ({"rope_theta": 0}, "rope_theta: expected a number above 0, got 0"),
        ({"eos_token_id": [[1]]}, "eos_token_id: expected an integer, got [1]"),
        ({"hidden_size": None}, "hidden_size: expected an integer, got None"),
        ({"hidden_size": "8"}, "hidden_size: expected an integer, got '8'"),
        ({"num_hidden_layers": 0}, "num_layers: expected an integer from 1"),
        ({"head_dim": 3}, "head_dim: expected an even number, got 3"),
    ],
)
def test_folder_of_a_model_that_is_not_computed_here_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    values = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert message in refusal(tmp_path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save(tmp_path, tensors)
    assert "tensors: expected 'model.layers.0.mlp.up_proj.weight', got nothing by that name" in refusal(
        tmp_path
    )


def test_tensor_of_another_architecture_is_refused_not_ignored(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path)
    save(tmp_path, {**tensors, "model.layers.0.self_attn.q_norm.weight": torch.zeros(4)})
    assert "got 'model.layers.0.self_attn.q_norm.weight'" in refusal(tmp_path)


def test_tensor_of_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path)
    save(tmp_path, {**tensors, "model.norm.weight": torch.zeros(9)})
    with pytest.raises(ShapeError, match=r"model\.norm\.weight: expected shape \(8,\), got \(9,\)") as caught:
        load_model(tmp_path)
    assert (caught.value.expected, caught.value.got) == ((8,), (9,))


def test_tensor_of_integers_is_refused(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path)
    save(tmp_path, {**tensors, "model.norm.weight": torch.zeros(8, dtype=torch.int8)})
    assert "got torch.int8" in refusal(tmp_path)


def test_cut_safetensors_file_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for size in (0, 4, 100, len(whole) - 1):
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        assert "expected a whole safetensors file" in refusal(tmp_path)


def test_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    write_folder(tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "expected model-00001-of-00002.safetensors, got no such file" in refusal(tmp_path)


def test_what_follows_from_the_config_may_be_in_the_file_too(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path, tie_word_embeddings=True)
    save(
        tmp_path, {**tensors, "lm_head.weight": torch.ones(11, 8), "model.rotary_emb.inv_freq": torch.ones(2)}
    )
    assert load_model(tmp_path).model.head.weight.sum() == 0  # the embedding, as the config says


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    assert "dtype: expected 'float32', 'bfloat16' or 'int8', got 'int4'" in refusal(tmp_path, dtype="int4")


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (1, None, {1}),
        ([1, 2], None, {1, 2}),
        (None, None, set()),
        (1, {"eos_token_id": [3, 4]}, {3, 4}),  # chat models list their end-of-turn tokens there
        (1, {"temperature": 0.5}, {1}),
    ],
)
def test_end_tokens_come_from_the_generation_settings_first(
    tmp_path: Path, config_eos: Any, generation: Any, expected: set[int]
) -> None:
    write_folder(tmp_path, eos_token_id=config_eos)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert open_source(tmp_path).config.eos_token_ids == expected
