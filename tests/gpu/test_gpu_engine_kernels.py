"""FlashInfer's and flash-attn's own kernels over our pages, against our attention."""

from __future__ import annotations

import pytest
import torch

from pagedkv import AttentionMetadata, KVCacheSpec, PagedKVCache
from pagedkv.contrib.flash_attn import flash_attn
from pagedkv.contrib.flashinfer import FlashInferAttention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 64
LENGTHS = [(300, 300), (70, 1), (33, 5), (513, 1)]


def written(
    block_size: int,
) -> tuple[PagedKVCache, AttentionMetadata, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a cache with sequences that are cached up to their last tokens, and the step of these."""
    spec = KVCacheSpec.uniform(2, NUM_KV_HEADS, HEAD_DIM, "bfloat16", block_size)
    cache = PagedKVCache(spec, 200, device="cuda", arrangement="layer")
    seqs = [cache.open(range(1000 * i, 1000 * i + length)) for i, (length, _) in enumerate(LENGTHS)]

    def states(num_tokens: int) -> list[torch.Tensor]:
        return [
            torch.randn(num_tokens, NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        ]

    rows = [seq for seq, (length, new) in zip(seqs, LENGTHS, strict=True) if length > new]
    step = cache.reserve(rows, [length - new for length, new in LENGTHS if length > new])
    meta = cache.prepare(step)
    for layer in range(2):
        cache.write(layer, *states(meta.num_tokens), meta)
    cache.commit(step)
    step = cache.reserve(seqs, [new for _, new in LENGTHS])
    meta = cache.prepare(step)
    query = torch.randn(meta.num_tokens, NUM_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    return cache, meta, query, *states(meta.num_tokens)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("soft_cap", [None, 20.0])
def test_flashinfer_appends_and_attends(window: int | None, soft_cap: float | None) -> None:
    pytest.importorskip("flashinfer")
    cache, meta, query, key, value = written(16)
    attention = FlashInferAttention(cache, NUM_HEADS)
    attention.plan(meta, window=window, soft_cap=soft_cap)
    attention.append(1, key, value, meta)
    found = cache.pages[1][0].flatten(0, 1)[meta.slot_mapping]
    assert torch.equal(found, key)
    expected = cache.attend(1, query, meta, window=window, soft_cap=soft_cap)
    torch.testing.assert_close(attention.run(1, query), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [None, 50])
def test_flash_attn_attends(window: int | None) -> None:
    pytest.importorskip("flash_attn")
    cache, meta, query, key, value = written(256)
    cache.write(1, key, value, meta)
    expected = cache.attend(1, query, meta, window=window)
    torch.testing.assert_close(
        flash_attn(cache, 1, query, meta, window=window), expected, atol=2e-2, rtol=2e-2
    )
