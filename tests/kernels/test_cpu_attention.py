"""Attention by the CPU kernels is what it means, in every option and at every edge."""

from __future__ import annotations

import math
import mmap
from typing import Any

import pytest
import torch
from cpu_cases import Case, attend, attend_plainly, error_of, make_case, same_bits
from cpu_isas import _threads_as_before, isa  # noqa: F401

from pagedkv.errors import UsageError

BOUNDS = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}


def check(case: Case) -> None:
    out, lse = attend(case)
    expected, expected_lse = attend_plainly(case)
    assert error_of(out, expected) < BOUNDS[case.query.dtype]
    assert torch.equal(torch.isinf(lse), torch.isinf(expected_lse))
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-6, atol=4e-6)
    assert torch.equal((out == 0).all(-1), torch.isinf(expected_lse) | (expected == 0).all(-1))


def scales_for(case: Case) -> torch.Tensor:
    shape = case.key_pages.shape[:3]
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) * 0.05


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("head_dim", [16, 20, 64, 72, 80, 96, 112, 128, 256])
def test_every_dtype_and_head_dim(dtype: torch.dtype, head_dim: int) -> None:
    check(make_case([5, 700, 33], [1, 3, 33], dtype=dtype, head_dim=head_dim, num_padding=2))


@pytest.mark.parametrize("page_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", ["token and head", "head", "tensor", "none"])
def test_scales_of_8_bit_pages(page_dtype: torch.dtype, dtype: torch.dtype, kind: str) -> None:
    case = make_case([5, 600, 33], [1, 3, 33], dtype=dtype, page_dtype=page_dtype, head_dim=64)
    if kind == "none":
        return check(case.given(scale=1e-4))
    scales = scales_for(case)
    if kind == "tensor":
        scales = scales[0, 0, 0].expand(scales.shape)
    elif kind == "head":
        scales = scales[0, 0].expand(scales.shape)
    check(case.given(key_scales=scales, value_scales=scales.flip(2)))


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "not causal": {"causal": False},
    "window": {"window": 7},
    "window over splits": {"window": 600},
    "window, not causal": {"window": 40, "causal": False},
    "soft cap": {"soft_cap": 2.0},
    "alibi": {"alibi_slopes": torch.linspace(0.01, 0.5, 6)},
    "sinks": {"sinks": torch.linspace(-3, 8, 6)},
    "negative scale": {"scale": -0.3},
}
OPTIONS["all"] = {name: value for options in OPTIONS.values() for name, value in options.items()}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_every_option(name: str, layout: str) -> None:
    check(
        make_case(
            [5, 1300, 33, 0], [1, 9, 33, 2], num_heads=6, num_kv_heads=2, layout=layout, **OPTIONS[name]
        )
    )


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("options", [{}, {"causal": False, "window": 30, "sinks": torch.zeros(6)}])
def test_a_tree_mask(kind: str, options: dict[str, Any]) -> None:
    case = make_case([40, 530, 600], [5, 30, 40], num_heads=6, num_kv_heads=2, **options)
    generator = torch.Generator().manual_seed(3)
    seen = torch.rand(len(case.query), 41, generator=generator) > 0.5
    seen[7] = False
    added = torch.where(seen, torch.randn(seen.shape, generator=generator), -math.inf)
    check(case.given(mask=seen if kind == "bool" else added))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (7, 1), (71, 1), (8, 8), (64, 1), (32, 8)])
