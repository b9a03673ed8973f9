"""An engine that brings its own attention: FlashInfer and flash-attn read our pages.

    python examples/06_flashinfer.py

With a GPU and the packages flashinfer-python or flash-attn the kernels run, and are compared with ours.
Without, the calls are shown with what they would be given.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from pagedkv import AttentionMetadata, KVCacheSpec, PagedKVCache
from pagedkv.contrib.flash_attn import flash_attn, varlen_arguments
from pagedkv.contrib.flashinfer import FlashInferAttention, flashinfer_tables, paged_kv_cache

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 8, 2, 64
PROMPTS = [list(range(300)), list(range(290)) + [7] * 30, list(range(1000, 1100))]


def make_cache(block_size: int, device: str, dtype: str) -> PagedKVCache:
    """Make pages that such kernels can read: one dense tensor of K and one of V for each layer."""
    spec = KVCacheSpec.uniform(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, dtype, block_size)
    return PagedKVCache(spec, num_blocks=64, device=device, arrangement="layer")


def states(num_tokens: int, num_heads: int, cache: PagedKVCache) -> torch.Tensor:
    """Stand in for a model's projections."""
    return torch.randn(num_tokens, num_heads, HEAD_DIM, device=cache.device, dtype=cache.pages.blocks.dtype)


def prefill(cache: PagedKVCache) -> AttentionMetadata:
    """Compute the prompts one by one, the second from what the first has left; return a step of all three."""
    for prompt in PROMPTS:
        seq = cache.open(prompt)
        meta = cache.prepare(cache.reserve([seq], [seq.num_uncached_tokens]))
        for layer in range(NUM_LAYERS):
            cache.write(layer, *(states(meta.num_tokens, NUM_KV_HEADS, cache) for _ in "kv"), meta)
        print(f"  {seq.num_cached_tokens} of {seq.num_tokens} tokens cached")
        cache.commit(meta.step)
        cache.close(seq)
    # A batch of all three: everything but the last token of each is cached.
    seqs = [cache.open(prompt) for prompt in PROMPTS]
    return cache.prepare(cache.reserve(seqs, [seq.num_uncached_tokens for seq in seqs]))


def show(name: str, arguments: dict[str, Any]) -> None:
    """Print what a kernel would be given."""
    print(f"  {name}(")
    for key, value in arguments.items():
        tensor = isinstance(value, torch.Tensor)
        print(f"    {key}={f'{str(value.dtype)[6:]} {list(value.shape)}' if tensor else value},")
    print("  )")


def with_flashinfer(device: str, dtype: str) -> None:
    """Append, plan and run."""
    cache = make_cache(16, device, dtype)
    meta = prefill(cache)
    query = states(meta.num_tokens, NUM_HEADS, cache)
    key, value = (states(meta.num_tokens, NUM_KV_HEADS, cache) for _ in "kv")
    if device == "cpu" or find_spec("flashinfer") is None:
        tables = flashinfer_tables(meta)
        show(
            "append_paged_kv_cache", {name: getattr(tables, name) for name in ("batch_indices", "positions")}
        )
        plan = {
            name: getattr(tables, name)
            for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
        }
        show("BatchPrefillWithPagedKVCacheWrapper.plan", plan)
        show("BatchPrefillWithPagedKVCacheWrapper.run", {"q": query, "k": paged_kv_cache(cache, 0)[0]})
        return
    attention = FlashInferAttention(cache, NUM_HEADS)
    attention.plan(meta)
    for layer in range(NUM_LAYERS):
        attention.append(layer, key, value, meta)
        out = attention.run(layer, query)
        difference = (out - cache.attend(layer, query, meta)).abs().max()
        print(f"  layer {layer}: differs from ours by {difference:.1e}")


def with_flash_attn(device: str, dtype: str) -> None:
    """Write and attend."""
    cache = make_cache(256, device, dtype)
    meta = prefill(cache)
    query = states(meta.num_tokens, NUM_HEADS, cache)
    if device == "cpu" or find_spec("flash_attn") is None:
        show("flash_attn_varlen_func", varlen_arguments(cache, 0, query, meta))
        return
    for layer in range(NUM_LAYERS):
        cache.write(layer, *(states(meta.num_tokens, NUM_KV_HEADS, cache) for _ in "kv"), meta)
        out = flash_attn(cache, layer, query, meta)
        difference = (out - cache.attend(layer, query, meta)).abs().max()
        print(f"  layer {layer}: differs from ours by {difference:.1e}")


def main() -> None:
    """Show both."""
    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    if device == "cpu":
        print("No GPU here: the kernels need one, so their arguments are shown.")
    print("FlashInfer")
    with_flashinfer(device, dtype)
    print("flash-attn")
    with_flash_attn(device, dtype)


if __name__ == "__main__":
    main()
