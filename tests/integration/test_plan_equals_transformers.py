"""The bytes that a plan counts are those that transformers' own caches hold, for models of many families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pagedkv.policy import model_from_config

NUM_TOKENS = 20
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 64},
    "mixtral": {**GROUPED, **EXPERTS},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 32},
    "gemma": {**GROUPED, "head_dim": 32},
    "gemma2": {**GROUPED, "sliding_window": 64},
    "gemma3_text": {**GROUPED, "sliding_window": 64},
    "gpt_oss": {**GROUPED, **EXPERTS, "sliding_window": 64},
    "cohere2": {**GROUPED, "sliding_window": 64},
    "phi": {"num_key_value_heads": 2},
    "gpt2": {"n_inner": 96},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_bigcode": {"n_inner": 96},
    "nemotron": GROUPED,
    "starcoder2": {"num_key_value_heads": 2},
}
NOT_IN_LAYERS = ("embed", "lm_head", "wte", "wpe")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_holds_the_bytes_of_the_plan(family: str) -> None:
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        cache = model(torch.arange(3, 3 + NUM_TOKENS)[None], use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    planned = model_from_config(config.to_dict(), name=family)
    assert planned.bytes_per_token("float32") * NUM_TOKENS == held
    windows = {group.window for group in planned.groups}
    assert (64 in windows) == ("sliding_window" in FAMILIES[family])
    if "num_experts" not in FAMILIES[family]:
        weights = sum(
            parameter.numel()
            for name, parameter in model.named_parameters()
            if parameter.dim() == 2 and not any(part in name for part in NOT_IN_LAYERS)
        )
        assert planned.flops_per_token == 2 * weights
