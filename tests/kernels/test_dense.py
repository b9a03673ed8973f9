"""A decoder's products, norms, rotations and gates on the CPU, beside the same in float64."""

from __future__ import annotations

import pytest
import torch
from cpu_isas import _threads_as_before, isa  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedkv.kernels import dense
from pagedkv.runner.linear import Linear

DTYPES = [torch.float32, torch.bfloat16]
EPSILON = {torch.float32: 4e-6, torch.bfloat16: 2**-8}
"""Relative to the largest numbers that are summed: float32's sums, and the rounding of a result."""

few, sizes = st.integers(1, 9), st.integers(1, 70)
dtypes = st.sampled_from(DTYPES)


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_near(got: Tensor, expected: Tensor, scale: Tensor | float) -> None:
    """Compare with float64, up to the rounding of numbers as large as `scale`."""
    error = (got.double() - expected).abs()
    assert (error <= EPSILON[got.dtype] * scale).all(), f"{error.max()}"


@given(few, sizes, sizes, dtypes, st.sampled_from([*DTYPES, torch.int8]), dtypes, st.booleans(), sizes)
def test_product_is_that_of_float64(
    num_tokens: int,
    num_in: int,
    num_out: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    out_dtype: torch.dtype,
    has_bias: bool,
    seed: int,
) -> None:
    # A row of a wider tensor, as a part of a fused product is.
    x = values(seed, num_tokens, num_in + 3, dtype=dtype)[:, :num_in]
    weight, scales = values(seed + 1, num_out, num_in), None
    if weight_dtype == torch.int8:
        weight = (40 * weight).clamp(-127, 127).round()
        scales = values(seed + 2, num_out).abs() / 40
    weight = weight.to(weight_dtype)
    bias = values(seed + 3, num_out) if has_bias else None
    expected = x.double() @ weight.double().T
    terms = x.double().abs() @ weight.double().abs().T
    if scales is not None:
        expected, terms = expected * scales.double(), terms * scales.double()
    if bias is not None:
        expected, terms = expected + bias.double(), terms + bias.double().abs()
    got = dense.multiply(x, weight, scales=scales, bias=bias, dtype=out_dtype)
    assert_near(got, expected, terms)


@pytest.mark.parametrize("weight_dtype", [*DTYPES, torch.int8])
@pytest.mark.parametrize("num_in", [64, 77])
def test_token_s_product_has_the_same_bits_in_any_batch_on_any_number_of_threads(
    weight_dtype: torch.dtype, num_in: int
) -> None:
    x, weight = values(0, 32, num_in), (20 * values(1, 1021, num_in)).to(weight_dtype)
    torch.set_num_threads(1)

    def product(x: Tensor) -> Tensor:
        return dense.multiply(x, weight, scales=None, bias=None, dtype=torch.float32)

    alone = torch.cat([product(row[None]) for row in x])
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for num_tokens in (1, 2, 3, 4, 5, 7, 8, 32):
            assert same_bits(product(x[:num_tokens]), alone[:num_tokens])


def packed_or_skip(weight: Tensor) -> dense.PackedWeight:
    packed = dense.pack(weight)
    if packed is None:
        pytest.skip("the instruction set has no products of pairs")
    return packed


@given(st.integers(1, 30), sizes, sizes, st.booleans(), sizes)
def test_packed_product_is_that_of_float64(
    num_tokens: int, half: int, num_out: int, has_bias: bool, seed: int
) -> None:
    x = values(seed, num_tokens, 2 * half + 3, dtype=torch.bfloat16)[:, : 2 * half]
    weight, bias = values(seed + 1, num_out, 2 * half, dtype=torch.bfloat16), values(seed + 2, num_out)
    packed = packed_or_skip(weight)
    expected = x.double() @ weight.double().T + bias.double() * has_bias
    terms = x.double().abs() @ weight.double().abs().T + bias.double().abs() * has_bias
    assert_near(dense.multiply_packed(x, packed, bias if has_bias else None), expected, terms)


def test_token_s_packed_product_has_the_same_bits_in_any_batch_on_any_number_of_threads() -> None:
    x = values(0, 500, 70, dtype=torch.bfloat16)
    packed = packed_or_skip(values(1, 77, 70, dtype=torch.bfloat16))
    torch.set_num_threads(1)
    alone = torch.cat([dense.multiply_packed(row[None], packed, None) for row in x])
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for num_tokens in (*range(1, 26), 240, 241, 500):
            assert same_bits(dense.multiply_packed(x[:num_tokens], packed, None), alone[:num_tokens])


