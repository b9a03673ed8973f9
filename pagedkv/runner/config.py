"""What a model is, as data: its shapes, its constants, and which of the known variations it has.

`hf_config` reads it from a Hugging Face ``config.json``, `gguf_config` from GGUF metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagedkv.checks import check_int, show
from pagedkv.errors import UsageError
from pagedkv.spec import KVCacheSpec, KVGroup

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
"""Of the feed-forward, named as in Hugging Face's files."""

GEMMA: dict[str, Any] = {"activation": "gelu_pytorch_tanh", "scale_embeddings": True}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"qk_norms": True},
    "gemma": GEMMA,
    "gemma2": {**GEMMA, "post_norms": True},
    "gemma3": {**GEMMA, "post_norms": True, "qk_norms": True},
}
"""By GGUF's names: the variations that come with an architecture, and which no file spells out."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes, constants and variations of one decoder.

    What has a default is a variation: with all of them left out, it is a Llama.

    Attributes
    ----------
    name : str
        For people.
    context_length : int
        The most tokens, prompt and answer together, that the model was made for.
    rope_theta : float
        Base of the rotary frequencies.
    rope_freq_factors : tuple of float or None
        Divisors of the ``head_dim / 2`` rotary frequencies; None divides nothing. Every scaling that
        `rope` knows is such a list.
    rope_magnitude : float
        What YaRN multiplies rotated queries and keys with.
    windows : tuple of (int or None)
        For each layer the tokens that it looks back, its own included; None for all. Empty: all, in every
        layer.
    window_rope_theta : float or None
        Base of the rotary frequencies of layers with a window, which are then not scaled; None: as in the
        others.
    activation : str
        Of the feed-forward: one of `ACTIVATIONS`.
    attention_scale : float or None
        Of the attention's logits; None for ``head_dim ** -0.5``.
    attention_soft_cap, logit_soft_cap : float or None
        Bounds of the attention's logits and of the vocabulary's.
    attention_bias, output_bias, mlp_bias : bool
        Whether the projections to q, k and v, the one behind attention, and those of the feed-forward carry
        biases.
    qk_norms : bool
        Whether every head's query and key are normalised before they are rotated.
    post_norms : bool
        Whether the results of attention and feed-forward are normalised before they are added.
    scale_embeddings : bool
        Whether embeddings are multiplied by ``hidden_size ** 0.5``.
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
    rope_magnitude: float = 1.0
    windows: tuple[int | None, ...] = ()
    window_rope_theta: float | None = None
    activation: str = "silu"
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norms: bool = False
    post_norms: bool = False
    scale_embeddings: bool = False
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
        if len(self.windows) not in (0, self.num_layers):
            expected = f"none or {self.num_layers}, one a layer"
            raise UsageError(f"windows: expected {expected}, got {len(self.windows)}, in {self.name}")
        for window in self.windows:
            if window is not None:
                check_int("windows", window, 1, 2**31 - 1, f", in {self.name}")
        if self.activation not in ACTIVATIONS:
            expected = f"one of {', '.join(ACTIVATIONS)}"
            raise UsageError(f"activation: expected {expected}, got {show(self.activation)}, in {self.name}")

    def window(self, layer: int) -> int | None:
        """Return how many tokens a layer looks back; None for all."""
        return self.windows[layer] if self.windows else None

    def kv_spec(self, dtype: str, *, block_size: int = 16) -> KVCacheSpec:
        """Return the cache geometry that this model needs when its K and V have `dtype`.

        Layers of one window are a group with pages of their own; those that look back all the way come first.
        """
        layers_of: dict[int | None, list[int]] = {}
        for layer in range(self.num_layers):
            layers_of.setdefault(self.window(layer), []).append(layer)
        by_window = sorted(layers_of.items(), key=lambda item: item[0] or 0)
        groups = [
            KVGroup(tuple(layers), self.num_kv_heads, self.head_dim, dtype, window)
            for window, layers in by_window
        ]
        return KVCacheSpec(tuple(groups), block_size)
