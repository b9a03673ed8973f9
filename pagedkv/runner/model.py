"""A decoder over a flat batch: all tokens of all requests in one row of the tensors after the other.

It is a Llama, and what Mistral, Qwen and Gemma do differently hangs on fields of `ModelConfig`.

The model never sees a request. It asks the cache to store K and V and to attend, and the cache knows from the
step's metadata which pages that means. This is all that a model has to do to run on paged KV.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedkv.batch import AttentionMetadata
from pagedkv.runner.config import ModelConfig
from pagedkv.runner.linear import Linear, PackedLinear
from pagedkv.runner.pointwise import gate, rms_norm, rotate

if TYPE_CHECKING:
    from pagedkv.cache import PagedKVCache


class KVCache(Protocol):
    """What the model needs from a cache; `pagedkv.PagedKVCache` is one."""

    def write(self, layer: int, key: Tensor, value: Tensor, meta: AttentionMetadata) -> Any:
        """Store K and V, both [num_tokens, num_kv_heads, head_dim]."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        meta: AttentionMetadata,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Return the attention of `query` [num_tokens, num_heads, head_dim] over what is stored."""


class Part:
    """Which part of a model is computed here, and what joins the parts: the whole, with nothing to join.

    In `parallel` several processes have a part each.

    Attributes
    ----------
    vocab : slice
        Of which tokens the logits are computed here.
    """

    vocab = slice(None)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all parts of a product that is cut by input."""
        return x

    def join(self, logits: Tensor) -> Tensor:
        """Return the logits of all parts side by side."""
        return logits


WHOLE = Part()


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer; those of norms are float32."""

    attention_norm: Tensor  # [hidden]
    qkv: Linear | PackedLinear
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Linear | PackedLinear
    attention_post_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear | PackedLinear
    down: Linear | PackedLinear
    mlp_post_norm: Tensor | None  # [hidden]

    @classmethod
    def take(cls, weights: dict[str, Tensor], index: int, *, post_norms: bool) -> Layer:
        """Consume the tensors of layer `index`."""
        name = f"model.layers.{index}."
        attention, mlp = name + "self_attn.", name + "mlp."

        def norm(name: str) -> Tensor | None:
            weight = weights.pop(f"{name}.weight", None)
            return None if weight is None else weight.float()

        # Hugging Face names norms by their places: what is called post_attention stands behind attention in
        # a model with post norms, and in front of the feed-forward in others.
        behind_attention = norm(name + "post_attention_layernorm")
        before_mlp = norm(name + "pre_feedforward_layernorm") if post_norms else behind_attention
        before_attention = norm(name + "input_layernorm")
        assert before_attention is not None, "tensor_shapes has it"
        assert before_mlp is not None, "tensor_shapes has it"
        return cls(
            before_attention,
            Linear.fused(weights, attention + "q_proj", attention + "k_proj", attention + "v_proj"),
            norm(attention + "q_norm"),
            norm(attention + "k_norm"),
            Linear.fused(weights, attention + "o_proj"),
            behind_attention if post_norms else None,
            before_mlp,
            Linear.fused(weights, mlp + "gate_proj", mlp + "up_proj"),
            Linear.fused(weights, mlp + "down_proj"),
            norm(name + "post_feedforward_layernorm"),
        )

    def with_products(self, change: Callable[[Linear], Linear | PackedLinear]) -> Layer:
        """Return the same with other products."""
        products: dict[str, Any] = {
            name: change(getattr(self, name)) for name in ("qkv", "output", "gate_up", "down")
        }
        return replace(self, **products)


class Rotary:
    """Turns pairs of each head's dimensions by a token's position.

    Parameters
    ----------
    theta : float
    freq_factors : tuple of float or None
        Divisors of the frequencies.
    magnitude : float
        Multiplies what is turned.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        freq_factors: tuple[float, ...] | None,
        magnitude: float,
        device: torch.device,
    ) -> None:
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        if freq_factors is not None:
            frequencies = frequencies / torch.tensor(freq_factors)
        self._frequencies = frequencies.to(device)  # [head_dim / 2]
        self._magnitude = magnitude

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for `rotate`, each float32 [num_tokens, 1, head_dim / 2]."""
        angles = (positions[:, None].float() * self._frequencies)[:, None]
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self._magnitude == 1 else (cos * self._magnitude, sin * self._magnitude)


class AnyModel(Protocol):
    """What an engine asks of a model; `Model` is one, `parallel.LeadingModel` another."""

    @property
    def namespace(self) -> bytes:
        """What the KV depends on."""

    @property
    def config(self) -> ModelConfig:
        """Shapes and constants."""

    @property
    def dtype(self) -> torch.dtype:
        """Of K and V."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def forward(self, cache: PagedKVCache, meta: AttentionMetadata) -> Tensor:
        """Return hidden states [num_tokens, hidden] of one step."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [n, vocab] of `hidden` [n, hidden]."""