def test_what_pairs_do_not_suit_is_not_packed() -> None:
    for weight in (values(0, 5, 7, dtype=torch.bfloat16), values(0, 5, 8)):
        assert dense.pack(weight) is None
        linear = Linear(weight)
        assert linear.packed() is linear


@given(few, sizes, dtypes, st.sampled_from([1e-5, 1e-6]), sizes)
def test_norm_is_that_of_float64(
    num_rows: int, num_columns: int, dtype: torch.dtype, eps: float, seed: int
) -> None:
    x, weight = values(seed, num_rows, num_columns, dtype=dtype), values(seed + 1, num_columns)
    mean = x.double().square().mean(-1, keepdim=True)
    expected = x.double() / (mean + eps).sqrt() * weight.double()
    assert_near(dense.rms_norm(x, weight, eps), expected, expected.abs() + 1e-30)


def test_norm_of_heads_is_each_head_s_own() -> None:
    x, weight = values(0, 5, 6, 8)[:, 1:4], values(1, 8)
    heads = [dense.rms_norm(x[:, head].contiguous(), weight, 1e-5) for head in range(3)]
    assert same_bits(dense.rms_norm(x, weight, 1e-5), torch.stack(heads, 1))


@given(few, few, st.integers(1, 40), dtypes, sizes)
def test_rotation_turns_pairs_in_place_and_touches_nothing_else(
    num_tokens: int, num_heads: int, half: int, dtype: torch.dtype, seed: int
) -> None:
    whole = values(seed, num_tokens, num_heads + 2, 2 * half, dtype=dtype)
    before = whole.clone()
    angles = 100 * values(seed + 1, num_tokens, 1, half)
    cos, sin = angles.cos(), angles.sin()
    dense.rotate_(whole[:, 1:-1], cos, sin)
    first, second = before[:, 1:-1].double().chunk(2, -1)
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    size = (first.abs() + second.abs()).repeat(1, 1, 2)
    assert_near(whole[:, 1:-1], expected, size)
    for head in (0, -1):
        assert same_bits(whole[:, head], before[:, head])


@given(few, sizes, dtypes, st.sampled_from([1.0, 30.0]), sizes)
def test_gate_is_that_of_float64(
    num_rows: int, num_columns: int, dtype: torch.dtype, width: float, seed: int
) -> None:
    x = (width * values(seed, num_rows, 2 * num_columns)).to(dtype)
    gate, up = x.double().chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    # The exponent is rounded before it is taken, so large ones lose some bits.
    assert_near(dense.silu_and_multiply(x), expected, 4 * expected.abs() + 1e-24)


def test_gate_of_large_numbers_is_finite_and_nan_stays() -> None:
    x = torch.tensor([[-1e30, 1e30, 0.0, float("nan"), 1.0, 1.0, 1.0, 1.0]])
    got = dense.silu_and_multiply(x)[0]
    assert got[:3].tolist() == [0.0, pytest.approx(1e30), 0.0]
    assert got[3].isnan()


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_weights_of_8_bits_are_within_half_a_step_of_their_row(num_tokens: int) -> None:
    linear = Linear(values(0, 50, 64), values(1, 50))
    int8 = linear.in_int8()
    assert int8.scales is not None
    assert (int8.weight.float() * int8.scales[:, None] - linear.weight).abs().max() <= int8.scales.max() / 2
    x = values(2, num_tokens, 64)
    step = x.abs().sum(1, keepdim=True) * int8.scales / 2
    for product in (int8, int8.in_float32):
        assert ((product(x) - linear(x)).abs() <= step + 1e-4).all()


@pytest.mark.parametrize("num_tokens", [1, 33, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_in_float32_round_nothing(num_tokens: int, dtype: torch.dtype) -> None:
    linear = Linear(values(0, 30, 64).to(dtype))
    x = values(1, num_tokens, 64)
    got = linear.in_float32(x)
    assert got.dtype == torch.float32
    assert_near(got, x.double() @ linear.weight.double().T, x.double().abs() @ linear.weight.double().abs().T)