def test_every_ratio_of_heads(num_heads: int, num_kv_heads: int) -> None:
    check(make_case([5, 600], [1, 4], num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("block_size", [1, 7, 8, 16, 32, 64, 128])
def test_every_block_size(block_size: int) -> None:
    check(make_case([5, 600, 128], [1, 4, 128], block_size=block_size))


@pytest.mark.parametrize("seq_len", [0, 1, 15, 16, 17, 511, 512, 513, 1025])
def test_every_edge_of_pages_and_splits(seq_len: int) -> None:
    check(make_case([seq_len], [min(max(seq_len, 1), 20)], num_padding=1))


def test_all_numbers_may_be_strided() -> None:
    case = make_case([40, 530], [5, 3], num_heads=6, num_kv_heads=2)
    wide = torch.full((len(case.query), 8, 64), math.nan)
    wide[:, 1:7, 5:37] = case.query
    table = torch.full((4, case.block_table.shape[1] * 2), -1, dtype=torch.int32)
    table[::2, ::2] = case.block_table
    strided = Case(
        wide[:, 1:7, 5:37],
        case.key_pages,
        case.value_pages,
        table[::2, ::2],
        case.seq_lens.repeat_interleave(2)[::2],
        case.query_start_loc.repeat_interleave(3)[::3],
    )
    for got, want in zip(attend(strided), attend(case), strict=True):
        assert same_bits(got.contiguous(), want)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_key_reaches_no_query_in_front_of_it(bad: float) -> None:
    case = make_case([40], [40])
    clean = attend(case)
    page, slot = int(case.block_table[0, 30 // 16]), 30 % 16
    case.key_pages[page, slot] = bad
    case.value_pages[page, slot] = bad
    for got, want in zip(attend(case), clean, strict=True):
        assert same_bits(got[:30], want[:30])


def test_a_visible_nan_is_not_hidden() -> None:
    case = make_case([40, 40], [1, 1])
    case.key_pages[case.block_table[0, 0].item(), 3] = math.nan
    out, _ = attend(case)
    assert out[0].isnan().all()
    assert not out[1].isnan().any()


def test_pages_in_front_of_a_window_are_never_read() -> None:
    case = make_case([900], [2], window=30)
    want = attend(case)
    case.block_table[0, : (900 - 2 - 29) // 16] = -1
    for got, expected in zip(attend(case), want, strict=True):
        assert same_bits(got, expected)


@pytest.mark.parametrize("bad", [-1, -7, 10**6])
def test_a_bad_page_is_refused_and_nothing_written(bad: int) -> None:
    case = make_case([100, 40], [1, 1])
    case.block_table[1, 2] = bad
    with pytest.raises(UsageError, match=rf"block_table\[1\]: expected block ids .* got {bad}, in"):
        attend(case)


@pytest.mark.parametrize(("seq_len", "num_new"), [(-1, 1), (3, 4), (10**6, 1)])
def test_a_bad_length_is_refused(seq_len: int, num_new: int) -> None:
    case = make_case([100], [num_new])
    case.seq_lens[0] = seq_len
    with pytest.raises(UsageError, match=rf"seq_lens\[0\]: expected .* got {seq_len}, in paged_attention"):
        attend(case)


@pytest.mark.parametrize("starts", [[1, 2, 3], [0, 2, 1], [0, 1, 9], [0, -1, 2]])
def test_bad_offsets_are_refused(starts: list[int]) -> None:
    case = make_case([100, 40], [1, 2])
    case.query_start_loc.copy_(torch.tensor(starts))
    with pytest.raises(UsageError, match=r"query_start_loc\[\d\]: expected offsets that ascend"):
        attend(case)


@pytest.mark.parametrize(
    ("groups", "rows"),
    [
        ([[0, 3, 0, 1]], [0, 1]),
        ([[0, 2, 0, 99]], [0, 1]),
        ([[0, 2, 0, 1]], [0, 2]),
        ([[-1, 2, 0, 1]], [0, 1]),
    ],
)
def test_bad_groups_are_refused(groups: list[list[int]], rows: list[int]) -> None:
    case = make_case([100, 40], [1, 1])
    as_tensor = {"dtype": torch.int32}
    with pytest.raises(UsageError, match="prefix_"):
        attend(
            case.given(
                prefix_groups=torch.tensor(groups, **as_tensor), prefix_rows=torch.tensor(rows, **as_tensor)
            )
        )


def test_elements_beyond_two_to_the_31st() -> None:
    block_bytes = 1 << 31  # of 6, none of which is touched but the last; 0x4000 is MAP_NORESERVE
    memory = mmap.mmap(-1, 6 * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    numbers = torch.frombuffer(memory, dtype=torch.float32)
    far = torch.as_strided(numbers, (6, 16, 2, 32), (block_bytes // 4, 64, 32, 1))
    near = make_case([16], [1], poisoned=False)
    table = torch.tensor([[5]], dtype=torch.int32)
    page = int(near.block_table[0, 0])
    far[5] = near.key_pages[page]
    values = near.value_pages[page].expand(6, -1, -1, -1)
    case = Case(near.query, far, values, table, near.seq_lens, near.query_start_loc)
    assert 5 * far.stride(0) > 2**31
    for got, want in zip(attend(case), attend(near), strict=True):
        assert same_bits(got, want)
