"""What FlashInfer's and flash-attn's kernels would read and write, computed in plain torch on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import AttentionMetadata, KVCacheSpec, PagedKVCache, SpecError, StateError, UsageError
from pagedkv.contrib.flash_attn import kvcache_arguments, varlen_arguments
from pagedkv.contrib.flashinfer import (
    FlashInferAttention,
    flashinfer_tables,
    paged_kv_cache,
    window_left,
)
from pagedkv.errors import BackendUnavailableError

HEADS, KV_HEADS, DIM, LAYERS, LAYER = 6, 2, 8, 3, 1


def make_cache(block_size: int, layout: Any = "NHD", num_blocks: int = 60, **options: Any) -> PagedKVCache:
    """Return a cache whose every slot holds garbage."""
    spec = KVCacheSpec.uniform(LAYERS, KV_HEADS, DIM, "float32", block_size, layout)
    cache = PagedKVCache(spec, num_blocks, **{"arrangement": "layer", **options})
    cache.pages.blocks.fill_(float("nan"))
    return cache


def kv(tokens: Any, positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of tokens, which depend on nothing else."""
    code = (tokens * 31 + positions * 7).double()[:, None, None]
    heads = torch.arange(KV_HEADS)[:, None] * 3 + torch.arange(DIM)
    return torch.sin(code + heads).float(), torch.cos(code + heads).float()


def steps(cache: PagedKVCache, prompts: list[list[int]], chunk: int) -> Iterator[AttentionMetadata]:
    """Compute prompts side by side in chunks, and two tokens more; then once more, with what is cached.

    Every layer is written before a yield.
    """
    for _ in range(2):
        seqs = [cache.open(prompt) for prompt in prompts]
        for turn in range(3):
            if turn:
                cache.append(seqs, [[turn] for _ in seqs])
            while rows := [seq for seq in seqs if seq.num_uncached_tokens]:
                step = cache.reserve(rows, [min(chunk, seq.num_uncached_tokens) for seq in rows])
                meta = cache.prepare(step)
                for layer in range(LAYERS):
                    cache.write(layer, *kv(meta.token_ids, meta.positions), meta)
                yield meta
                cache.commit(step)
        cache.close(seqs)


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attend causally, the queries at the last positions."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
    logits = torch.einsum("qhd,khd->hqk", query, keys) * DIM**-0.5
    behind = torch.arange(len(keys)) - torch.arange(len(keys) - len(query), len(keys))[:, None]
    hidden = behind > 0
    if window is not None:
        hidden |= behind < -window_left(window)
    weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def by_csr(
    cache: PagedKVCache, query: torch.Tensor, meta: AttentionMetadata, window: int | None
) -> torch.Tensor:
    """Read as FlashInfer documents: pages by kv_indptr and kv_indices, the last one in part."""
    tables = flashinfer_tables(meta)
    pages = [x if cache.spec.layout == "NHD" else x.transpose(1, 2) for x in paged_kv_cache(cache, LAYER)]
    outs = []
    for i in range(meta.num_seqs):
        ids = tables.kv_indices[tables.kv_indptr[i] : tables.kv_indptr[i + 1]].long()
        length = (len(ids) - 1) * cache.spec.block_size + int(tables.kv_last_page_len[i])
        keys, values = (x[ids].flatten(0, 1)[:length] for x in pages)
        outs.append(attend(query[tables.qo_indptr[i] : tables.qo_indptr[i + 1]], keys, values, window))
    return torch.cat(outs)


def by_block_table(arguments: dict[str, Any]) -> torch.Tensor:
    """Read as flash-attn documents: lengths from cu_seqlens or cache_seqlens, pages by block_table."""
    pages = [arguments.get("k", arguments.get("k_cache")), arguments.get("v", arguments.get("v_cache"))]
    if "cu_seqlens_q" in arguments:
        query, starts = arguments["q"], arguments["cu_seqlens_q"]
        lens = arguments["cu_seqlens_k"].diff()
        assert arguments["max_seqlen_k"] == lens.max()
        assert arguments["max_seqlen_q"] == starts.diff().max()
    else:
        query, lens = arguments["q"].flatten(0, 1), arguments["cache_seqlens"]
        starts = torch.arange(len(lens) + 1) * arguments["q"].shape[1]
    left = arguments["window_size"][0]
    outs = []
    for i, length in enumerate(lens.tolist()):
        num_blocks = -(-length // pages[0].shape[1])
        ids = arguments["block_table"][i, :num_blocks].long()
        keys, values = (x[ids].flatten(0, 1)[:length] for x in pages)
        window = None if left < 0 else left + 1
        outs.append(attend(query[starts[i] : starts[i + 1]], keys, values, window))
    return torch.cat(outs)


PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4)


