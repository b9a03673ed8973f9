"""copy_blocks, gather_blocks and scatter_blocks of csrc/cuda, run on the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_shim import Shim

from pagedkv.errors import UsageError
from pagedkv.kernels.cuda import calls


def contiguous(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(9 * 2 * 2 * 4 * 3 * 8).to(dtype).view(9, 2, 2, 4, 3, 8)


def by_layer(dtype: torch.dtype) -> torch.Tensor:
    return contiguous(dtype).permute(1, 2, 0, 3, 4, 5).contiguous().permute(2, 0, 1, 3, 4, 5)


def heads_first(dtype: torch.dtype) -> torch.Tensor:
    return contiguous(dtype).transpose(3, 4).contiguous().transpose(3, 4)


def sliced(dtype: torch.dtype) -> torch.Tensor:
    """Rows of 7 of 8 numbers: nothing is aligned."""
    return contiguous(dtype)[..., 1:]


def apart(dtype: torch.dtype) -> torch.Tensor:
    """Rows of 16 bytes that lie 24 apart: every second one is not aligned."""
    number_bytes = dtype.itemsize
    wide = torch.zeros(9, 4, 24 // number_bytes, dtype=dtype)[..., : 16 // number_bytes]
    return wide.copy_(torch.arange(wide.numel()).view(wide.shape))


def scattered(dtype: torch.dtype) -> torch.Tensor:
    """Six loops, and no two numbers side by side."""
    wide = torch.zeros(9, 4, 4, 8, 6, 16, 2, dtype=dtype)[:, ::2, ::2, ::2, ::2, ::2]
    return wide.copy_(torch.arange(9 * 2 * 2 * 4 * 3 * 8 * 2).view(9, 2, 2, 4, 3, 8, 2))


KINDS = [contiguous, by_layer, heads_first, sliced, apart, scattered]
DTYPES = [torch.uint8, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    ("sources", "destinations"),
    [
        ([0, 1, 1], [5, 6, 7]),
        ([0, 1, 2, 3], [1, 2, 3, 0]),  # a ring
        ([4, 4], [4, 5]),  # onto itself
        ([], []),
    ],
)
def test_blocks_are_copied_as_if_all_were_read_first(
    shim: Shim,
    make: Callable[[torch.dtype], torch.Tensor],
    dtype: torch.dtype,
    sources: list[int],
    destinations: list[int],
) -> None:
    blocks = make(dtype)
    expected = blocks.clone()
    for source, destination in zip(sources, destinations, strict=True):
        expected[destination] = blocks[source]
    ids = torch.tensor(sources, dtype=torch.int64), torch.tensor(destinations, dtype=torch.int64)
    for seed in range(3):
        got = blocks.clone(memory_format=torch.preserve_format)
        shim.seed(seed)
        calls.copy_blocks(shim, got, *ids)
        assert torch.equal(got, expected)


def test_a_conflict_is_found_by_whichever_thread_it_belongs_to(shim: Shim) -> None:
    blocks = torch.arange(9.0).view(9, 1)
    # Only the last copy writes what another reads; its thread may run before the one that clears the flag.
    sources, destinations = torch.tensor([5, 1, 2, 0]), torch.tensor([6, 7, 8, 5])
    for seed in range(40):
        got = blocks.clone()
        shim.seed(seed)
        calls.copy_blocks(shim, got, sources, destinations)
        assert got.flatten().tolist() == [0, 1, 2, 3, 4, 0, 5, 1, 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("is_dense", [True, False])
def test_blocks_go_into_a_buffer_and_back(
    shim: Shim, make: Callable[[torch.dtype], torch.Tensor], dtype: torch.dtype, is_dense: bool
) -> None:
    blocks = make(dtype)
    ids = torch.tensor([3, 0, 8, 3])
    buffer = blocks[:4].contiguous() if is_dense else torch.zeros_like(make(dtype))[:4]
    buffer.zero_()
    calls.transfer_blocks(shim, "gather_blocks", blocks, ids, buffer)
    assert torch.equal(buffer, blocks[ids])
    written = torch.zeros_like(blocks)
    calls.transfer_blocks(shim, "scatter_blocks", written, ids, buffer)
    expected = torch.zeros_like(blocks)
    expected[ids] = blocks[ids]
    assert torch.equal(written, expected)


def test_block_ids_out_of_range_are_left_out(shim: Shim) -> None:
    blocks = contiguous(torch.float32)
    before = blocks.clone()
    calls.copy_blocks(shim, blocks, torch.tensor([9, 1, -1]), torch.tensor([0, -1, 2]))
    assert torch.equal(blocks, before)
    buffer = torch.zeros(2, *blocks.shape[1:])
    calls.transfer_blocks(shim, "gather_blocks", blocks, torch.tensor([2**40, 1]), buffer)
    assert torch.equal(buffer, torch.stack([torch.zeros_like(blocks[0]), blocks[1]]))


def test_blocks_of_too_many_scattered_dimensions_are_refused(shim: Shim) -> None:
    blocks = torch.zeros([2] + [3] * 10)[(slice(None), *[slice(2)] * 10)]
    with pytest.raises(UsageError, match=r"blocks: expected blocks of at most 8 .* got \d+, in copy_blocks"):
        calls.copy_blocks(shim, blocks, torch.tensor([0]), torch.tensor([1]))
