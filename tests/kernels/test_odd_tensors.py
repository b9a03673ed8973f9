"""Tensors without memory, or whose memory is another's too: right, or refused, but never a crash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagedkv import ops
from pagedkv.errors import ShapeError

BLOCK_SIZE, HEAD_DIM = 16, 32


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def attention_tensors() -> list[torch.Tensor]:
    """Two sequences, of 40 tokens with 3 queries and of 20 with 2."""
    pages = (draw(6, BLOCK_SIZE, 2, HEAD_DIM) for _ in range(2))
    tables = [[0, 1, 2], [3, 4, -1]], [40, 20], [0, 3, 5]
    return [draw(5, 4, HEAD_DIM), *pages, *(torch.tensor(table, dtype=torch.int32) for table in tables)]


def written_tensors() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Keys, values, their pages, and slots."""
    tokens, pages = draw(2, 3, 2, HEAD_DIM), draw(2, 6, BLOCK_SIZE, 2, HEAD_DIM)
    return [*tokens, *pages], torch.tensor([1, 20, -1])


def expanded(*shape: int, dim: int = 0) -> torch.Tensor:
    return torch.zeros([1 if i == dim else size for i, size in enumerate(shape)]).expand(shape)


def write_into(**changed: torch.Tensor) -> None:
    (key, value, key_pages, value_pages), slots = written_tensors()
    given = {"key_pages": key_pages, "value_pages": value_pages} | changed
    ops.write_kv(key, value, slot_mapping=slots, **given)


def quantise_with(scales: torch.Tensor) -> None:
    (key, value, *pages), slots = written_tensors()
    ops.write_kv(key, value, *(page.to(torch.int8) for page in pages), slots, key_scales=scales)


ONE = torch.tensor([1])
SEVERAL_IN_ONE: dict[str, tuple[str, Callable[[torch.Tensor], object], torch.Tensor]] = {
    "attention": (
        "out",
        lambda t: ops.paged_attention(*attention_tensors(), out=t),
        expanded(5, 4, HEAD_DIM),
    ),
    "lse": ("lse", lambda t: ops.paged_attention(*attention_tensors(), lse=t), expanded(5, 4, dim=1)),
    "key_pages": ("key_pages", lambda t: write_into(key_pages=t), expanded(6, BLOCK_SIZE, 2, HEAD_DIM)),
    "value_pages": (
        "value_pages",
        lambda t: write_into(value_pages=t),
        expanded(6, BLOCK_SIZE, 2, HEAD_DIM, dim=2),
    ),
    "scales": ("key_scales", quantise_with, expanded(6, BLOCK_SIZE, 2)),
    "copy": ("blocks", lambda t: ops.copy_blocks(t, ONE, ONE + 1), expanded(6, 8)),
    "scatter": ("blocks", lambda t: ops.scatter_blocks(torch.ones(1, 8), ONE, t), expanded(6, 8)),
    "gather": ("buffer", lambda t: ops.gather_blocks(torch.ones(6, 8), ONE, buffer=t), expanded(1, 8, dim=1)),
    "merge": (
        "out",
        lambda t: ops.merge_attention_states(draw(2, 3, 4, 8), draw(2, 3, 4), out=t),
        expanded(3, 4, 8),
    ),
    "merged lse": (
        "lse",
        lambda t: ops.merge_attention_states(draw(2, 3, 4, 8), draw(2, 3, 4), lse=t),
        expanded(3, 4),
    ),
}


@pytest.mark.parametrize("name", SEVERAL_IN_ONE)
def test_what_is_written_has_memory_for_each_of_its_numbers(name: str) -> None:
    argument, call, tensor = SEVERAL_IN_ONE[name]
    with pytest.raises(
        ShapeError, match=f"{argument}: expected memory for each of its numbers, got an expanded"
    ):
        call(tensor)


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_the_result_may_lie_in_the_queries_memory(shift: int) -> None:
    query, *others = attention_tensors()
    expected = ops.paged_attention(query, *others)
    room = torch.zeros(7, *query.shape[1:])
    room[1:6] = query
    out = ops.paged_attention(room[1:6], *others, out=room[1 + shift : 6 + shift])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("stride", [1, 2])
def test_the_result_may_lie_anywhere(stride: int) -> None:
    tensors = attention_tensors()
    expected = ops.paged_attention(*tensors)
    room = torch.zeros(4, 11, HEAD_DIM * stride)
    out = room.transpose(0, 1)[::2, :, ::stride][:5]
    assert ops.paged_attention(*tensors, out=out) is out
    assert torch.equal(out, expected)


def test_the_quickest_call_and_the_checked_one_read_the_same_expanded_tensors() -> None:
    query, keys, values, table, lens, starts = attention_tensors()
    one, two = query[:1].expand(5, -1, -1), keys[:, :, :1].expand(-1, -1, 2, -1)
    rows = table[:1].expand(2, -1)
    got = ops.paged_attention(one, two, values, rows, lens, starts)
    expected = ops.paged_attention(
        one.contiguous(), two.contiguous(), values, rows.contiguous(), lens, starts, backend="reference"
    )
    assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("index", range(6))
def test_memory_that_was_given_back_is_not_touched(index: int) -> None:
    tensors = attention_tensors()
    tensors[index].untyped_storage().resize_(0)
    with pytest.raises(BufferError, match="without memory"):
        ops.paged_attention(*tensors, backend="cpu")


@pytest.mark.parametrize("backend", [None, "cpu"])
def test_meta_tensors_have_shapes_only(backend: Any) -> None:
    tensors = [tensor.to("meta") for tensor in attention_tensors()]
    out = ops.paged_attention(*tensors, backend=backend)
    assert out.is_meta
    assert out.shape == tensors[0].shape
    written, slots = written_tensors()
    ops.write_kv(*(tensor.to("meta") for tensor in written), slots.to("meta"), backend=backend)


@pytest.mark.parametrize("index", [0, 3])
def test_a_sparse_tensor_is_refused(index: int) -> None:
    tensors = attention_tensors()
    tensors[index] = tensors[index].to_sparse()
    with pytest.raises(ShapeError, match=r"expected a dense tensor, got torch\.sparse_coo"):
        ops.paged_attention(*tensors)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.functionalize])
def test_transforms_that_torch_has_no_rule_for_raise(transform: Any) -> None:
    query, *others = attention_tensors()
    attend = transform(lambda tensor: ops.paged_attention(tensor, *others))
    with pytest.raises(RuntimeError, match="pagedkv::paged_attention"):
        attend(query[None] if transform is torch.vmap else query)