@given(PROMPTS, st.integers(1, 40), st.sampled_from(["NHD", "HND"]), st.sampled_from([None, 1, 7]))
def test_what_flashinfer_reads_is_what_our_attention_reads(
    prompts: list[list[int]], chunk: int, layout: str, window: int | None
) -> None:
    cache = make_cache(4, layout)
    for meta in steps(cache, prompts, chunk):
        query = torch.randn(meta.num_tokens, HEADS, DIM)
        expected = cache.attend(LAYER, query, meta, window=window)
        torch.testing.assert_close(by_csr(cache, query, meta, window), expected, atol=1e-5, rtol=1e-5)


@given(PROMPTS, st.integers(1, 40), st.sampled_from(["NHD", "HND"]))
def test_what_flashinfer_appends_is_what_write_stores(
    prompts: list[list[int]], chunk: int, layout: str
) -> None:
    """Every slot that append would write is one of the step's own, and no other is."""
    cache = make_cache(4, layout)
    for meta in steps(cache, prompts, chunk):
        tables = flashinfer_tables(meta)
        page = tables.kv_indices[tables.kv_indptr[tables.batch_indices.long()] + tables.positions // 4]
        slots = page * 4 + tables.positions % 4
        assert torch.equal(slots.long(), meta.slot_mapping[meta.slot_mapping >= 0])
        key, _ = kv(meta.token_ids, meta.positions)
        stored = cache.pages[LAYER][0].flatten(0, 1)[slots.long()]
        assert torch.equal(stored, key[tables.rows])


@given(PROMPTS, st.integers(1, 40), st.sampled_from([None, 1, 7]))
def test_what_flash_attn_reads_is_what_our_attention_reads(
    prompts: list[list[int]], chunk: int, window: int | None
) -> None:
    cache = make_cache(256, num_blocks=12)
    # Long enough for two blocks, and a tail that others share.
    prompts = [[1] * 250 + prompt for prompt in prompts]
    for meta in steps(cache, prompts, chunk + 240):
        query = torch.randn(meta.num_tokens, HEADS, DIM)
        expected = cache.attend(LAYER, query, meta, window=window)
        arguments = varlen_arguments(cache, LAYER, query, meta, window=window)
        torch.testing.assert_close(by_block_table(arguments), expected, atol=1e-5, rtol=1e-5)
        if meta.num_tokens == meta.num_seqs * meta.max_query_len:
            arguments = kvcache_arguments(cache, LAYER, query, meta, window=window)
            torch.testing.assert_close(by_block_table(arguments), expected, atol=1e-5, rtol=1e-5)


def test_pages_of_a_layer_are_dense_as_the_kernels_want_them() -> None:
    for layout in ("NHD", "HND"):
        assert all(pages.is_contiguous() for pages in paged_kv_cache(make_cache(16, layout), LAYER))
    assert all(pages.is_contiguous() for pages in make_cache(256).pages[LAYER])


def test_pages_that_kernels_cannot_read_are_refused() -> None:
    cache = make_cache(16, arrangement="block")
    with pytest.raises(SpecError, match='arrangement="layer"'):
        paged_kv_cache(cache, 0)
    with pytest.raises(SpecError, match='arrangement="layer"'):
        FlashInferAttention(cache, HEADS)
    for meta in steps(make_cache(16), [[1, 2]], 2):
        with pytest.raises(SpecError, match="a multiple of 256"):
            varlen_arguments(make_cache(16), 0, torch.zeros(2, HEADS, DIM), meta)
        break


def test_rows_of_several_lengths_are_refused_by_kvcache_arguments() -> None:
    cache = make_cache(256)
    for meta in steps(cache, [[1, 2, 3], [4]], 9):
        with pytest.raises(UsageError, match=r"as many new tokens of each row, got \[3, 1\]"):
            kvcache_arguments(cache, 0, torch.zeros(4, HEADS, DIM), meta)
        break


def test_tables_of_a_step_that_has_ended_are_refused() -> None:
    cache, query = make_cache(256), torch.zeros(3, HEADS, DIM)
    *_, meta = steps(cache, [[1, 2, 3]], 9)
    with pytest.raises(StateError, match="committed"):
        varlen_arguments(cache, 0, query, meta)
    with pytest.raises(UsageError, match="those of another"):
        varlen_arguments(make_cache(256), 0, query, meta)


def test_a_missing_package_is_named() -> None:
    pytest.importorskip("torch")
    try:
        import flashinfer  # noqa: F401
    except ImportError:
        with pytest.raises(BackendUnavailableError, match="pip install flashinfer-python"):
            FlashInferAttention(make_cache(16), HEADS)
