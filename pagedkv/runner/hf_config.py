"""Reading a model's shape and variations out of a Hugging Face ``config.json``, of old releases and new."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pagedkv.checks import show
from pagedkv.errors import UsageError
from pagedkv.runner.config import ACTIVATIONS, ARCHITECTURES, ModelConfig
from pagedkv.runner.file_fields import Fields
from pagedkv.runner.rope import linear_freq_factors, llama3_freq_factors, yarn_freq_factors, yarn_magnitude

CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",  # of which the text model is computed
}
MODEL_TYPES = {**{name: name for name in ARCHITECTURES}, "gemma3_text": "gemma3"}

_GEMMA_DEFAULTS = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma2": {
        **_GEMMA_DEFAULTS,
        "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        **_GEMMA_DEFAULTS,
        "sliding_window_pattern": 6, "vocab_size": 262208, "max_position_embeddings": 131072,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
}  # fmt: skip
"""What a file may leave out, by architecture; an explicit null stays null."""

_OUTER = ("_name_or_path", "bos_token_id", "eos_token_id")
"""What a model that also sees says better than its text part."""
_HAVE_ATTENTION_BIAS = ("llama", "qwen3", "gemma", "gemma2", "gemma3")


class HFConfig(NamedTuple):
    """A configuration, and by what name of `ARCHITECTURES` it was read."""

    architecture: str
    config: ModelConfig


def read_hf_config(values: Mapping[str, Any], *, where: str) -> HFConfig:
    """Read the contents of a ``config.json``.

    Raises
    ------
    UsageError
        For an architecture, activation, quantisation or rope scaling that this runner doesn't compute.
    """
    architecture = _architecture(values, where)
    text = values.get("text_config")
    if isinstance(text, Mapping):  # of a model that also sees: the text's own settings count
        outer = {key: values[key] for key in _OUTER if values.get(key) is not None}
        values = {**values, **text, **outer}
    read = Fields({**DEFAULTS.get(architecture, {}), **values}, where)
    if values.get("quantization_config"):
        raise UsageError(f"quantization_config: expected none, got a quantised model, in {where}")
    read.expect("use_bidirectional_attention", read.flag("use_bidirectional_attention"), (False,))
    is_gemma = architecture.startswith("gemma")
    num_heads = read.integer("num_attention_heads")
    hidden_size = read.integer("hidden_size")
    num_layers = read.integer("num_hidden_layers")
    context_length = read.integer("max_position_embeddings")
    head_dim = read.integer("head_dim", hidden_size // max(num_heads, 1))
    rope = _rope(read, head_dim, context_length, has_local=architecture == "gemma3")
    has_local_rope = rope["window_rope_theta"] is not None
    has_bias = architecture in _HAVE_ATTENTION_BIAS and read.flag("attention_bias")
    scalar = read.number_or_none("query_pre_attn_scalar") if is_gemma else None
    # Gemma 3 has the setting too, and no implementation that heeds it.
    soft_cap = read.number_or_none("attn_logit_softcapping") if architecture == "gemma2" else None
    config = ModelConfig(
        name=str(values.get("_name_or_path") or architecture),
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=read.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        windows=_windows(read, architecture, num_layers, context_length, has_local_rope),
        attention_scale=None if scalar is None else scalar**-0.5,
        attention_soft_cap=soft_cap,
        logit_soft_cap=read.number_or_none("final_logit_softcapping") if is_gemma else None,
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        attention_bias=has_bias or architecture == "qwen2",
        output_bias=has_bias,
        mlp_bias=architecture == "llama" and read.flag("mlp_bias"),
        bos_token_id=read.get("bos_token_id"),
        eos_token_ids=read.token_ids("eos_token_id"),
        **ARCHITECTURES[architecture] | {"activation": _activation(read, architecture)},
        **rope,
    )
    return HFConfig(architecture, config)


def _architecture(values: Mapping[str, Any], where: str) -> str:
    named = values.get("architectures")
    if isinstance(named, list) and named:
        got, known = named[0], CLASSES
    else:
        got, known = values.get("model_type"), MODEL_TYPES
    if not isinstance(got, str) or got not in known:
        raise UsageError(f"architecture: expected one of {', '.join(CLASSES)}, got {got!r}, in {where}")
    return known[got]


def _activation(read: Fields, architecture: str) -> str:
    default = ARCHITECTURES[architecture].get("activation", "silu")
    key = "hidden_activation" if read.get("hidden_activation") else "hidden_act"
    got = read.get(key, default)
    if architecture == "gemma" and got == "gelu":
        return str(default)  # the first releases said so and meant the approximation
    read.expect(key, got, ACTIVATIONS)
    return str(got)


def _windows(
    read: Fields, architecture: str, num_layers: int, context_length: int, has_local_rope: bool
) -> tuple[int | None, ...]:
    """Return every layer's window; empty where none has one that makes a difference."""
    has_windows = (
        read.flag("use_sliding_window")
        if architecture in ("qwen2", "qwen3")
        else architecture in ("mistral", "gemma2", "gemma3")
    )
    if not has_windows or read.get("sliding_window") is None:
        return ()
    window = read.integer("sliding_window")
    if window >= context_length and not has_local_rope:
        return ()
    kinds = read.get("layer_types")
    if architecture == "mistral":
        has_window = [True] * num_layers
    elif kinds is not None:
        known = {"full_attention": False, "sliding_attention": True}
        if not isinstance(kinds, list) or len(kinds) != num_layers or not all(k in known for k in kinds):
            expected = f"{num_layers} times {' or '.join(known)}"
            raise UsageError(f"layer_types: expected {expected}, got {show(kinds)}, in {read.where}")
        has_window = [known[kind] for kind in kinds]
    elif architecture in ("qwen2", "qwen3"):
        first = read.integer("max_window_layers")
        has_window = [layer >= first for layer in range(num_layers)]
    else:  # of so many layers, the last looks back all the way
        pattern = max(read.integer("sliding_window_pattern"), 1)
        has_window = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    return tuple(window if own else None for own in has_window) if any(has_window) else ()


