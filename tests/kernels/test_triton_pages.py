"""The other operations in Triton: tokens into pages, blocks moved, states merged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton_cases import DEVICE, LARGEST, backend, tl, triton

from pagedkv.kernels.triton.numbers import e4m3_to_float16, float32_to_e4m3, narrow

EIGHT_BITS = [torch.float8_e4m3fn, torch.int8]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.dtype.itemsize]).cpu()


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype).to(DEVICE)


# ---------------------------------------------------------------------------------------------- numbers


@triton.jit
def _read_e4m3(source, target):
    at = tl.arange(0, 256)
    tl.store(target + at, e4m3_to_float16(tl.load(source + at)))


@triton.jit
def _write_e4m3(source, target, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at, float32_to_e4m3(tl.load(source + at)))


@triton.jit
def _narrow(source, target, SIZE: tl.constexpr, INTERPRET: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at, narrow(tl.load(source + at), tl.bfloat16, INTERPRET))


def test_every_e4m3_byte_is_read_right() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    read = torch.empty(256, dtype=torch.float16, device=DEVICE)
    _read_e4m3[(1,)](codes, read)
    right = codes.view(torch.float8_e4m3fn).to(torch.float16)
    torch.testing.assert_close(read, right, rtol=0, atol=0, equal_nan=True)


def test_numbers_are_rounded_to_e4m3_as_torch_rounds_them() -> None:
    grid = torch.arange(256, dtype=torch.uint8)[:127].view(torch.float8_e4m3fn).float()
    middles = (grid[1:] + grid[:-1]) / 2  # ties
    near = [torch.nextafter(middles, torch.full((), side)) for side in (0.0, 1e9)]
    special = torch.tensor([500.0, torch.inf, 1e-30, 0.0, 447.9])
    numbers = torch.cat([grid, middles, *near, special])
    numbers = torch.cat([numbers, -numbers, torch.tensor([torch.nan])])
    padded = torch.zeros(2048)
    padded[: len(numbers)] = numbers
    written = torch.empty(2048, dtype=torch.uint8, device=DEVICE)
    _write_e4m3[(1,)](padded.to(DEVICE), written, 2048)
    right = padded.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(written.cpu(), right)


def test_bfloat16_is_rounded_to_nearest() -> None:
    numbers = torch.randn(1024, generator=torch.Generator().manual_seed(0)) * 100
    numbers[:3] = torch.tensor([1.00390625, 1.01171875, torch.inf])  # two ties
    rounded = torch.empty(1024, dtype=torch.bfloat16, device=DEVICE)
    _narrow[(1,)](numbers.to(DEVICE), rounded, 1024, DEVICE == "cpu")
    assert torch.equal(rounded.cpu(), numbers.to(torch.bfloat16))


# --------------------------------------------------------------------------------------------- write_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, *EIGHT_BITS])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_tokens_are_written_to_their_slots_and_nowhere_else(dtype: torch.dtype, order: str) -> None:
    shape = (6, 16, 3, 24) if order == "NHD" else (6, 3, 16, 24)
    storage = (draw(2, *shape, seed=1) * 20).to(dtype)
    pages = storage if order == "NHD" else storage.transpose(2, 3)
    before = [page.clone() for page in pages]
    tokens = (draw(2, 5, 6, 24) * 20).to(dtype)[:, :, ::2]
    slots = torch.tensor([17, -1, 95, 0, 2**40], device=DEVICE)
    backend.write_kv(*tokens, *pages, slots, None, None)
    for token, right, page in zip(tokens, before, pages, strict=True):
        for i, slot in ((0, 17), (2, 95), (3, 0)):
            right.view(torch.uint8)[slot // 16, slot % 16] = token[i].contiguous().view(torch.uint8)
        assert torch.equal(bits(page), bits(right))


@pytest.mark.parametrize("page_dtype", EIGHT_BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scales", ["none", "given", "computed"])
def test_tokens_are_quantised_by_their_scales(
    page_dtype: torch.dtype, dtype: torch.dtype, scales: str
) -> None:
    largest = LARGEST[page_dtype]
    pages = torch.zeros(2, 4, 8, 3, 80, device=DEVICE).to(page_dtype)
    tokens = draw(2, 6, 3, 80, dtype=dtype) * 300
    tokens[0, 2, 1] = 0  # a token of zeros has a scale of 0
    slots = torch.tensor([9, 31, -1, 0, 8, 3], device=DEVICE)
    slots[2] = 20
    both: list[Any] = [None, None]
    if scales == "given":
        both = [torch.tensor(x, device=DEVICE).expand(4, 8, 3) for x in ([0.5, 3.0, 9.0], [1.0, 2.0, 1e9])]
    elif scales == "computed":
        both = [torch.full((4, 8, 3), -1.0, device=DEVICE) for _ in "kv"]
    backend.write_kv(*tokens, *pages, slots, *both)
    for token, page, scale in zip(tokens.float(), pages, both, strict=True):
        for i, slot in enumerate(slots.tolist()):
            factor = torch.ones(3, device=DEVICE)
            if scale is not None:
                factor = scale[slot // 8, slot % 8]
            if scales == "computed":
                assert torch.equal(factor, token[i].abs().amax(-1) / largest)
            x = torch.where(factor[:, None] == 0, 0, token[i] / factor[:, None]).clamp(-largest, largest)
            right = (x.round() if page_dtype == torch.int8 else x).to(page_dtype)
            assert torch.equal(bits(page[slot // 8, slot % 8]), bits(right))
        if scales == "computed":
            assert int((scale != -1).sum()) == 6 * 3


def test_one_scale_may_be_given_and_the_other_computed() -> None:
    pages = torch.zeros(2, 2, 8, 1, 16, dtype=torch.int8, device=DEVICE)
    computed = torch.zeros(2, 8, 1, device=DEVICE)
    tokens = draw(2, 1, 1, 16)
    backend.write_kv(*tokens, *pages, torch.tensor([3], device=DEVICE), None, computed)
    assert torch.equal(pages[0, 0, 3, 0].float(), tokens[0, 0, 0].round())
    assert computed[0, 3, 0] == tokens[1].abs().max() / 127


# ----------------------------------------------------------------------------------------------- blocks


def strided(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> torch.Tensor:
    number = torch.from_numpy(np.random.default_rng(3).integers(0, 100, 2 * int(np.prod(shape))))
    if kind == "dense":
        return number[: len(number) // 2].to(dtype).to(DEVICE).reshape(shape).clone()
    if kind == "permuted":  # another dimension comes first in memory
        order = [*range(1, len(shape)), 0]
        small = number[: len(number) // 2].to(dtype).to(DEVICE).reshape([shape[i] for i in order]).clone()
        return small.permute([order.index(i) for i in range(len(shape))])
    return number.to(dtype).to(DEVICE).reshape(*shape[:-1], 2 * shape[-1])[..., ::2]


@pytest.mark.parametrize("kind", ["dense", "permuted", "every other"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((7, 3, 2, 4, 5), torch.float16),
        ((7,), torch.int64),
        ((7, 56), torch.uint8),
        ((7, 2, 1, 2, 1, 2, 3, 2, 2), torch.float32),
        ((7, 5000), torch.bfloat16),
        ((7, 6), torch.complex64),
        ((7, 3), torch.complex128),
        ((7, 3), torch.bool),
        ((7, 10), torch.float8_e4m3fn),
    ],
)
def test_blocks_move_bit_by_bit(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    blocks = strided(shape, dtype, kind)
    before = blocks.cpu().clone()
    ids = torch.tensor([4, 0, 6], device=DEVICE)
    buffer = strided((3, *shape[1:]), dtype, kind)
    backend.gather_blocks(blocks, ids, buffer)
    assert torch.equal(_plain(buffer), _plain(before)[[4, 0, 6]])
    assert torch.equal(_plain(blocks), _plain(before))
    backend.scatter_blocks(buffer, torch.tensor([1, 2, 3], device=DEVICE), blocks)
    right = _plain(before).clone()
    right[[1, 2, 3]] = right[[4, 0, 6]]
    assert torch.equal(_plain(blocks), right)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.cpu()
    return tensor.contiguous().view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def test_every_source_is_read_before_a_destination_is_written() -> None:
    blocks = draw(4, 6, 5)
    before = blocks.clone()
    rotate = torch.tensor([[0, 1, 2], [1, 2, 0]], device=DEVICE)
    backend.copy_blocks(blocks, *rotate)
    assert torch.equal(blocks, before[[2, 0, 1, 3]])
    backend.copy_blocks(blocks, rotate[0, :0], rotate[0, :0])
    assert torch.equal(blocks, before[[2, 0, 1, 3]])


def test_blocks_that_there_are_not_are_skipped() -> None:
    blocks = draw(4, 6)
    before = blocks.clone()
    backend.scatter_blocks(draw(3, 6, seed=1), torch.tensor([-1, 4, 2**40], device=DEVICE), blocks)
    assert torch.equal(blocks, before)


# ---------------------------------------------------------------------------------------------- merging


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_merged_states_are_those_of_all_keys(dtype: torch.dtype) -> None:
    outs, lses = draw(3, 5, 7, 80, dtype=dtype), draw(3, 5, 7, seed=1) * 5
    lses[1, 2] = -torch.inf
    outs[1, 2] = torch.nan  # left out, whatever it holds
    lses[:, 4, 6] = -torch.inf
    lses[0, 0], lses[1, 0] = 200.0, -200.0
    out = torch.full((5, 14, 80), torch.nan, dtype=dtype, device=DEVICE)[:, ::2]
    lse = torch.full((5, 7), torch.nan, device=DEVICE)
    backend.merge_attention_states(outs, lses, out, lse)
    total = torch.logsumexp(lses.double(), 0)
    weights = torch.where(lses == -torch.inf, 0, (lses.double() - total).exp())
    right = (torch.where(weights == 0, 0, weights)[..., None] * torch.nan_to_num(outs.double())).sum(0)
    torch.testing.assert_close(lse.double(), total, rtol=1e-6, atol=1e-6)
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(out.double(), right, rtol=bound, atol=bound)
    assert not out[4, 6].any()
    again = torch.empty_like(out)
    backend.merge_attention_states(outs, lses, again, None)
    assert torch.equal(out, again)


def test_merging_one_state_gives_it_back() -> None:
    outs, lses = draw(1, 3, 2, 16), draw(1, 3, 2, seed=1)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    backend.merge_attention_states(outs, lses, out, lse)
    assert torch.equal(out, outs[0])
    assert torch.equal(lse, lses[0])
