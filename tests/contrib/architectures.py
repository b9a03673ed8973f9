"""Small models with random weights of many architectures of transformers, each built once."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
import transformers

RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))

VOCABULARY = 199
PAD = 0
WINDOW = 24

_HEADS = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_GEMMA = {**_HEADS, "head_dim": 16}
_SLIDING = {**_GEMMA, "num_hidden_layers": 4, "sliding_window": WINDOW}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_GPT = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 512}
_MOE = {
    **_HEADS,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _HEADS,
    "qwen2": _HEADS,
    "qwen3": {**_HEADS, "head_dim": 16},
    "mistral": {**_HEADS, "sliding_window": WINDOW},
    "gemma": _GEMMA,
    "gemma2": {**_SLIDING, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_SLIDING, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 16},
    "phi3": _HEADS,
    "gpt2": _GPT,
    "gpt_neox": {**_HEADS, "rotary_pct": 0.5},
    "olmo2": _HEADS,
    "cohere": _HEADS,
    "granite": _HEADS,
    "starcoder2": {**_HEADS, "sliding_window": WINDOW},
    "falcon": {**_HEADS, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
}
"""The architectures that every scenario is run with."""

MORE_CONFIGS: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 48, "n_layer": 3, "n_head": 6},
    "codegen": {**_GPT, "n_head": 4, "rotary_dim": 4},
    "cohere2": {**_SLIDING, "layer_types": _ALTERNATING},
    "deepseek_v3": {
        **_MOE,
        "num_key_value_heads": 6,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt_bigcode": {**_GPT, "multi_query": True},
    "gpt_oss": {**_SLIDING, **_MOE, "num_hidden_layers": 4, "head_dim": 16, "layer_types": _ALTERNATING},
    "gemma3n_text": {
        **_SLIDING,
        "layer_types": _ALTERNATING,
        "num_kv_shared_layers": 2,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [80] * 4,
    },
    "gemma4_text": {
        **_SLIDING,
        "layer_types": _ALTERNATING,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gptj": {**_GPT, "rotary_dim": 4},
    "mixtral": _MOE,
    "mpt": {"d_model": 48, "n_heads": 4, "n_layers": 3, "max_seq_len": 512, "use_cache": True},
    "opt": {**_HEADS, "ffn_dim": 80, "word_embed_proj_dim": 48},
    "phi": _HEADS,
    "qwen3_moe": {**_MOE, "head_dim": 16},
    "stablelm": _HEADS,
}
"""Others, with what is odd: ALiBi, compressed K and V, sinks, experts, layers that share K and V."""


CHUNKS_SINCE = (4, 52)
"""From when on `generate` cuts a prompt into chunks without compiling the model as one graph."""
IN_PLACE_SINCE = (4, 53)
ATTENTIONS = [
    None,
    pytest.param(
        "pagedkv", marks=pytest.mark.skipif(RELEASE < IN_PLACE_SINCE, reason="in place from 4.53 on")
    ),
]
"""What to ask of a model: its default, and pages read in place."""
BEST_ATTENTION = "pagedkv" if RELEASE >= IN_PLACE_SINCE else None
LATER_IN_PLACE = {"codegen": (5, 24), "gptj": (5, 24), "stablelm": (5, 0)}
"""Architectures whose layers look up their attention, from these tested releases on."""
NOT_IN_PLACE = {"falcon", "bloom", "mpt"}
"""Architectures whose layers don't look up their attention."""
REFUSED_BEFORE = {
    "gpt_bigcode": (4, 54),  # what came before kept tuples of tensors
    "mpt": (4, 54),
    "gpt2": (4, 52),
    "opt": (4, 49),
    "gemma2": (4, 53),  # masks that fit no cache but one of transformers' own
    "gemma3_text": (4, 53),
    "cohere2": (4, 53),
    "gemma3n_text": (4, 56),  # layers that read the cache's own tensors
}
"""Architectures that older releases can't run with any cache but their own, and from when on they can."""


def runs(name: str) -> bool:
    """Whether the installed release can run an architecture with our cache."""
    return REFUSED_BEFORE.get(name, RELEASE) <= RELEASE


@cache
def small_model(name: str, attention: str | None = None) -> Any:
    """Return the model of an architecture, in float32, with weights under which every token matters."""
    options = CONFIGS.get(name) or MORE_CONFIGS[name]
    config = transformers.AutoConfig.for_model(
        name, vocab_size=VOCABULARY, pad_token_id=PAD, bos_token_id=1, eos_token_id=2, **options
    )
    if attention is None and getattr(config, "attn_logit_softcapping", None):
        attention = "eager"  # sdpa of older releases leaves the soft cap out
    chosen = {} if attention is None else {"attn_implementation": attention}
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, in what older releases import
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, **chosen).eval()
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1:
            width = 0.8 / parameter.shape[-1] ** 0.5 if "embed" not in key else 0.5
            parameter.data = width * 2 * torch.randn(parameter.shape, generator=generator)
    model.generation_config.eos_token_id = None  # so that texts have the length that a test asks for
    model.generation_config.pad_token_id = PAD
    return model


def random_ids(num_tokens: int, seed: int, batch: int = 1) -> torch.Tensor:
    """Return token ids [batch, num_tokens] without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, num_tokens), generator=generator)
