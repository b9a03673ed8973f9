"""A tiny model of each architecture, made by transformers with random weights: what the runner must equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

VOCAB_SIZE = 211
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 7,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 24}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


class Variant(NamedTuple):
    """The class of transformers, without the ending `ForCausalLM`, and what its configuration adds."""

    kind: str
    changes: dict[str, Any]


VARIANTS: dict[str, Variant] = {
    "llama": Variant("Llama", {"tie_word_embeddings": True}),
    "llama_untied": Variant("Llama", {"tie_word_embeddings": False}),
    "llama_one_kv_head": Variant("Llama", {"num_key_value_heads": 1}),
    "llama_as_many_kv_heads": Variant("Llama", {"num_key_value_heads": 6}),
    "llama_biases": Variant("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_own_head_dim": Variant("Llama", {"head_dim": 20}),
    "llama_gelu": Variant("Llama", {"hidden_act": "gelu"}),
    "llama_llama3": Variant("Llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "llama_linear": Variant(
        "Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}
    ),
    "mistral": Variant("Mistral", {"sliding_window": 24}),
    "mistral_full": Variant("Mistral", {"sliding_window": None, "head_dim": 20}),
    "qwen2": Variant("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_windows": Variant(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    ),
    "qwen2_yarn": Variant("Qwen2", {"rope_parameters": {**YARN, "rope_theta": 1e4}}),
    "qwen3": Variant("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3_biases": Variant("Qwen3", {"head_dim": 24, "attention_bias": True}),
    "qwen3_yarn": Variant(
        "Qwen3",
        {
            "head_dim": 16,
            "rope_parameters": {**YARN, "rope_theta": 1e6, "beta_fast": 16.0, "truncate": False},
        },
    ),
    "gemma": Variant("Gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2": Variant("Gemma2", GEMMA),
    "gemma2_wide_heads": Variant("Gemma2", {**GEMMA, "head_dim": 256, "attn_logit_softcapping": 5.0}),
    "gemma3": Variant("Gemma3", {**GEMMA, "num_hidden_layers": 7, "sliding_window_pattern": 3}),
    "gemma3_long_window": Variant("Gemma3", {**GEMMA, "sliding_window": 4096, "sliding_window_pattern": 2}),
    "gemma3_linear": Variant(
        "Gemma3",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 10.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


def make_reference(name: str) -> Any:
    """Make the model, in float32, with random numbers also where transformers begins with 0 and 1."""
    import transformers

    kind, changes = VARIANTS[name]
    config_name = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, config_name)(**{**SHAPE, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    randomise(model)
    return model


def randomise(model: Any) -> None:
    """Draw biases and the weights of norms, which would test nothing as they are."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        elif name.endswith("norm.weight"):
            parameter.data += 0.3 * torch.randn(parameter.shape)


def save_reference(name: str, folder: Path) -> Any:
    """Make the model and save it as users find it in a folder; return it."""
    model = make_reference(name)
    model.save_pretrained(folder)
    return model


def reference_logits(reference: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Return logits [num_tokens, vocab] without a cache."""
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return logits


def assert_greedy(reference: Any, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Check that each token of `answer` is the likeliest one, or as likely as that to the fourth digit.

    Two tokens of a random model are now and then as good as equal; what follows either of them is right.
    """
    logits = reference_logits(reference, [*prompt, *answer])[len(prompt) - 1 : -1]
    best, likeliest = logits.max(-1)
    chosen = logits[torch.arange(len(answer)), torch.tensor(answer)]
    assert torch.all(best - chosen < 1e-4), f"{list(answer)}, but the likeliest are {likeliest.tolist()}"
