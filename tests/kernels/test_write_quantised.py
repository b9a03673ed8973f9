"""write_kv into pages of 8 bits: the nearest number there is, by a scale that is given or computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from backends import on_every_backend
from guarded import Guards

from pagedkv.ops import write_kv

NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_DIM = 3, 16, 2, 24
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def e4m3_numbers() -> np.ndarray:
    """Every number of float8_e4m3fn, by its bits from 0 to 0x7E: sign 0, 4 of exponent, 3 of mantissa."""
    numbers = []
    for bits in range(0x7F):
        exponent, mantissa = bits >> 3, bits & 7
        numbers.append(mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.array(numbers)


def nearest(x: np.ndarray, page_dtype: str) -> np.ndarray:
    """The stored number nearest to each x, of two the one with an even last bit."""
    if page_dtype == "int8":
        return np.clip(np.round(x), -127, 127)
    numbers = e4m3_numbers()
    distance = np.abs(np.abs(x)[..., None] - numbers)
    least = distance.min(-1, keepdims=True)
    candidates = distance == least
    even = candidates & (np.arange(len(numbers)) % 2 == 0)
    chosen = np.where(even.any(-1), even.argmax(-1), candidates.argmax(-1))
    return np.sign(x) * numbers[chosen]


def tokens(dtype: torch.dtype, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    drawn = rng.normal(size=(12, NUM_HEADS, HEAD_DIM)) * np.exp(rng.normal(size=(12, NUM_HEADS, 1)) * 3)
    drawn[3] = 0  # a head of zeros
    drawn[4, 0, :8] = [0.5, 1.5, 2.5, -0.5, 17.0, 19.0, 0.0, 1e3]  # halves, and what is cut off
    return torch.from_numpy(drawn).to(dtype)


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("scales", [None, "tensor", "head", "token_head"])
def test_what_is_stored_is_nearest(
    scales: str | None, page_dtype: str, dtype: torch.dtype, backend: str
) -> None:
    guards = Guards()
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_DIM)
    empty = torch.zeros(shape, dtype=getattr(torch, page_dtype))
    kv = [guards.copy("pages", empty) for _ in range(2)]
    rng = np.random.default_rng(1)
    sizes: dict[str | None, Any] = {"tensor": (), "head": (NUM_HEADS,), "token_head": shape[:3]}
    given = (
        [None, None]
        if scales is None
        else [
            guards.copy("scales", torch.from_numpy(rng.uniform(0.3, 2, sizes[scales])).float())
            for _ in range(2)
        ]
    )
    before = [None if scale is None else scale.clone() for scale in given]
    slots = torch.tensor([47, 3, -1, 16, 17, 0, 5, 30, 31, 32, -1, 8])
    both = [tokens(dtype, 5), tokens(dtype, 6)]
    key_scales, value_scales = given
    write_kv(*both, *kv, slots, key_scales=key_scales, value_scales=value_scales, backend=backend)  # type: ignore[arg-type]
    guards.check()
    written = {int(slot) for slot in slots if slot >= 0}
    for stored, x, scale, was in zip(kv, both, given, before, strict=True):
        flat = stored.flatten(0, 1).float().numpy()
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            numbers = x[token].float().numpy()
            if scales == "token_head":
                assert scale is not None
                factor = np.abs(numbers).max(-1) / np.float32(LARGEST[page_dtype])
                assert scale.flatten(0, 1)[slot].numpy().tolist() == factor.tolist()
            else:
                factor = np.broadcast_to(1.0 if scale is None else scale.numpy(), NUM_HEADS).astype(
                    np.float32
                )
            with np.errstate(invalid="ignore", divide="ignore"):
                divided = np.where(factor[:, None] == 0, np.float32(0), numbers / factor[:, None])
            want = nearest(divided.astype(np.float64), page_dtype)
            np.testing.assert_array_equal(flat[slot].astype(np.float64), want)
        untouched = [slot for slot in range(NUM_BLOCKS * BLOCK_SIZE) if slot not in written]
        assert (flat[untouched] == 0).all()
        if scales == "token_head":
            assert scale is not None
            assert was is not None
            assert torch.equal(scale.flatten(0, 1)[untouched], was.flatten(0, 1)[untouched])
        elif scale is not None:
            assert torch.equal(scale, was)


@on_every_backend
@pytest.mark.parametrize("page_dtype", [torch.int8, torch.float8_e4m3fn])
def test_tokens_of_8_bits_are_stored_as_they_are(page_dtype: torch.dtype, backend: str) -> None:
    bits = torch.randint(0, 255, (2, 20, NUM_HEADS, HEAD_DIM), dtype=torch.uint8)
    key, value = bits.view(page_dtype)
    kv = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_DIM, dtype=torch.uint8).view(page_dtype)
    scale = torch.tensor(3.0)
    slots = torch.arange(10, 30)
    write_kv(key, value, *kv, slots, key_scales=scale, value_scales=scale, backend=backend)  # type: ignore[arg-type]
    for stored, given in zip(kv, bits, strict=True):
        assert torch.equal(stored.view(torch.uint8).flatten(0, 1)[slots], given)


@on_every_backend
def test_every_number_of_float8_stays_itself(backend: str) -> None:
    numbers = torch.from_numpy(np.concatenate([e4m3_numbers(), -e4m3_numbers(), [449.0, 1e9]])).float()
    key = numbers.view(1, 1, -1)
    kv = torch.zeros(2, 1, 16, 1, key.shape[-1], dtype=torch.uint8).view(torch.float8_e4m3fn)
    write_kv(key, -key, *kv, torch.tensor([7]), backend=backend)  # type: ignore[arg-type]
    want = numbers.clamp(-448, 448)
    assert torch.equal(kv[0, 0, 7, 0].float(), want)
    assert torch.equal(kv[1, 0, 7, 0].float(), -want)


@on_every_backend
@pytest.mark.parametrize("block_size", [1, 2])
def test_a_scale_for_each_head_is_given_whatever_the_size_of_a_block(block_size: int, backend: str) -> None:
    pages = [torch.zeros(4, block_size, NUM_HEADS, HEAD_DIM, dtype=torch.int8) for _ in range(2)]
    scales = torch.tensor([0.5, 0.25])
    key = torch.full((1, NUM_HEADS, HEAD_DIM), 3.0)
    write_kv(key, key, *pages, torch.tensor([0]), key_scales=scales, value_scales=scales, backend=backend)
    assert scales.tolist() == [0.5, 0.25]
    assert pages[0][0, 0, :, 0].tolist() == [6, 12]
