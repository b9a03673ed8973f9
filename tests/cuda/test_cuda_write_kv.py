"""write_kv of csrc/cuda, run on the host."""

from __future__ import annotations

import pytest
import torch
from cuda_shim import Shim

from pagedkv.kernels.cuda import calls

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
Pages = tuple[torch.Tensor, torch.Tensor]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def make_pages(dtype: torch.dtype, dim: int, heads_first: bool = False) -> Pages:
    """Five pages of 16 tokens and 3 heads, full of a pattern; K and V in one storage, as a pool has them."""
    inner = (3, 16) if heads_first else (16, 3)
    storage = torch.zeros(5, 2, *inner, dim, dtype=dtype)
    bits(storage).fill_(1)
    if heads_first:
        storage = storage.transpose(2, 3)
    return storage[:, 0], storage[:, 1]


SLOTS = torch.tensor([17, -1, 3, 79, 40, 16, -1])


def draw(dtype: torch.dtype, dim: int) -> Pages:
    drawn = torch.randn(2, len(SLOTS), 3, dim, generator=torch.Generator().manual_seed(dim))
    drawn[0, 0, 1] = 0  # a row without a scale
    return drawn[0].to(dtype), (drawn[1] * 7).to(dtype)


@pytest.mark.parametrize("dim", [16, 64, 80, 33, 256])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str
)
def test_rows_of_the_same_dtype_are_copied(
    shim: Shim, dtype: torch.dtype, heads_first: bool, dim: int
) -> None:
    pages, expected = make_pages(dtype, dim, heads_first), make_pages(dtype, dim, heads_first)
    tokens = draw(dtype, dim)
    calls.write_kv(shim, *tokens, *pages, SLOTS, None, None)
    for side in range(2):
        for token, slot in enumerate(SLOTS.tolist()):
            if slot >= 0:
                bits(expected[side])[slot // 16, slot % 16] = bits(tokens[side])[token]
        assert torch.equal(bits(pages[side]), bits(expected[side]))


@pytest.mark.parametrize("dim", [16, 80, 33, 256])
@pytest.mark.parametrize("token_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("scales", ["none", "one", "by head", "computed"])
def test_tokens_are_quantised(
    shim: Shim, token_dtype: torch.dtype, page_dtype: torch.dtype, scales: str, dim: int
) -> None:
    pages, expected = make_pages(page_dtype, dim), make_pages(page_dtype, dim)
    tokens = draw(token_dtype, dim)
    largest = LARGEST[page_dtype]
    given: list[torch.Tensor | None] = [None, None]
    if scales == "computed":
        given = [torch.full((5, 16, 3), 9.0) for _ in range(2)]
    elif scales != "none":
        one = torch.tensor([0.013, 0.0, 0.4]) if scales == "by head" else torch.tensor(0.02)
        given = [one.expand(5, 16, 3), (one * 3).expand(5, 16, 3)]
    calls.write_kv(shim, *tokens, *pages, SLOTS, *given)
    for side in range(2):
        expected_scales = torch.full((5, 16, 3), 9.0)
        for token, slot in enumerate(SLOTS.tolist()):
            if slot < 0:
                continue
            x = tokens[side][token].float()
            if scales == "computed":
                scale = x.abs().amax(-1) / largest
                expected_scales[slot // 16, slot % 16] = scale
            else:
                scale = torch.ones(3) if given[side] is None else given[side][slot // 16, slot % 16]
            x = torch.where(scale[:, None] == 0, 0, x / scale[:, None]).clamp(-largest, largest)
            x = x.round() if page_dtype == torch.int8 else x
            bits(expected[side])[slot // 16, slot % 16] = bits(x.to(page_dtype))
        assert torch.equal(bits(pages[side]), bits(expected[side]))
        if scales == "computed":
            assert torch.equal(given[side], expected_scales)


def test_every_float16_becomes_the_float8_that_torch_makes_of_it(shim: Shim) -> None:
    """All 65,536 of them, NaN, infinities and ties included; and back, exactly, in attention's own way."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).view(-1, 1, 256)
    pages = [torch.zeros(16, 16, 1, 256, dtype=torch.float8_e4m3fn) for _ in range(2)]
    calls.write_kv(shim, numbers, numbers, *pages, torch.arange(256), None, None)
    expected = numbers.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    got = pages[0].view(-1, 1, 256)
    is_number = ~numbers.isnan()
    assert torch.equal(got.view(torch.uint8)[is_number], expected.view(torch.uint8)[is_number])
    assert got.float()[~is_number].isnan().all()


def test_slots_out_of_range_are_skipped(shim: Shim) -> None:
    pages, before = make_pages(torch.float32, 16), make_pages(torch.float32, 16)
    tokens = draw(torch.float32, 16)
    calls.write_kv(
        shim, *tokens, *pages, torch.tensor([80, -2, 10**12, -1, -(10**12), 81, 2**40]), None, None
    )
    assert torch.equal(torch.stack(pages), torch.stack(before))
