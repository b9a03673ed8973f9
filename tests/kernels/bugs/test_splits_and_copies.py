"""Parts that are put together again, and blocks that are moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from backends import on_every_backend
from guarded import Guards
from page_worlds import make_world

from pagedkv.ops import copy_blocks, gather_blocks, merge_attention_states, paged_attention, scatter_blocks


@on_every_backend
@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_any_number_of_splits_give_the_whole(
    num_splits: int, dtype: torch.dtype, backend: str
) -> None:
    """All sequences were folded on the first, or partial results rounded (flash-attention, flashinfer)."""
    rng = np.random.default_rng(num_splits)
    logits, values = rng.normal(size=(num_splits, 5, 3, 40)) * 4, rng.normal(size=(num_splits, 5, 3, 40, 16))
    values *= 1e4
    lses = np.log(np.exp(logits).sum(-1))
    weights = np.exp(logits - lses[..., None])
    outs = torch.from_numpy(np.einsum("stha,sthad->sthd", weights, values)).to(dtype)
    lse, out = torch.full((5, 3), float("nan")), torch.full((5, 3, 16), float("nan"), dtype=dtype)
    given = torch.from_numpy(lses).float()
    assert merge_attention_states(outs, given, out=out, lse=lse, backend=backend) is out  # type: ignore[arg-type]
    want_lse = np.log(np.exp(lses).sum(0))
    want = (np.exp(lses - want_lse)[..., None] * outs.double().numpy()).sum(0)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=1e-6, atol=1e-6)
    error = np.linalg.norm(out.double().numpy() - want) / np.linalg.norm(want)
    assert error < (2e-6 if dtype == torch.float32 else 4e-3)


@on_every_backend
def test_states_that_saw_nothing_are_left_out(backend: str) -> None:
    outs = torch.tensor([[float("nan")], [3.0], [float("inf")]]).repeat(1, 16)[:, None, None]
    lses = torch.tensor([float("-inf"), 0.5, float("-inf")])[:, None, None]
    lse = torch.empty(1, 1)
    out = merge_attention_states(outs, lses, lse=lse, backend=backend)  # type: ignore[arg-type]
    assert out.flatten().tolist() == [3.0] * 16
    assert lse.tolist() == [[0.5]]
    out = merge_attention_states(outs[::2], lses[::2], lse=lse, backend=backend)  # type: ignore[arg-type]
    assert out.flatten().tolist() == [0.0] * 16
    assert lse.tolist() == [[float("-inf")]]


@on_every_backend
@pytest.mark.parametrize("num_queries", [1, 4])
@pytest.mark.parametrize("factor", [1.0, 1e4])
def test_long_and_short_sequences_together_are_right(num_queries: int, factor: float, backend: str) -> None:
    lengths = (max(1, num_queries), 1000, 4096)
    world = make_world([(length, num_queries, 0) for length in lengths])
    world.arguments[2].mul_(factor)
    world = world._replace(values=[values * factor for values in world.values])
    lse = torch.full((3 * num_queries, 2), float("nan"))
    out = paged_attention(*world.arguments, lse=lse, backend=backend)  # type: ignore[arg-type]
    want, want_lse = world.expected()
    for row, (got, wanted) in enumerate(zip(out.double().numpy(), want, strict=True)):
        assert np.linalg.norm(got - wanted) <= 1e-5 * np.linalg.norm(wanted), row
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@on_every_backend
def test_131072_tokens_are_read_to_their_end(backend: str) -> None:
    world = make_world([(131_072, 1, 0)], num_kv_heads=1, num_heads=1)
    out = paged_attention(*world.arguments, backend=backend)  # type: ignore[arg-type]
    want, _ = world.expected()
    assert np.linalg.norm(out.double().numpy() - want) <= 2e-5 * np.linalg.norm(want)


def moved(blocks: torch.Tensor, pairs: list[tuple[int, int]]) -> torch.Tensor:
    want = blocks.clone()
    for source, destination in pairs:
        want[destination] = blocks[source]
    return want


@on_every_backend
@pytest.mark.parametrize("payload", [(56,), (16,), (1,), (4096,), (3, 5), (2, 2, 8)])
@pytest.mark.parametrize("offset", [0, 8, 3])
@pytest.mark.parametrize("pairs", [[(1, 3)], [(0, 1), (1, 0)], [(0, 1), (1, 2), (2, 0)], []])
def test_blocks_of_any_size_and_alignment_are_copied(
    payload: tuple[int, ...], offset: int, pairs: list[tuple[int, int]], backend: str
) -> None:
    """A mover wanted multiples of 16 bytes, and a page of scales had 56 (exllamav3)."""
    guards = Guards()
    shape = (4, *payload)
    padded = torch.empty(4, int(np.prod(payload)) + offset, dtype=torch.uint8)
    blocks = guards.empty("blocks", padded[:, offset:].view(shape))
    blocks.copy_(torch.randint(0, 255, shape))
    want = moved(blocks, pairs)
    sources, destinations = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    copy_blocks(blocks, sources, destinations, backend=backend)  # type: ignore[arg-type]
    guards.check()
    assert torch.equal(blocks, want)


@on_every_backend
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.uint8, torch.int64]
)
@pytest.mark.parametrize("arranged", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (3, 1, 2, 0)])
def test_blocks_go_out_and_come_back(dtype: torch.dtype, arranged: Any, backend: str) -> None:
    guards = Guards()
    numbers = torch.randint(0, 2**7, (6, 3, 4, 5)).to(torch.float32).to(dtype)
    back = [arranged.index(dim) for dim in range(4)]
    blocks = guards.copy("blocks", numbers.permute(arranged).contiguous().permute(back))
    ids = torch.tensor([4, 1, 1, 5])
    buffer = guards.empty("buffer", torch.empty(4, 3, 4, 5, dtype=dtype))
    assert gather_blocks(blocks, ids, buffer=buffer, backend=backend) is buffer  # type: ignore[arg-type]
    assert torch.equal(buffer.float(), numbers[ids].float() if dtype.itemsize > 1 else numbers.float()[ids])
    assert torch.equal(gather_blocks(blocks, ids, backend=backend).float(), buffer.float())  # type: ignore[arg-type]
    changed = guards.copy("changed", torch.randint(0, 2**7, (2, 3, 4, 5)).to(torch.float32).to(dtype))
    scatter_blocks(changed, torch.tensor([2, 0]), blocks, backend=backend)  # type: ignore[arg-type]
    want = numbers.float().clone()
    want[[2, 0]] = changed.float()
    assert torch.equal(blocks.float(), want)
    guards.check()
