"""A cache of the toy model, whose memory is garbage until something is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from toy_model import SPEC, VOCABULARY, ToyModel

import pagedkv
from pagedkv import PagedKVCache

MODEL = ToyModel()
PROMPT = np.random.default_rng(1).integers(0, VOCABULARY, 100).tolist()
OTHER = [(token + 1) % VOCABULARY for token in PROMPT]  # differs everywhere


def make_cache(num_blocks: int = 24, **options: Any) -> PagedKVCache:
    """A cache whose memory is garbage."""
    cache = PagedKVCache(SPEC, num_blocks, **options)
    cache.pages.blocks.fill_(float("nan"))
    return cache


def remember(cache: PagedKVCache, token_ids: list[int], **extras: Any) -> None:
    with cache.open(token_ids, **extras) as seq:
        MODEL.step(cache, seq)


def generate(cache: PagedKVCache, seq: pagedkv.Sequence, num_tokens: int) -> list[int]:
    """Greedy tokens; `step` holds each step's logits to the oracle."""
    tokens = []
    for _ in range(num_tokens):
        tokens.append(int(MODEL.step(cache, seq)[0].argmax()))
        cache.append(seq, tokens[-1])
    return tokens


def checked_cache() -> Iterator[PagedKVCache]:
    """A cache that is whole when the test has ended."""
    cache = make_cache()
    yield cache
    cache.check_integrity()
