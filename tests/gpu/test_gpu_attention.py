"""paged_attention on a device, by every backend for it, against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_cases import Case, Options, check, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXED = [(70, 1), (33, 5), (0, 1), (40, 40), (16, 0), (530, 3), (1, 1), (1100, 200)]
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.3, -1.0, 2.0, float("-inf")])
MASK = torch.rand(10, 6, generator=torch.Generator().manual_seed(5)) < 0.5
OPTIONS = {
    "plain": Options(),
    "not causal": Options(causal=False),
    "window": Options(window=7),
    "window, not causal": Options(causal=False, window=9),
    "soft cap": Options(scale=1.0, soft_cap=2.0),
    "alibi": Options(slopes=SLOPES),
    "sinks": Options(sinks=SINKS),
    "tree": Options(causal=False, mask=MASK),
    "added mask": Options(mask=torch.linspace(-1, 1, 60).view(10, 6).where(MASK, float("-inf"))),
    "everything": Options(0.3, True, 40, 3.0, SLOPES, SINKS, torch.linspace(-1, 1, 60).view(10, 6)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(backend: Any, dtype: torch.dtype, name: str) -> None:
    shapes = [(70, 2), (0, 1), (530, 5)]
    check(backend, Case(shapes, dtype=dtype, padding=2, dim=64, options=OPTIONS[name]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 256])
def test_every_head_dim(backend: Any, dtype: torch.dtype, dim: int) -> None:
    check(backend, Case(MIXED, dim=dim, dtype=dtype))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("heads_first", [False, True])
def test_every_block_size(backend: Any, block_size: int, heads_first: bool) -> None:
    case = Case(MIXED, dim=64, dtype=torch.bfloat16, block_size=block_size, heads_first=heads_first)
    check(backend, case)


@pytest.mark.parametrize(("num_kv_heads", "group"), [(3, 3), (1, 7), (8, 4), (1, 64)])
def test_every_ratio_of_heads(backend: Any, num_kv_heads: int, group: int) -> None:
    shapes = [(70, 1), (90, 3), (120, 30)]
    check(backend, Case(shapes, num_kv_heads=num_kv_heads, group=group, dim=128, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_pages_of_eight_bits(backend: Any, dtype: torch.dtype, page_dtype: torch.dtype) -> None:
    case = Case(MIXED, dtype=dtype, page_dtype=page_dtype, dim=128)
    drawn = torch.rand(2, *case.keys.shape[:3], generator=torch.Generator().manual_seed(3)) * 0.05
    drawn[:, ~case.written] = float("nan")
    case.options.key_scales, case.options.value_scales = drawn.unbind()
    check(backend, case)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 6e4])
def test_garbage_that_nobody_sees_reaches_no_output(backend: Any, garbage: float) -> None:
    check(backend, Case(MIXED, dtype=torch.float16, garbage=garbage))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_cold_equals_warm(backend: Any, dtype: torch.dtype, dim: int) -> None:
    """One prefill, the same in chunks, and token by token: the same bits."""
    case = Case([(1300, 200)], dtype=dtype, dim=dim)
    whole, _ = run(backend, case)
    table, query = case.table, case.query
    for chunks in ([(0, 3), (3, 150), (150, 151), (151, 200)], [(i, i + 1) for i in range(200)]):
        starts = [0] + [end for _, end in chunks]
        case.table = table.expand(len(chunks), -1).contiguous()
        case.starts = torch.tensor(starts, dtype=torch.int32)
        case.lens = torch.tensor([1100 + end for _, end in chunks], dtype=torch.int32)
        assert torch.equal(run(backend, case)[0], whole)
        for (begin, end), length in zip(chunks[:4], case.lens.tolist(), strict=False):
            alone = Case([(1300, 200)], dtype=dtype, dim=dim)
            alone.query = query[begin:end]
            alone.starts = torch.tensor([0, end - begin], dtype=torch.int32)
            alone.lens = torch.tensor([length], dtype=torch.int32)
            assert torch.equal(run(backend, alone)[0], whole[begin:end])


def test_indices_beyond_two_to_the_31(backend: Any) -> None:
    free, _ = torch.cuda.mem_get_info()
    apart = 3 << 30
    if free < 4 * apart:
        pytest.skip("needs 12 GiB of free device memory")
    case = Case([(30, 2)], num_kv_heads=1, dim=16, page_dtype=torch.int8)
    expected, _ = run(backend, case)
    memory = torch.empty(3 * apart + 2 * case.keys[0].numel(), dtype=torch.int8, device="cuda")
    far = []
    for i, pages in enumerate((case.keys, case.values)):
        inner = memory[i * pages[0].numel() :]
        far.append(inner.as_strided(pages.shape, (apart, *pages.stride()[1:])))
        far[-1].copy_(pages)
    out = torch.full_like(case.query, float("nan"))
    given = list(case.arguments(out, None))
    moved = [x.cuda() if isinstance(x, torch.Tensor) else x for x in given]
    moved[1:3] = far
    backend.module.paged_attention(*moved)
    assert torch.equal(moved[6].cpu(), expected)
