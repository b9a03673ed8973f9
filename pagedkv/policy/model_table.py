"""Configurations of some models, by name: the fields of their config.json that KV and cost depend on."""

from __future__ import annotations

from typing import Any


def _dense(
    layers: int, hidden: int, heads: int, kv_heads: int, inner: int, head_dim: int | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "head_dim": head_dim,
        "torch_dtype": "bfloat16",
        **more,
    }


_DEEPSEEK = {
    **_dense(61, 7168, 128, 128, 18432),
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
}
_GPT_OSS = {
    "sliding_window": 128,
    "num_experts_per_tok": 4,
}

MODEL_TABLE: dict[str, dict[str, Any]] = {
    "smollm2-135m": _dense(30, 576, 9, 3, 1536),
    "llama-3.2-1b": _dense(16, 2048, 32, 8, 8192, 64),
    "llama-3.2-3b": _dense(28, 3072, 24, 8, 8192, 128),
    "llama-3.1-8b": _dense(32, 4096, 32, 8, 14336),
    "llama-3.1-70b": _dense(80, 8192, 64, 8, 28672),
    "llama-3.3-70b": _dense(80, 8192, 64, 8, 28672),
    "llama-3.1-405b": _dense(126, 16384, 128, 8, 53248),
    "mistral-7b-v0.1": _dense(32, 4096, 32, 8, 14336, sliding_window=4096),
    "mistral-7b-v0.3": _dense(32, 4096, 32, 8, 14336),
    "mixtral-8x7b": _dense(32, 4096, 32, 8, 14336, num_experts_per_tok=2),
    "qwen2.5-7b": _dense(28, 3584, 28, 4, 18944),
    "qwen2.5-32b": _dense(64, 5120, 40, 8, 27648),
    "qwen2.5-72b": _dense(80, 8192, 64, 8, 29568),
    "qwen3-8b": _dense(36, 4096, 32, 8, 12288, 128),
    "qwen3-32b": _dense(64, 5120, 64, 8, 25600, 128),
    "qwen3-30b-a3b": _dense(48, 2048, 32, 4, 6144, 128, moe_intermediate_size=768, num_experts_per_tok=8),
    "qwen3-235b-a22b": _dense(94, 4096, 64, 4, 12288, 128, moe_intermediate_size=1536, num_experts_per_tok=8),
    "gemma-2-9b": _dense(42, 3584, 16, 8, 14336, 256, sliding_window=4096, sliding_window_pattern=2),
    "gemma-3-27b": _dense(62, 5376, 32, 16, 21504, 128, sliding_window=1024, sliding_window_pattern=6),
    "gpt-oss-20b": _dense(
        24, 2880, 64, 8, 2880, 64, **_GPT_OSS, layer_types=["sliding_attention", "full_attention"] * 12
    ),
    "gpt-oss-120b": _dense(
        36, 2880, 64, 8, 2880, 64, **_GPT_OSS, layer_types=["sliding_attention", "full_attention"] * 18
    ),
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
}
"""By lower-case name. Others are described by their own config.json."""
