"""Which part of a model each of several processes computes: its heads, its feed-forward rows, its vocabulary.

The split is Megatron's (Shoeybi et al., 2019): the first product of attention and of the feed-forward is cut
by output, the second by input, so that one sum over the processes follows each. A process holds the KV of its
own heads only. Embeddings are looked up whole by each: that costs memory, and spares a sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagedkv.errors import UsageError
from pagedkv.runner.config import ModelConfig


@dataclass(frozen=True)
class Shard:
    """The part of one process.

    Attributes
    ----------
    rank, size : int
        Which process of how many.
    config : ModelConfig
        Of the part, as if it were a model: so many heads, so many KV heads, so much of the feed-forward.
    heads, kv_heads, inner, vocab : range
        Which ones of the model's these are. The vocabulary in `config` is whole; this is the part of its
        logits that the process computes.
    """

    rank: int
    size: int
    config: ModelConfig
    heads: range
    kv_heads: range
    inner: range
    vocab: range

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> Shard:
        """Cut a model into `size` parts as even as whole heads allow; the first ranks have the larger ones.

        KV heads are dealt out with all the heads that read them. Where they are fewer than the processes,
        several processes hold the same one, and divide its heads.

        Raises
        ------
        UsageError
            There are more processes than heads.
        """
        if size > config.num_heads:
            expected = f"at most {config.num_heads} (the heads of {config.name})"
            raise UsageError(f"processes: expected {expected}, got {size}")
        group = config.num_heads // config.num_kv_heads
        if size <= config.num_kv_heads:
            kv_heads = _part(range(config.num_kv_heads), rank, size)
            heads = range(kv_heads.start * group, kv_heads.stop * group)
        else:
            holders = [
                _part(range(size), kv_head, config.num_kv_heads) for kv_head in range(config.num_kv_heads)
            ]
            kv_head = next(index for index, ranks in enumerate(holders) if rank in ranks)
            kv_heads = range(kv_head, kv_head + 1)
            heads = _part(
                range(kv_head * group, kv_head * group + group),
                rank - holders[kv_head].start,
                len(holders[kv_head]),
            )
        inner = _part(range(config.intermediate_size), rank, size)
        vocab = _part(range(config.vocab_size), rank, size)
        part = replace(config, num_heads=len(heads), num_kv_heads=len(kv_heads), intermediate_size=len(inner))
        return cls(rank, size, part, heads, kv_heads, inner, vocab)

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """Return this process's part of a whole tensor, as memory of its own."""
        layer_part = name.split(".")[-2]
        head_dim = self.config.head_dim
        if layer_part in ("q_proj", "k_proj", "v_proj"):
            heads = self.heads if layer_part == "q_proj" else self.kv_heads
            return tensor[heads.start * head_dim : heads.stop * head_dim].clone()
        if layer_part in ("gate_proj", "up_proj"):
            return tensor[self.inner.start : self.inner.stop].clone()
        if layer_part == "lm_head":
            return tensor[self.vocab.start : self.vocab.stop].clone()
        if layer_part in ("o_proj", "down_proj"):
            if name.endswith(".bias"):  # added once
                return tensor if self.rank == 0 else torch.zeros_like(tensor)
            if layer_part == "o_proj":
                return tensor[:, self.heads.start * head_dim : self.heads.stop * head_dim].clone()
            return tensor[:, self.inner.start : self.inner.stop].clone()
        return tensor


def _part(whole: range, index: int, count: int) -> range:
    """Return the `index`-th of `count` parts in order, as even as can be, the larger ones first."""
    size, larger = divmod(len(whole), count)
    begin = whole.start + index * size + min(index, larger)
    return range(begin, begin + size + (index < larger))
