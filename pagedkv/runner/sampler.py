"""From logits to the next token."""

from __future__ import annotations

import hashlib
import math
import secrets
from typing import NamedTuple

import torch
from torch import Tensor

from pagedkv.runner.sampling import SamplingParams


class Best(NamedTuple):
    """The largest of some logits, NaN if any is, and whose it is."""

    logit: float
    token_id: int


def best_of_rows(logits: Tensor) -> list[Best]:
    """Find the largest of each row of `logits` [n, vocab], in one call for all of them."""
    values, token_ids = logits.max(-1)
    return [Best(*pair) for pair in zip(values.tolist(), token_ids.tolist(), strict=True)]


class Sampler:
    """Draws the tokens of one answer.

    Each token has random numbers of its own, made from the seed and the token's place in the answer. So a
    draw depends neither on the batch nor on earlier draws, and repeating one gives the same token again.

    Parameters
    ----------
    params : SamplingParams
    sample : int
        Which of a request's answers; each has random numbers of its own.
    """

    def __init__(self, params: SamplingParams, sample: int = 0) -> None:
        self.params = params
        self._seed = secrets.randbits(63) if params.seed is None else params.seed
        self._sample = f" {sample}" if sample else ""
        self._generator = torch.Generator()

    def __call__(self, logits: Tensor, index: int, best: Best | None = None) -> int:
        """Return the `index`-th token of the answer for float32 `logits` [vocab].

        `best` is what `best_of_rows` says of them, where somebody has asked.

        Raises
        ------
        FloatingPointError
            When one of them is NaN or +inf, or all are -inf.
        """
        params = self.params
        peak, likeliest = best or best_of_rows(logits[None])[0]
        if not math.isfinite(peak):
            raise FloatingPointError(f"logits: expected finite ones, got {peak}, for token {index}")
        if params.temperature == 0:
            return likeliest
        # Hashed, because generators with neighbouring seeds begin alike.
        mixed = hashlib.sha256(f"{self._seed} {index}{self._sample}".encode()).digest()
        self._generator.manual_seed(int.from_bytes(mixed[:8], "little") >> 1)
        # Shifted before it is divided: a tiny temperature then gives -inf, never inf - inf.
        scores = ((logits - peak) / params.temperature).cpu()
        if params.min_p > 0:
            scores = scores.masked_fill(scores < math.log(params.min_p), -math.inf)
        if params.top_k == 0 and params.top_p == 1:
            return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
        scores, tokens = scores.topk(min(params.top_k or len(scores), len(scores)))
        weights = scores.softmax(-1)
        # Keep tokens until top_p is reached, the one that reaches it included.
        weights[weights.cumsum(-1) - weights >= params.top_p] = 0
        return int(tokens[torch.multinomial(weights, 1, generator=self._generator)])
