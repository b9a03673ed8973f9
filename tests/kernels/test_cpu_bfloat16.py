"""bfloat16 on every instruction set: products of pairs keep what a query sees apart from the rest."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cpu_cases import Case, attend, attend_plainly, error_of, make_case, same_bits, seen_keys
from cpu_isas import _threads_as_before, isa  # noqa: F401
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

BF16 = torch.bfloat16


def with_foreign(case: Case, token: int, foreign: list[float]) -> Case:
    """Put numbers into the keys and values of the token's sequence that it does not see."""
    starts = case.query_start_loc.tolist()
    row = next(i for i in range(len(starts) - 1) if starts[i] <= token < starts[i + 1])
    seq_len = int(case.seq_lens[row])
    first_new = seq_len - (starts[row + 1] - starts[row])
    seen, _ = seen_keys(case, token, first_new + token - starts[row], first_new, seq_len)
    unseen = torch.tensor(sorted(set(range(seq_len)) - set(seen.tolist())), dtype=torch.int64)
    block_size = case.key_pages.shape[1]
    places = case.block_table[row].long()[unseen // block_size], unseen % block_size
    pages = case.key_pages.clone(), case.value_pages.clone()
    for number, tensor in zip(foreign, pages, strict=True):
        tensor[places] = torch.tensor(number).to(tensor.dtype)
    return replace(case, key_pages=pages[0], value_pages=pages[1])


MASK = torch.rand(29, 20, generator=torch.Generator().manual_seed(3)) < 0.6
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 9},
    "window, not causal": {"window": 6, "causal": False},
    "mask": {"mask": MASK, "causal": False},
    "added mask": {"mask": torch.where(MASK, 0.5, -math.inf), "causal": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (12, 1)])
@pytest.mark.parametrize(
    ("page_dtype", "foreign"),
    [
        (BF16, [math.inf, math.nan]),
        (BF16, [math.nan, -math.inf]),
        (BF16, [1e38, math.inf]),
        (torch.float8_e4m3fn, [math.nan, math.nan]),
        (torch.int8, [-128, -128]),
    ],
    ids=str,
)
def test_what_a_query_does_not_see_changes_no_bit_of_it(
    options: dict[str, Any], heads: tuple[int, int], page_dtype: torch.dtype, foreign: list[float]
) -> None:
    case = make_case(
        *([70, 530], [20, 9]),
        dtype=BF16,
        page_dtype=page_dtype,
        head_dim=64,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        **options,
    )
    right, right_lse = attend(case)
    for token in (0, 3, 8, 19, 20, 27, 28):
        out, lse = attend(with_foreign(case, token, foreign))
        assert same_bits(out[token], right[token]), token
        assert same_bits(lse[token], right_lse[token]), token


# The instruction set stays as it is between examples.
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seq_len=st.integers(1, 1100),
    num_new=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (7, 1), (16, 1)]),
    head_dim=st.sampled_from([32, 64, 96, 128, 256, 80]),
    window=st.sampled_from([0, 0, 1, 7, 513]),
    page_dtype=st.sampled_from([BF16, BF16, torch.int8, torch.float8_e4m3fn]),
    seed=st.integers(0, 99),
)
def test_a_query_alone_has_the_bits_that_it_has_among_many(
    seq_len: int,
    num_new: int,
    heads: tuple[int, int],
    head_dim: int,
    window: int,
    page_dtype: torch.dtype,
    seed: int,
) -> None:
    num_new = min(num_new, seq_len)
    case = make_case(
        [seq_len, 33],
        [num_new, 2],
        seed=seed,
        dtype=BF16,
        page_dtype=page_dtype,
        head_dim=head_dim,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        window=window,
    )
    if page_dtype != BF16:
        shape = case.key_pages.shape[:3]
        scales = 0.001 + 0.03 * torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        case = case.given(key_scales=scales, value_scales=scales.flip(0))
    torch.set_num_threads(1 + seed % 3)
    out, lse = attend(case)
    expected, _ = attend_plainly(case)
    assert error_of(out, expected) < 3e-3
    for i in {0, num_new // 2, num_new - 1}:
        alone = Case(
            case.query[i : i + 1],
            case.key_pages,
            case.value_pages,
            case.block_table[:1],
            torch.tensor([seq_len - num_new + i + 1], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32),
            case.options,
        )
        torch.set_num_threads(1)
        one, one_lse = attend(alone)
        assert same_bits(one[0], out[i])
        assert same_bits(one_lse[0], lse[i])


def test_values_of_any_size_survive() -> None:
    for factor in (1e-30, 1e-4, 1e4, 1e30):
        case = make_case([600], [3], dtype=BF16, head_dim=64)
        case = replace(case, value_pages=(case.value_pages.float() * factor).to(BF16))
        out, _ = attend(case)
        expected, _ = attend_plainly(case)
        assert ((out.double() - expected).norm() / expected.norm()).item() < 3e-3


@pytest.mark.parametrize("page_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rows", [4, 256])
def test_every_number_of_eight_bits_is_taken_exactly(page_dtype: torch.dtype, rows: int) -> None:
    """One key and its value hold all of them: a head sees one number of the key as its logit."""
    numbers = torch.arange(256).to(torch.uint8)
    pages = [torch.zeros(1, 16, 1, 256, dtype=torch.uint8) for _ in range(2)]
    pages[1][0, 0, 0] = numbers
    pages[0][0, 0, 0] = numbers
    if page_dtype.is_floating_point:
        pages[0][0, 0, 0, [0x7F, 0xFF]] = 0  # NaN would be in every logit
    keys, values = (page.view(page_dtype) for page in pages)
    num_seqs = 256 // rows
    query = torch.eye(256, dtype=BF16).view(num_seqs, rows, 256)
    tables = torch.zeros(num_seqs, 1, dtype=torch.int32), torch.ones(num_seqs, dtype=torch.int32)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32)
    out, lse = attend(Case(query, keys, values, *tables, starts, {"scale": 1.0}))
    assert torch.equal(lse.flatten(), keys[0, 0, 0].float())
    expected = values[0, 0, 0].float().expand(num_seqs, rows, 256)
    assert torch.equal(out.float().nan_to_num(1e9), expected.nan_to_num(1e9))
