"""Reading a model's shape and variations out of GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedkv.checks import show
from pagedkv.errors import UsageError
from pagedkv.runner.config import ARCHITECTURES, ModelConfig
from pagedkv.runner.file_fields import Fields
from pagedkv.runner.rope import linear_freq_factors, yarn_freq_factors, yarn_magnitude

# Mistral's files say llama: nothing that these two compute differs, but for a window.
KNOWN = tuple(name for name in ARCHITECTURES if name != "mistral")
# Of Gemma's largest models, by number of layers. Their queries are scaled by the width of a head as it would
# be if heads shared the hidden size; the format has no key for that.
_SCALED_BY_HIDDEN_SIZE = {"gemma2": 46, "gemma3": 62}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "attention.sliding_window": 4096, "attention.sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        "attention.sliding_window_pattern": 6, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
    },
}  # fmt: skip


def read_gguf_config(
    metadata: Mapping[str, Any],
    tensor_names: frozenset[str],
    *,
    where: str,
    rope_freq_factors: tuple[float, ...] | None = None,
) -> ModelConfig:
    """Read GGUF metadata; what GGUF leaves to the tensors (biases, tying, rope factors) is passed in.

    Raises
    ------
    UsageError
        For an architecture or a rope scaling that this runner doesn't compute.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in KNOWN:
        expected = f"one of {', '.join(map(repr, KNOWN))}"
        raise UsageError(f"general.architecture: expected {expected}, got {architecture!r}, in {where}")
    defaults = {f"{architecture}.{key}": value for key, value in _DEFAULTS.get(architecture, {}).items()}
    read = Fields({**defaults, **metadata}, where, prefix=f"{architecture}.")
    read.expect("expert_count", read.get("expert_count", 0), (0,))
    num_heads = read.integer("attention.head_count")
    hidden_size = read.integer("embedding_length")
    num_layers = read.integer("block_count")
    head_dim = read.integer("attention.key_length", hidden_size // max(num_heads, 1))
    # Partial rotation and values of another width are computed by nothing in this runner.
    for key in ("rope.dimension_count", "attention.value_length"):
        read.expect(key, read.get(key, head_dim), (head_dim,))
    outer = Fields(metadata, where)
    ends = [outer.token_ids(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    scale = read.number_or_none("attention.scale")
    if scale is None and _SCALED_BY_HIDDEN_SIZE.get(architecture) == num_layers:
        scale = (hidden_size / num_heads) ** -0.5
    context_length = read.integer("context_length")
    rope = _rope(read, head_dim, context_length, rope_freq_factors)
    has_local_rope = rope["window_rope_theta"] is not None
    return ModelConfig(
        name=str(metadata.get("general.name") or architecture),
        vocab_size=read.integer("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        hidden_size=hidden_size,
        intermediate_size=read.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=read.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=read.number("attention.layer_norm_rms_epsilon"),
        windows=_windows(read, architecture, num_layers, context_length, has_local_rope),
        attention_scale=scale,
        attention_soft_cap=read.number_or_none("attn_logit_softcapping"),
        logit_soft_cap=read.number_or_none("final_logit_softcapping"),
        tie_word_embeddings="output.weight" not in tensor_names,
        attention_bias="blk.0.attn_q.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=frozenset().union(*ends),
        **ARCHITECTURES[architecture],
        **rope,
    )


def _windows(
    read: Fields, architecture: str, num_layers: int, context_length: int, has_local_rope: bool
) -> tuple[int | None, ...]:
    """Return every layer's window; empty where none has one that makes a difference."""
    window = read.integer("attention.sliding_window", 0)
    if window == 0 or (window >= context_length and not has_local_rope):
        return ()
    if architecture == "llama":  # a Mistral
        return (window,) * num_layers
    pattern = read.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):  # for each layer, whether it has a window
        if len(pattern) != num_layers:
            key = f"{read.prefix}attention.sliding_window_pattern"
            raise UsageError(f"{key}: expected {num_layers} layers, got {len(pattern)}, in {read.where}")
        return tuple(window if own else None for own in pattern)
    if architecture not in _DEFAULTS:
        expected = "none, since the file doesn't say of which layers"
        key = f"{read.prefix}attention.sliding_window"
        raise UsageError(f"{key}: expected {expected}, got {show(window)}, in {read.where}")
    # Of so many layers, the last looks back all the way; with 0, none does.
    every = read.integer("attention.sliding_window_pattern")
    return tuple(window if every == 0 or (layer + 1) % every else None for layer in range(num_layers))


def _rope(
    read: Fields, head_dim: int, context_length: int, given: tuple[float, ...] | None
) -> dict[str, Any]:
    """Return the fields of ModelConfig that concern positions; `given` are the file's own factors."""
    theta = read.number("rope.freq_base", 10000.0)
    fields: dict[str, Any] = {
        "context_length": context_length,
        "rope_theta": theta,
        "rope_freq_factors": given,
        "window_rope_theta": read.number_or_none("rope.freq_base_swa"),
    }
    kind = read.get("rope.scaling.type", "linear" if read.get("rope.scale_linear") else "none")
    read.expect("rope.scaling.type", kind, ("none", "linear", "yarn"))
    factor = read.number("rope.scaling.factor", read.get("rope.scale_linear", 1.0))
    if kind == "none" or factor == 1.0:
        return fields
    if given is not None:
        expected = "none beside the tensor rope_freqs.weight"
        key = f"{read.prefix}rope.scaling.type"
        raise UsageError(f"{key}: expected {expected}, got {kind!r}, in {read.where}")
    if kind == "linear":
        return fields | {"rope_freq_factors": linear_freq_factors(head_dim, factor)}
    original = read.integer("rope.scaling.original_context_length", context_length)
    factors = yarn_freq_factors(
        theta,
        head_dim,
        factor=factor,
        original_context_length=original,
        beta_fast=read.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read.number("rope.scaling.yarn_beta_slow", 1.0),
    )
    magnitude = yarn_magnitude(factor) * read.number("rope.scaling.attn_factor", 1.0)
    # Files that are to be read without YaRN too give the length without it.
    length = max(context_length, int(original * factor))
    return fields | {"rope_freq_factors": factors, "rope_magnitude": magnitude, "context_length": length}