class Model:
    """Weights and forward pass.

    Parameters
    ----------
    config : ModelConfig
    weights : dict of str to Tensor
        Exactly the tensors of `weights.tensor_shapes(config)`, on one device, of one dtype; those of norms
        may be float32 in any case. Emptied.
    part : Part
        `config` and `weights` are of this part of a model.
    int8_weights : bool
        Whether to keep the weights of products in 8 bits, with a scale for each row. All else stays in the
        dtype that `weights` have.

    Attributes
    ----------
    namespace : bytes
        Equal for two models just when they compute equal KV by equal weights: 32 bytes, for the cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        part: Part = WHOLE,
        *,
        int8_weights: bool = False,
    ) -> None:
        self.config = config
        self._part = part
        self.namespace = _namespace(config, weights)
        self.embedding = weights.pop("model.embed_tokens.weight")  # [vocab, hidden]
        self.layers = [
            Layer.take(weights, index, post_norms=config.post_norms) for index in range(config.num_layers)
        ]
        self.norm = weights.pop("model.norm.weight").float()
        self.head = Linear(weights.pop("lm_head.weight", self.embedding[part.vocab]))  # [vocab, hidden]
        if int8_weights:
            self.layers = [layer.with_products(Linear.in_int8) for layer in self.layers]
            self.head = self.head.in_int8()
            self.namespace = hashlib.sha256(self.namespace + b"int8").digest()
        else:
            self.layers = [layer.with_products(Linear.packed) for layer in self.layers]
        # In the dtype of the weights, since the makers' own code rounds it so.
        scale = config.hidden_size**0.5 if config.scale_embeddings else 1.0
        self._embedding_scale = torch.tensor(scale, dtype=self.dtype).item()
        self._rotary = Rotary(
            config.head_dim, config.rope_theta, config.rope_freq_factors, config.rope_magnitude, self.device
        )
        self._window_rotary = (
            None
            if config.window_rope_theta is None
            else Rotary(config.head_dim, config.window_rope_theta, None, 1.0, self.device)
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all that is computed, and so of K and V."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @torch.inference_mode()
    def forward(self, cache: KVCache, meta: AttentionMetadata) -> Tensor:
        """Compute one step's tokens, storing their K and V in `cache`.

        Returns
        -------
        Tensor
            Hidden states [num_tokens, hidden]; pass the rows that will be sampled to `logits`.
        """
        config, part = self.config, self._part
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        angles = self._rotary.angles(meta.positions)
        window_angles = self._window_rotary.angles(meta.positions) if self._window_rotary else angles
        x = F.embedding(meta.token_ids, self.embedding)
        if config.scale_embeddings:
            x = x * self._embedding_scale
        for index, layer in enumerate(self.layers):
            window = config.window(index)
            cos, sin = angles if window is None else window_angles
            qkv = layer.qkv(self._norm(x, layer.attention_norm))
            q, k, v = qkv.view(len(x), -1, config.head_dim).split_with_sizes(heads, dim=1)
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
            cache.write(index, rotate(k, cos, sin), v, meta)
            attended = cache.attend(
                index,
                rotate(q, cos, sin),
                meta,
                scale=config.attention_scale,
                window=window,
                soft_cap=config.attention_soft_cap,
            )
            attended = part.sum(layer.output(attended.reshape(len(x), -1)))
            x = x + self._norm(attended, layer.attention_post_norm)
            gated = gate(layer.gate_up(self._norm(x, layer.mlp_norm)), config.activation)
            x = x + self._norm(part.sum(layer.down(gated)), layer.mlp_post_norm)
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [n, vocab] of `hidden` [n, hidden].

        In float32 always: bfloat16 rounds a logit of 30 to steps of 0.25, and ties would decide the answer.
        """
        logits = self._part.join(self.head.in_float32(self._norm(hidden.float(), self.norm)))
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Divide by the root mean square of the last dimension; leave `x` as it is without a weight."""
        return x if weight is None else rms_norm(x, weight, self.config.rms_norm_eps)


def _namespace(config: ModelConfig, weights: dict[str, Tensor]) -> bytes:
    """Name what the KV depends on: a digest of how the model computes and of every byte of its weights."""
    # Named are the fields that change no KV: one that is added later counts unless it is added here.
    computes = replace(
        config, name="", context_length=1, logit_soft_cap=None, bos_token_id=None, eos_token_ids=frozenset()
    )
    digest = hashlib.sha256(repr(computes).encode())
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.flatten().view(torch.uint8).cpu().numpy().data)
    return digest.digest()
