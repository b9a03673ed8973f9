"""What a model's tokens take and cost, from its config.json or its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import UsageError
from pagedkv.policy import Model, find_model, model_from_config
from pagedkv.policy.model_table import MODEL_TABLE
from pagedkv.policy.models import LayerGroup

BASE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "torch_dtype": "float16",
}


def windows(**more: Any) -> list[tuple[int, int | None]]:
    return [(group.num_layers, group.window) for group in model_from_config({**BASE, **more}).groups]


def test_eight_heads_of_128_in_32_layers_take_what_arithmetic_says() -> None:
    model = find_model("llama-3.1-8b")
    assert 10_000 * model.bytes_per_token() == 10_000 * 2 * 8 * 128 * 32 * 2 == 1_310_720_000
    assert 10_000 * model.bytes_per_token("int8") == 655_360_000
    assert model.bytes_per_token("int8", scales=True) == 32 * (2 * 8 * 128 + 2 * 8 * 4)


# Weights without the embedding, in 1e9, by the publishers' own counts.
@pytest.mark.parametrize(
    ("name", "kv_bytes", "weights"),
    [
        ("smollm2-135m", 23_040, 0.106),
        ("llama-3.1-8b", 131_072, 6.98),
        ("qwen2.5-7b", 57_344, 6.53),
        ("deepseek-v3", 70_272, 36),
        ("gpt-oss-120b", 73_728, 4.5),
    ],
)
def test_known_models_have_known_sizes(name: str, kv_bytes: int, weights: float) -> None:
    model = find_model(f"someone/{name.upper()}")
    assert model.bytes_per_token() == kv_bytes
    assert model.flops_per_token / 2e9 == pytest.approx(weights, rel=0.03)


def test_every_name_in_the_table_is_a_model() -> None:
    for name in MODEL_TABLE:
        assert find_model(name).bytes_per_token() > 0


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, [(4, None)]),
        ({"sliding_window": 100}, [(4, 100)]),
        ({"sliding_window": 100, "use_sliding_window": False}, [(4, None)]),
        ({"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 3}, [(3, None), (1, 100)]),
        ({"sliding_window": None}, [(4, None)]),
        ({"sliding_window": 9, "sliding_window_pattern": 2}, [(2, None), (2, 9)]),
        ({"sliding_window": 9, "model_type": "gemma2"}, [(2, None), (2, 9)]),
        ({"sliding_window": 9, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
         [(1, None), (3, 9)]),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, [(1, None)]),
        ({"attention_chunk_size": 8, "layer_types": ["chunked_attention"] * 4}, [(4, 8)]),
        ({"hybrid_override_pattern": "M-M*"}, [(1, None)]),
        ({"attn_layer_period": 4, "attn_layer_offset": 1}, [(1, None)]),
        ({"full_attention_interval": 2}, [(2, None)]),
        ({"num_kv_shared_layers": 1}, [(3, None)]),
    ],
)  # fmt: skip
def test_layers_fall_into_groups_by_window(more: dict[str, Any], expected: list[Any]) -> None:
    assert windows(**more) == expected


def test_layers_may_differ_in_heads() -> None:
    groups = model_from_config({**BASE, "num_key_value_heads": [2, 4, 0, 2]}).groups
    assert {(group.num_layers, group.num_kv_heads) for group in groups} == {(2, 2), (1, 4)}


def test_other_families_names_are_understood() -> None:
    gpt2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "model_type": "gpt2"}
    model = model_from_config(gpt2)
    assert model.bytes_per_token("float32") == 12 * 2 * 768 * 4
    assert model.flops_per_token == 2 * 12 * 12 * 768 * 768
    nested = {"model_type": "vlm", "text_config": BASE}
    assert model_from_config(nested).groups == model_from_config(BASE).groups


def test_the_dtype_is_the_configurations() -> None:
    assert model_from_config(BASE).bytes_per_token() == 4 * 2 * 2 * 8 * 2
    assert model_from_config({**BASE, "torch_dtype": "float32"}).bytes_per_token() == 4 * 2 * 2 * 8 * 4


def test_a_latent_is_kept_once() -> None:
    [group] = find_model("deepseek-v3").groups
    assert group == LayerGroup(61, None, 1, 576, 576)


@given(st.integers(0, 60), st.integers(0, 60), st.lists(st.one_of(st.none(), st.integers(1, 70)), max_size=3))
def test_prefill_counts_every_token_and_every_pair_that_it_sees(
    begin: int, more: int, looks_back: list[int | None]
) -> None:
    groups = tuple(LayerGroup(2, window, 1, 1, 2) for window in looks_back)
    model = Model("drawn", groups, "float16", 1000, 7)
    expected = sum(
        1000 + 7 * sum(2 * min(position + 1, window or position + 1) for window in looks_back)
        for position in range(begin, begin + more)
    )
    assert model.prefill_flops(begin, begin + more) == expected


def test_a_config_is_read_from_a_file_or_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(BASE))
    assert find_model(str(file)).groups == find_model(str(tmp_path)).groups


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "expected a JSON object"),
        ({}, "expected the field num_attention_heads"),
        ({**BASE, "num_hidden_layers": 0}, "num_hidden_layers"),
        ({**BASE, "num_hidden_layers": "4"}, "num_hidden_layers"),
        ({**BASE, "num_key_value_heads": [1]}, "expected KV heads of 4 layers"),
        ({**BASE, "layer_types": ["full_attention"]}, "expected layer_types of 4 layers"),
        ({**BASE, "layer_types": ["strange"] * 4}, "expected layer_types from"),
        ({**BASE, "sliding_window": "long"}, "sliding_window"),
    ],
)
def test_what_is_missing_or_wrong_is_named(config: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(UsageError, match=message):
        find_model(str(file))


@pytest.mark.parametrize("name", ["", "llama", "no/such/file.json"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match=r"smollm2-135m"):
        find_model(name)
