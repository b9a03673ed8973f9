"""A model without training: random projections around real attention, so its answers depend on all KV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import attention_oracle
import numpy as np
import torch

import pagedkv

VOCABULARY = 24
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 6, 2, 8
WIDTH = 20
MAX_TOKENS = 256
SPEC = pagedkv.KVCacheSpec.uniform(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM)


class ToyModel:
    """Two layers: `forward` runs them over a cache in float32, `expected_logits` over tokens in float64."""

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        self.tokens = rng.normal(size=(VOCABULARY, WIDTH))
        self.places = rng.normal(size=(MAX_TOKENS, WIDTH))
        self.q = rng.normal(size=(NUM_LAYERS, WIDTH, NUM_HEADS * HEAD_DIM)) / 2
        self.k = rng.normal(size=(NUM_LAYERS, WIDTH, NUM_KV_HEADS * HEAD_DIM)) / 2
        self.v = rng.normal(size=(NUM_LAYERS, WIDTH, NUM_KV_HEADS * HEAD_DIM)) / 2
        self.o = rng.normal(size=(NUM_LAYERS, NUM_HEADS * HEAD_DIM, WIDTH)) / 4
        self.head = rng.normal(size=(WIDTH, VOCABULARY))
        self._expected: dict[tuple[int, ...], np.ndarray] = {}

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        names = ("tokens", "places", "q", "k", "v", "o", "head")
        return {name: torch.from_numpy(getattr(self, name)).float() for name in names}

    def forward(self, cache: pagedkv.PagedKVCache, meta: pagedkv.AttentionMetadata) -> torch.Tensor:
        """Logits of each sequence's last row, [num_seqs, VOCABULARY]."""
        return self.hidden(cache, meta)[meta.last_token_index] @ self.weights["head"]

    def hidden(self, cache: pagedkv.PagedKVCache, meta: pagedkv.AttentionMetadata) -> torch.Tensor:
        """Write and attend in every layer; [num_tokens, WIDTH]."""
        w = self.weights
        h = w["tokens"][meta.token_ids] + w["places"][meta.positions]
        for layer in range(NUM_LAYERS):
            q = (h @ w["q"][layer]).view(-1, NUM_HEADS, HEAD_DIM)
            k = (h @ w["k"][layer]).view(-1, NUM_KV_HEADS, HEAD_DIM)
            v = (h @ w["v"][layer]).view(-1, NUM_KV_HEADS, HEAD_DIM)
            cache.write(layer, k, v, meta)
            h = torch.tanh(h + cache.attend(layer, q, meta).flatten(1) @ w["o"][layer])
        return h

    def step(
        self,
        cache: pagedkv.PagedKVCache,
        seqs: pagedkv.Sequence | list[pagedkv.Sequence],
        num_new_tokens: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """One whole step (all uncomputed tokens by default), checked against the oracle."""
        seqs = [seqs] if isinstance(seqs, pagedkv.Sequence) else seqs
        step = cache.reserve(seqs, num_new_tokens or [seq.num_uncached_tokens for seq in seqs])
        meta = cache.prepare(step)
        logits = self.forward(cache, meta)
        self.check(logits, meta, seqs)
        cache.commit(step)
        return logits

    def check(
        self, logits: torch.Tensor, meta: pagedkv.AttentionMetadata, seqs: Iterable[pagedkv.Sequence]
    ) -> None:
        for row, seq in enumerate(seqs):
            expected = self.expected_logits(seq.token_ids.tolist()[: int(meta.seq_lens[row])])
            np.testing.assert_allclose(logits[row].numpy(), expected, atol=2e-4, err_msg=f"row {row}")

    def expected_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits after the last token, computed from nothing but the tokens."""
        key = tuple(token_ids)
        if key not in self._expected:
            h = self.tokens[list(key)] + self.places[: len(key)]
            for layer in range(NUM_LAYERS):
                q = (h @ self.q[layer]).reshape(-1, NUM_HEADS, HEAD_DIM)
                k = (h @ self.k[layer]).reshape(-1, NUM_KV_HEADS, HEAD_DIM)
                v = (h @ self.v[layer]).reshape(-1, NUM_KV_HEADS, HEAD_DIM)
                attended = attention_oracle.attend(q, k, v).reshape(len(key), -1)
                h = np.tanh(h + attended @ self.o[layer])
            self._expected[key] = h[-1] @ self.head
        return self._expected[key]

    def greedy(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The tokens that follow, without any cache."""
        tokens = list(token_ids)
        for _ in range(num_tokens):
            tokens.append(int(self.expected_logits(tokens).argmax()))
        return tokens[len(token_ids) :]