def _rope(read: Fields, head_dim: int, context_length: int, *, has_local: bool) -> dict[str, Any]:
    """Return the fields of ModelConfig that concern positions."""
    rope = read.mapping("rope_parameters") or read.mapping("rope_scaling")
    local: float | None = None
    if isinstance(rope.get("full_attention"), Mapping):  # by kind of layer
        sliding = rope.get("sliding_attention") or {}
        kind = sliding.get("rope_type", sliding.get("type", "default"))
        read.expect("rope scaling of layers with a window", kind, ("default",))
        rope = rope["full_attention"]
        default = read.number("rope_local_base_freq" if has_local else "rope_theta", 10000.0)
        local = Fields(sliding, read.where).number("rope_theta", default)
    elif has_local:
        local = read.number("rope_local_base_freq")
    scaling = Fields({"rope_theta": read.get("rope_theta"), **rope}, read.where)
    theta = scaling.number("rope_theta", 10000.0)
    scaling.expect("partial_rotary_factor", read.get("partial_rotary_factor", 1.0), (1.0,))
    scaling.expect("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0), (1.0,))
    kind = rope.get("rope_type", rope.get("type", "default"))
    read.expect("rope scaling", kind, ("default", "linear", "llama3", "yarn"))
    fields: dict[str, Any] = {
        "rope_theta": theta, "window_rope_theta": local, "context_length": context_length,
    }  # fmt: skip
    if kind == "default":
        return fields
    factor = scaling.number("factor")
    if kind == "linear":
        return fields | {"rope_freq_factors": linear_freq_factors(head_dim, factor)}
    original = scaling.integer("original_max_position_embeddings", context_length)
    if kind == "llama3":
        factors = llama3_freq_factors(
            theta,
            head_dim,
            factor=factor,
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
            original_context_length=original,
        )
        return fields | {"rope_freq_factors": factors}
    factors = yarn_freq_factors(
        theta,
        head_dim,
        factor=factor,
        original_context_length=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
    )
    # Files that are to be read without YaRN too give the length without it.
    length = max(context_length, int(original * factor))
    magnitude = scaling.number("attention_factor", _yarn_magnitude(scaling, factor))
    return fields | {"rope_freq_factors": factors, "rope_magnitude": magnitude, "context_length": length}


def _yarn_magnitude(scaling: Fields, factor: float) -> float:
    above, below = (scaling.get(key) for key in ("mscale", "mscale_all_dim"))
    if above and below:
        return yarn_magnitude(factor, scaling.number("mscale")) / yarn_magnitude(
            factor, scaling.number("mscale_all_dim")
        )
    return yarn_magnitude(factor)
