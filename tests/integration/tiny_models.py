"""Small models with random weights, and what tests do with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagedkv import PagedKVCache
from pagedkv.runner.config import ModelConfig
from pagedkv.runner.model import Model
from pagedkv.runner.weights import tensor_shapes

TINY = ModelConfig(
    name="tiny",
    vocab_size=199,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    context_length=512,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=True,
)


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Return weights under which attention matters, so that a wrong page changes the answer."""
    generator = torch.Generator().manual_seed(seed)

    def values(name: str, shape: tuple[int, ...]) -> Tensor:
        is_norm = name.endswith("norm.weight")
        return torch.ones(shape) if is_norm else 0.25 * torch.randn(shape, generator=generator)

    return {name: values(name, shape) for name, shape in tensor_shapes(config).items()}


def random_tokens(num_tokens: int, seed: int, vocab_size: int = TINY.vocab_size) -> list[int]:
    """Return a prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()


def all_logits(
    model: Model, token_ids: Sequence[int], *, chunk: int | None = None, dtype: str = "float32"
) -> Tensor:
    """Return float32 logits [num_tokens, vocab] of one sequence, computed in pages, in steps of `chunk`."""
    num_blocks = len(token_ids) // 16 + 2
    cache = PagedKVCache(model.config.kv_spec(dtype), num_blocks)
    hidden = []
    with cache.open(token_ids) as sequence:
        while sequence.num_uncached_tokens:
            step = cache.reserve([sequence], [min(chunk or len(token_ids), sequence.num_uncached_tokens)])
            hidden.append(model.forward(cache, cache.prepare(step)))
            cache.commit(step)
    return model.logits(torch.cat(hidden))
