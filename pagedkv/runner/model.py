"""A Llama decoder over a flat batch: all tokens of all requests in one row of the tensors after the other.

The model never sees a request. It asks the cache to store K and V and to attend, and the cache knows from the
step's metadata which pages that means. This is all that a model has to do to run on paged KV.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedkv.batch import AttentionMetadata
from pagedkv.runner.config import ModelConfig


class KVCache(Protocol):
    """What the model needs from a cache; `pagedkv.PagedKVCache` is one."""

    def write(self, layer: int, key: Tensor, value: Tensor, meta: AttentionMetadata) -> Any:
        """Store K and V, both [num_tokens, num_kv_heads, head_dim]."""

    def attend(self, layer: int, query: Tensor, meta: AttentionMetadata) -> Tensor:
        """Return the attention of `query` [num_tokens, num_heads, head_dim] over what is stored."""


@dataclass(frozen=True)
class Linear:
    """A matrix product with an optional bias."""

    weight: Tensor  # [out, in]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to x [num_tokens, in]."""
        return F.linear(x, self.weight, self.bias)

    @classmethod
    def fused(cls, weights: dict[str, Tensor], *names: str) -> Linear:
        """Join projections of the same input into one product, consuming them from `weights`."""
        biases = [weights.pop(f"{name}.bias") for name in names if f"{name}.bias" in weights]
        return cls(
            torch.cat([weights.pop(f"{name}.weight") for name in names]),
            torch.cat(biases) if biases else None,
        )


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer."""

    attention_norm: Tensor  # [hidden]
    qkv: Linear
    output: Linear
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear
    down: Linear

    @classmethod
    def take(cls, weights: dict[str, Tensor], index: int) -> Layer:
        """Consume the tensors of layer `index`."""
        name = f"model.layers.{index}."
        attention, mlp = name + "self_attn.", name + "mlp."
        return cls(
            weights.pop(name + "input_layernorm.weight"),
            Linear.fused(weights, attention + "q_proj", attention + "k_proj", attention + "v_proj"),
            Linear.fused(weights, attention + "o_proj"),
            weights.pop(name + "post_attention_layernorm.weight"),
            Linear.fused(weights, mlp + "gate_proj", mlp + "up_proj"),
            Linear.fused(weights, mlp + "down_proj"),
        )


class Model:
    """Weights and forward pass.

    Parameters
    ----------
    config : ModelConfig
    weights : dict of str to Tensor
        Exactly the tensors of `weights.tensor_shapes(config)`, of one dtype, on one device. Emptied.

    Attributes
    ----------
    namespace : bytes
        Equal for two models just when they compute equal KV by equal weights: 32 bytes, for the cache.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None:
        self.config = config
        self.namespace = _namespace(config, weights)
        self.embedding = weights.pop("model.embed_tokens.weight")  # [vocab, hidden]
        self.layers = [Layer.take(weights, index) for index in range(config.num_layers)]
        self.norm = weights.pop("model.norm.weight")
        # In float32 always: bfloat16 rounds a logit of 30 to steps of 0.25, and ties would decide the answer.
        self.head = weights.pop("lm_head.weight", self.embedding).float()  # [vocab, hidden]
        self._inv_freq = _inverse_frequencies(config, self.embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and so of K and V."""
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
        config = self.config
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        angles = meta.positions[:, None].float() * self._inv_freq  # [num_tokens, head_dim / 2]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        x = F.embedding(meta.token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._rms_norm(x, layer.attention_norm))
            q, k, v = qkv.view(len(x), -1, config.head_dim).split_with_sizes(heads, dim=1)
            cache.write(index, _rotate(k, cos, sin), v, meta)
            attended = cache.attend(index, _rotate(q, cos, sin), meta)
            x = x + layer.output(attended.reshape(len(x), -1))
            gate, up = layer.gate_up(self._rms_norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [n, vocab] of `hidden` [n, hidden]."""
        return F.linear(self._rms_norm(hidden.float(), self.norm), self.head)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        # In float32 whatever the dtype: the squares of bfloat16 numbers keep too few digits to be summed.
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.config.rms_norm_eps).to(x.dtype) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head's pairs (i, i + head_dim / 2) by the token's angles: x [num_tokens, heads, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _inverse_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Return the rotary angle per position of each pair: float32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_freq_factors is not None:
        frequencies = frequencies / torch.tensor(config.rope_freq_factors)
    return frequencies.to(device)


def _namespace(config: ModelConfig, weights: dict[str, Tensor]) -> bytes:
    """Name what the KV depends on: a digest of how the model computes and of every byte of its weights."""
    # Named are the fields that change no KV: one that is added later counts unless it is added here.
    computes = replace(config, name="", context_length=1, bos_token_id=None, eos_token_ids=frozenset())
    digest = hashlib.sha256(repr(computes).encode())
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.flatten().view(torch.uint8).cpu().numpy().data)
    return digest.digest()
