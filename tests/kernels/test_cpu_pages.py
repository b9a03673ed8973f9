"""Writing, copying and merging by the CPU kernels."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_cases import same_bits
from cpu_isas import _threads_as_before, isa  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.errors import UsageError
from pagedkv.kernels import cpu

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def make_pages(dtype: torch.dtype, num_kv_heads: int = 3, head_dim: int = 20) -> torch.Tensor:
    # A margin on every side, which must stay as it is.
    room = torch.full((7, 10, num_kv_heads + 2, head_dim + 2), 1.5).to(dtype)
    return room[1:6, 1:9, 1:-1, 1:-1]


@pytest.mark.parametrize("head_dim", [16, 20, 64])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_tokens_go_to_their_slots_and_nowhere_else(
    head_dim: int, dtype: torch.dtype, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    key, value = (torch.randn(6, 3, head_dim).to(dtype) for _ in range(2))
    slots = torch.tensor([5, -1, 39, 0, -1, 17])
    pages = [make_pages(dtype, head_dim=head_dim) for _ in range(2)]
    expected = [page._base.clone() for page in pages]  # type: ignore[union-attr]
    for room, tokens in zip(expected, (key, value), strict=True):
        view = room[1:6, 1:9, 1:-1, 1:-1]
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                view[slot // 8, slot % 8] = tokens[token]
    cpu.write_kv(key, value, *pages, slots, None, None)
    for page, room in zip(pages, expected, strict=True):
        assert page._base is not None
        assert same_bits(page._base, room)


@pytest.mark.parametrize("page_dtype", LARGEST)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("computed", [True, False])
def test_numbers_are_divided_rounded_and_saturated(
    page_dtype: torch.dtype, dtype: torch.dtype, computed: bool
) -> None:
    key = torch.randn(5, 3, 20).to(dtype) * 10
    key[1, 0] = 0
    key[2] *= 1e4
    if not computed:
        key[3, 0, :3] = torch.tensor([math.inf, -math.inf, 1e4])
    pages = make_pages(page_dtype)
    slots = torch.tensor([3, 8, 9, -1, 30])
    per_head = torch.tensor([0.02, 0.3, 0.0]).expand(5, 8, 3)
    scales = torch.full((5, 8, 3), 7.0) if computed else per_head
    others = scales.clone() if computed else per_head
    cpu.write_kv(key, key.flip(0), pages, make_pages(page_dtype), slots, scales, others)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        given = key[token].float()
        scale = scales[slot // 8, slot % 8]
        if computed:
            assert torch.equal(scale, given.abs().amax(-1) / LARGEST[page_dtype])
        wanted = torch.where(scale[:, None] == 0, 0, given / scale[:, None])
        wanted = wanted.clamp(-LARGEST[page_dtype], LARGEST[page_dtype])
        wanted = wanted.round() if page_dtype == torch.int8 else wanted
        assert torch.equal(as_bits(pages[slot // 8, slot % 8]), as_bits(wanted.to(page_dtype)))


@pytest.mark.parametrize("page_dtype", LARGEST)
def test_every_float16_is_rounded_as_torch_rounds_it(page_dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    tokens = every.view(64, 8, 128)
    pages = torch.zeros(8, 8, 8, 128, dtype=page_dtype)
    cpu.write_kv(tokens, tokens, pages, torch.zeros_like(pages), torch.arange(64), None, None)
    largest = LARGEST[page_dtype]
    wanted = tokens.float().clamp(-largest, largest)
    if page_dtype == torch.int8:
        wanted = wanted.nan_to_num(0).round()
    got, expected = pages.float().view(-1), wanted.to(page_dtype).float().view(-1)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("bad", [-2, 40, 2**40])
def test_a_bad_slot_is_refused_and_nothing_written(bad: int) -> None:
    pages = make_pages(torch.float32)
    before = pages.clone()
    tokens = torch.randn(3, 3, 20)
    with pytest.raises(UsageError, match=f"slot_mapping: expected slots from -1 to 39, got {bad}, in"):
        cpu.write_kv(tokens, tokens, pages, pages, torch.tensor([1, 2, bad]), None, None)
    assert torch.equal(pages, before)


def test_the_last_of_equal_slots_stays() -> None:
    pages = make_pages(torch.float32)
    tokens = torch.randn(3, 3, 20)
    cpu.write_kv(tokens, tokens, pages, make_pages(torch.float32), torch.tensor([4, 4, 4]), None, None)
    assert torch.equal(pages[0, 4], tokens[2])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("layout", ["NHD", "HND", "odd"])
def test_many_tokens_are_written_as_one_by_one(layout: str, num_threads: int) -> None:
    """More than the caches are worth, in runs of slots that any of them may interrupt."""
    torch.set_num_threads(num_threads)
    num_tokens, block_size, num_heads, head_dim = 3_000, 16, 4, 127 if layout == "odd" else 128
    key, value = (torch.randn(num_tokens, num_heads, head_dim) for _ in range(2))
    inner = (num_heads, block_size) if layout == "HND" else (block_size, num_heads)
    storage = torch.zeros(num_tokens // block_size + 9, 2, *inner, head_dim)
    storage = storage.transpose(2, 3) if layout == "HND" else storage
    blocks = torch.randperm(len(storage))[: -(-num_tokens // block_size), None]
    slots = (blocks * block_size + torch.arange(block_size)).flatten()[:num_tokens]
    slots[torch.randperm(num_tokens)[:40]] = -1
    slots[100:103] = slots[96]  # the last of them stays
    expected = storage.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // block_size, 0, slot % block_size] = key[token]
            expected[slot // block_size, 1, slot % block_size] = value[token]
    cpu.write_kv(key, value, storage[:, 0], storage[:, 1], slots, None, None)
    assert torch.equal(storage, expected)


def make_blocks(kind: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if kind == "block":
        return torch.randn(9, 2, 2, 4, 3, 5).to(dtype)
    if kind == "layer":  # each layer's blocks lie together
        return torch.randn(2, 2, 9, 4, 3, 5).to(dtype).permute(2, 0, 1, 3, 4, 5)
    if kind == "odd":  # bytes at odd addresses
        return torch.randint(0, 255, (9, 4, 7), dtype=torch.uint8)[:, 1:3, 1:6]
    return torch.randn(9, 3, 8, 6).to(dtype)[:, :, ::2, ::3]


KINDS = ["block", "layer", "odd", "strided"]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=9, unique_by=lambda pair: pair[1]))
@pytest.mark.parametrize("kind", KINDS)
def test_every_source_is_read_before_any_destination_is_written(
    kind: str, pairs: list[tuple[int, int]]
) -> None:
    blocks = make_blocks(kind)
    sources, destinations = (torch.tensor([pair[i] for pair in pairs], dtype=torch.long) for i in (0, 1))
    expected = blocks.clone()
    expected[destinations] = blocks[sources]
    cpu.copy_blocks(blocks, sources, destinations)
    assert torch.equal(blocks, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_blocks_are_gathered_and_scattered(kind: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    blocks, other = make_blocks(kind), make_blocks(kind)
    ids = torch.tensor([3, 0, 8, 3])
    buffer = torch.empty(4, *blocks.shape[1:], dtype=blocks.dtype)
    cpu.gather_blocks(blocks, ids, buffer)
    assert torch.equal(buffer, blocks[ids])
    expected = other.clone()
    for i, block in enumerate(ids.tolist()):
        expected[block] = buffer[i] + 1
    cpu.scatter_blocks(buffer + 1, ids, other)
    assert torch.equal(other, expected)


def test_large_copies_are_right() -> None:
    blocks = torch.randint(-99, 99, (40, 70_001), dtype=torch.int64)
    ids = torch.randperm(40)
    expected = blocks.clone()
    expected[ids[:15]] = blocks[ids[15:30]]
    cpu.copy_blocks(blocks, ids[15:30], ids[:15])
    assert torch.equal(blocks, expected)
    buffer = torch.empty_like(blocks)
    cpu.gather_blocks(blocks, ids, buffer)
    assert torch.equal(buffer, blocks[ids])


@pytest.mark.parametrize("bad", [-1, 9])
def test_a_bad_block_is_refused_and_nothing_written(bad: int) -> None:
    blocks = make_blocks("block")
    before = blocks.clone()
    good, wrong = torch.tensor([1, 2]), torch.tensor([3, bad])
    with pytest.raises(UsageError, match=f"sources: expected block ids from 0 to 8, got {bad}, in copy"):
        cpu.copy_blocks(blocks, wrong, good)
    with pytest.raises(UsageError, match=f"destinations: .* got {bad}, in copy_blocks"):
        cpu.copy_blocks(blocks, good, wrong)
    with pytest.raises(UsageError, match=f"block_ids: .* got {bad}, in scatter_blocks"):
        cpu.scatter_blocks(before[:2], wrong, blocks)
    with pytest.raises(UsageError, match=f"block_ids: .* got {bad}, in gather_blocks"):
        cpu.gather_blocks(blocks, wrong, before[:2].clone())
    assert torch.equal(blocks, before)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head_dim", [16, 20, 128])
def test_states_are_merged_by_what_they_saw(dtype: torch.dtype, head_dim: int) -> None:
    outs = torch.randn(4, 40, 3, head_dim).to(dtype)
    lses = torch.randn(4, 40, 3) * 5
    lses[1] = -math.inf
    lses[:, 7] = -math.inf
    outs[lses == -math.inf] = math.nan  # saw nothing: whatever stands there is not looked at
    out = torch.full((40, 3, head_dim), math.nan).to(dtype)
    lse = torch.full((40, 3), math.nan)
    cpu.merge_attention_states(outs, lses, out, lse)
    weights = lses.double().softmax(0).nan_to_num(0)[..., None]
    expected = (weights * outs.double().nan_to_num(0)).sum(0)
    assert torch.allclose(out.double(), expected, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)
    assert torch.allclose(lse.double(), lses.double().logsumexp(0), rtol=1e-6, atol=4e-6)
    assert torch.equal(out[7], torch.zeros(3, head_dim, dtype=dtype))
