"""What a model is: shapes and constants, read from a Hugging Face ``config.json`` or from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedkv.checks import check_int, show
from pagedkv.errors import UsageError
from pagedkv.spec import KVCacheSpec


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of one Llama-family decoder.

    Attributes
    ----------
    name : str
        For people.
    context_length : int
        The most tokens, prompt and answer together, that the model was made for.
    rope_theta : float
        Base of the rotary frequencies.
    rope_freq_factors : tuple of float or None
        Divisors of the ``head_dim / 2`` rotary frequencies; None divides nothing. Llama 3.1's scaling is
        such a list.
    attention_bias, mlp_bias : bool
        Whether the projections of attention and of the feed-forward carry biases.
    bos_token_id : int or None
        The token that begins a text.
    eos_token_ids : frozenset of int
        Any of these ends an answer.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    rope_freq_factors: tuple[float, ...] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Refuse shapes that no decoder can have."""
        for field in (
            "vocab_size", "hidden_size", "intermediate_size", "context_length",
            "num_layers", "num_heads", "num_kv_heads", "head_dim",
        ):  # fmt: skip
            # A damaged file may ask for a million layers; naming their tensors would take minutes.
            most = 4096 if field == "num_layers" else 2**31 - 1
            check_int(field, getattr(self, field), 1, most, f", in {self.name}")
        if self.num_heads % self.num_kv_heads:
            expected = f"a multiple of num_kv_heads ({self.num_kv_heads})"
            raise UsageError(f"num_heads: expected {expected}, got {self.num_heads}, in {self.name}")
        if self.head_dim % 2:
            raise UsageError(f"head_dim: expected an even number, got {self.head_dim}, in {self.name}")
        num_pairs, factors = self.head_dim // 2, self.rope_freq_factors
        if factors is not None and len(factors) != num_pairs:
            raise UsageError(f"rope_freq_factors: expected {num_pairs}, got {len(factors)}, in {self.name}")

    def kv_spec(self, dtype: str, *, block_size: int = 16) -> KVCacheSpec:
        """Return the cache geometry that this model needs when its K and V have `dtype`."""
        return KVCacheSpec.uniform(self.num_layers, self.num_kv_heads, self.head_dim, dtype, block_size)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], *, where: str) -> ModelConfig:
        """Read the contents of a ``config.json``.

        Raises
        ------
        UsageError
            For an architecture, activation, quantisation or rope scaling that this runner doesn't compute.
        """
        read = _Reader(values, where)
        named = values.get("architectures")
        architecture = named[0] if isinstance(named, list) and named else values.get("model_type")
        read.expect("architecture", architecture, ("LlamaForCausalLM", "llama"))
        read.expect("hidden_act", values.get("hidden_act", "silu"), ("silu",))
        if values.get("quantization_config"):
            raise UsageError(f"quantization_config: expected none, got a quantised model, in {where}")
        num_heads = read.integer("num_attention_heads")
        hidden_size = read.integer("hidden_size")
        head_dim = read.integer("head_dim", hidden_size // max(num_heads, 1))
        theta, factors = _hf_rope(read, head_dim)
        return cls(
            name=str(values.get("_name_or_path") or "llama"),
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.integer("intermediate_size"),
            num_layers=read.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=read.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            context_length=read.integer("max_position_embeddings"),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_freq_factors=factors,
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            attention_bias=bool(values.get("attention_bias", False)),
            mlp_bias=bool(values.get("mlp_bias", False)),
            bos_token_id=values.get("bos_token_id"),
            eos_token_ids=read.token_ids("eos_token_id"),
        )

    @classmethod
    def from_gguf(
        cls,
        values: Mapping[str, Any],
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
        read = _Reader(values, where)
        read.expect("general.architecture", values.get("general.architecture"), ("llama",))
        read.expect("llama.rope.scaling.type", values.get("llama.rope.scaling.type", "none"), ("none",))
        read.expect("llama.expert_count", values.get("llama.expert_count", 0), (0,))
        num_heads = read.integer("llama.attention.head_count")
        hidden_size = read.integer("llama.embedding_length")
        head_dim = read.integer("llama.attention.key_length", hidden_size // max(num_heads, 1))
        # Partial rotation and values of another width are computed by nothing in this runner.
        for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
            read.expect(key, values.get(key, head_dim), (head_dim,))
        vocab = values.get("tokenizer.ggml.tokens", ())
        ends = [read.token_ids(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
        return cls(
            name=str(values.get("general.name") or "llama"),
            vocab_size=read.integer("llama.vocab_size", len(vocab)),
            hidden_size=hidden_size,
            intermediate_size=read.integer("llama.feed_forward_length"),
            num_layers=read.integer("llama.block_count"),
            num_heads=num_heads,
            num_kv_heads=read.integer("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            context_length=read.integer("llama.context_length"),
            rms_norm_eps=read.number("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=read.number("llama.rope.freq_base", 10000.0),
            rope_freq_factors=rope_freq_factors,
            tie_word_embeddings="output.weight" not in tensor_names,
            attention_bias="blk.0.attn_q.bias" in tensor_names,
            mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
            bos_token_id=values.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=frozenset().union(*ends),
        )


@dataclass(frozen=True)
class _Reader:
    """Typed look-ups whose errors name the key and the file."""

    values: Mapping[str, Any]
    where: str

    def expect(self, key: str, got: object, known: tuple[object, ...]) -> None:
        if got not in known:
            expected = " or ".join(map(repr, known))
            raise UsageError(f"{key}: expected {expected}, got {got!r}, in {self.where}")

    def integer(self, key: str, default: int | None = None) -> int:
        got = self.values.get(key)
        got = default if got is None else got
        return check_int(key, got, 0, 2**31 - 1, f", in {self.where}")

    def number(self, key: str, default: float | None = None) -> float:
        got = self.values.get(key)
        got = default if got is None else got
        if not isinstance(got, int | float) or isinstance(got, bool) or not 0 < got < math.inf:
            raise UsageError(f"{key}: expected a number above 0, got {show(got)}, in {self.where}")
        return float(got)

    def token_ids(self, key: str) -> frozenset[int]:
        got = self.values.get(key)
        listed = got if isinstance(got, list) else [] if got is None else [got]
        return frozenset(check_int(key, token, 0, 2**32 - 1, f", in {self.where}") for token in listed)

    def mapping(self, key: str) -> Mapping[str, Any]:
        got = self.values.get(key) or {}
        if not isinstance(got, Mapping):
            raise UsageError(f"{key}: expected an object, got {show(got)}, in {self.where}")
        return got


def _hf_rope(read: _Reader, head_dim: int) -> tuple[float, tuple[float, ...] | None]:
    """Return theta and the frequency factors; newer files keep both in ``rope_parameters``."""
    rope = read.mapping("rope_parameters") or read.mapping("rope_scaling")
    scaling = _Reader({"rope_theta": read.values.get("rope_theta"), **rope}, read.where)
    theta = scaling.number("rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    read.expect("rope scaling", kind, ("default", "llama3"))
    if kind == "default":
        return theta, None
    return theta, llama3_freq_factors(
        theta,
        head_dim,
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_context_length=scaling.integer("original_max_position_embeddings"),
    )


def llama3_freq_factors(
    theta: float,
    head_dim: int,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context_length: int,
) -> tuple[float, ...]:
    """Return the divisors by which Llama 3.1 stretches its rotary frequencies.

    Wavelengths far shorter than the original context keep their frequency (1), far longer ones are slowed
    down by `factor`, and those between move smoothly from one to the other.
    """
    if low_freq_factor >= high_freq_factor:
        expected = f"less than high_freq_factor ({high_freq_factor})"
        raise UsageError(f"low_freq_factor: expected {expected}, got {low_freq_factor}")
    factors = []
    for dim in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (dim / head_dim)
        periods = original_context_length / wavelength  # turns within the original context
        smooth = (periods - low_freq_factor) / (high_freq_factor - low_freq_factor)
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(factors)
