"""Drawn batches: lengths, tables, options; against the definition."""

from __future__ import annotations

import torch
from cuda_shim import Shim
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import Case, Options, check

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shapes = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.sampled_from([0, 1, 15, 16, 17, 64, 65]) | st.integers(0, 80))
        queries = draw(st.sampled_from([1, 0, min(length, 20)]) | st.integers(0, min(length, 20)))
        shapes.append((length, queries if length else draw(st.integers(0, 2))))
    group = draw(st.sampled_from([1, 3, 4, 20]))
    num_kv_heads = draw(st.sampled_from([1, 2]))
    num_heads, padding = group * num_kv_heads, draw(st.sampled_from([0, 0, 3]))
    num_tokens = sum(queries for _, queries in shapes) + padding
    seed = draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    mask = None
    if (kind := draw(st.sampled_from(["none", "none", "bool", "float"]))) != "none":
        mask = torch.rand(num_tokens, 20 + draw(st.integers(0, 3)), generator=generator)
        mask = mask < 0.6 if kind == "bool" else mask.where(mask < 0.8, float("-inf"))
    options = Options(
        scale=draw(st.sampled_from([0.25, 0.1, -0.2])),
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([0, 0, 1, 5, 17, 100])),
        soft_cap=draw(st.sampled_from([0.0, 0.0, 3.0])),
        slopes=draw(st.sampled_from([None, torch.rand(num_heads, generator=generator)])),
        sinks=draw(st.sampled_from([None, torch.randn(num_heads, generator=generator)])),
        mask=mask,
    )
    dtype = draw(st.sampled_from(DTYPES))
    return Case(
        shapes,
        num_kv_heads=num_kv_heads,
        group=group,
        dim=draw(st.sampled_from([16, 24, 40])),
        dtype=dtype,
        page_dtype=draw(st.sampled_from([None, None, torch.float8_e4m3fn])),
        block_size=draw(st.sampled_from([8, 16, 32, 1, 5])),
        heads_first=draw(st.booleans()),
        padding=padding,
        garbage=draw(st.sampled_from([float("nan"), float("inf"), 6e4])),
        seed=seed,
        options=options,
    )


@settings(max_examples=60)
@given(case=cases(), seed=st.integers(0, 2**32))
def test_drawn_batches(built_shim: Shim, case: Case, seed: int) -> None:
    built_shim.seed(seed)
    check(built_shim, case)
