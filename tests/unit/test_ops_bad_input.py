"""The boundary of the ops: whatever does not fit is named, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv import BackendUnavailableError, ShapeError, UsageError, ops

NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_BLOCKS = 3, 6, 2, 4, 4


def arguments(op: str) -> dict[str, torch.Tensor]:
    """Arguments that fit."""
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    key_pages, value_pages = draw(2, NUM_BLOCKS, 16, NUM_KV_HEADS, HEAD_DIM)
    pages = {"key_pages": key_pages, "value_pages": value_pages}
    if op == "write_kv":
        key, value = draw(2, NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM)
        return {"key": key, "value": value, **pages, "slot_mapping": torch.tensor([1, 20, -1])}
    if op == "copy_blocks":
        return {
            "blocks": draw(NUM_BLOCKS, 2, 3),
            "sources": torch.tensor([1, 2]),
            "destinations": torch.tensor([0, 3]),
        }
    return {
        "query": draw(NUM_TOKENS, NUM_HEADS, HEAD_DIM),
        **pages,
        "block_table": torch.tensor([[1, 2], [0, -1]], dtype=torch.int32),
        "seq_lens": torch.tensor([17, 3], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1, 3], dtype=torch.int32),
        "out": torch.full((NUM_TOKENS, NUM_HEADS, HEAD_DIM), 7.0),
    }


def other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    others = {torch.float32: torch.bfloat16, torch.int64: torch.int32, torch.int32: torch.int64}
    return tensor.to(others[tensor.dtype])


NO_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "None": lambda tensor: None,
    "text": lambda tensor: "tensor",
    "number": lambda tensor: 5,
    "list": lambda tensor: tensor.tolist(),
    "array": lambda tensor: tensor.numpy(),
    "empty list": lambda tensor: [],
}
WRONG_TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a dimension less": lambda tensor: tensor[0],
    "a dimension more": lambda tensor: tensor[..., None],
    "a row more": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "a row less": lambda tensor: tensor[:-1],
    "no row": lambda tensor: tensor[:0],
    "wider": lambda tensor: torch.cat([tensor, tensor[..., :1]], -1),
    "dtype": other_dtype,
    "device": lambda tensor: tensor.to("meta"),
}
OPS = ("write_kv", "copy_blocks", "paged_attention")
ARGUMENTS = [(op, name) for op in OPS for name in arguments(op)]

# Sizes, dtype and device that are free by themselves, but then another argument does not fit them.
ANY_ROWS = ("a row more", "a row less", "no row")
BLAMED = {
    ("write_kv", "slot_mapping"): ("key", (*ANY_ROWS, "wider")),
    ("write_kv", "key_pages"): ("value_pages", ("a row more", "a row less", "wider", "dtype", "device")),
    ("paged_attention", "key_pages"): (
        "value_pages",
        ("a row more", "a row less", "wider", "dtype", "device"),
    ),
    ("paged_attention", "query"): ("out", ANY_ROWS),
    ("paged_attention", "seq_lens"): ("block_table", (*ANY_ROWS, "wider")),
    ("copy_blocks", "sources"): ("destinations", (*ANY_ROWS, "wider")),
    ("copy_blocks", "blocks"): ("sources", ("device",)),
}
# Blocks are of any shape and dtype; a table may be of any width.
FITS = {
    ("copy_blocks", "blocks"): ("a dimension less", "a dimension more", *ANY_ROWS, "wider", "dtype"),
    ("paged_attention", "block_table"): ("wider",),
}


def assert_refused(op: str, given: dict[str, Any], blamed: str) -> ShapeError:
    before = {name: value.clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
    with pytest.raises(ShapeError) as caught:
        getattr(ops, op)(**given)
    error = caught.value
    assert error.name == blamed
    assert str(error) == f"{blamed}: expected {error.expected}, got {error.got}, in {op}"
    assert error.expected != error.got
    for name, value in before.items():
        if value.device.type != "meta":
            assert torch.equal(given[name], value), name
    return error


@pytest.mark.parametrize(
    ("op", "name", "kind"),
    # `out=None` asks for a new tensor.
    [
        (*argument, kind)
        for argument in ARGUMENTS
        for kind in NO_TENSORS
        if (argument[1], kind) != ("out", "None")
    ],
)
def test_what_is_no_tensor_is_refused_by_name(op: str, name: str, kind: str) -> None:
    given: dict[str, Any] = arguments(op)
    given[name] = NO_TENSORS[kind](given[name])
    error = assert_refused(op, given, name)
    assert error.got == type(given[name]).__name__


@pytest.mark.parametrize(
    ("op", "name", "kind"),
    [
        (*argument, kind)
        for argument in ARGUMENTS
        for kind in WRONG_TENSORS
        if kind not in FITS.get(argument, ())
    ],
)
def test_a_wrong_tensor_is_refused_by_name(op: str, name: str, kind: str) -> None:
    given = arguments(op)
    given[name] = WRONG_TENSORS[kind](given[name])
    blamed, kinds = BLAMED.get((op, name), (name, ()))
    assert_refused(op, given, blamed if kind in kinds else name)


def test_a_shape_error_says_what_would_fit() -> None:
    given = arguments("write_kv")
    given["value"] = given["value"][:, :1]
    error = assert_refused("write_kv", given, "value")
    assert (error.expected, error.got) == ("[3, 2, 4] float32 on cpu", "[3, 1, 4] float32 on cpu")
    given = arguments("paged_attention")
    given["seq_lens"] = given["seq_lens"].to("meta")
    error = assert_refused("paged_attention", given, "seq_lens")
    assert (error.expected, error.got) == ("[2] int32 on cpu", "[2] int32 on meta")


@pytest.mark.parametrize("num_heads", [0, 1, 3, 5])
def test_heads_that_no_group_fits_are_refused(num_heads: int) -> None:
    given: dict[str, Any] = arguments("paged_attention")
    given["query"] = torch.zeros(NUM_TOKENS, num_heads, HEAD_DIM)
    del given["out"]
    error = assert_refused("paged_attention", given, "query")
    assert (error.expected, error.got) == ("a multiple of 2 heads", str(num_heads))


@pytest.mark.parametrize("op", ["write_kv", "paged_attention"])
@pytest.mark.parametrize("dim", range(4))
def test_pages_without_any_element_are_refused(op: str, dim: int) -> None:
    given = arguments(op)
    sizes = list(given["key_pages"].shape)
    sizes[dim] = 0
    given |= {"key_pages": torch.zeros(sizes), "value_pages": torch.zeros(sizes)}
    assert_refused(op, given, "key_pages")


@pytest.mark.parametrize("scale", ["1", True, [], [1.0], 1j, float("nan"), float("inf"), np.array([1.0])])
def test_a_scale_that_is_none_is_refused(scale: Any) -> None:
    given = arguments("paged_attention")
    with pytest.raises(UsageError, match=r"scale: expected a finite number, got .*, in paged_attention"):
        ops.paged_attention(**given, scale=scale)
    assert bool((given["out"] == 7).all())


@pytest.mark.parametrize(
    "backend", ["cpu", "triton", "cuda", "nonsense", "", "Reference", 5, 0, [], ["reference"]]
)
@pytest.mark.parametrize("op", OPS)
def test_a_backend_that_is_not_there_is_refused_before_anything_changes(op: str, backend: Any) -> None:
    given = arguments(op)
    before = {name: tensor.clone() for name, tensor in given.items()}
    with pytest.raises(BackendUnavailableError, match="backend: expected one of reference, got "):
        getattr(ops, op)(**given, backend=backend)
    for name, tensor in before.items():
        assert torch.equal(given[name], tensor)


@pytest.mark.parametrize(
    ("value", "error"),
    [("nonsense", UsageError), ("REFERENCE", UsageError), ("cuda", BackendUnavailableError)],
)
def test_the_variable_is_held_to_the_backends_there_are(
    value: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDKV_BACKEND", value)
    for op in OPS:
        with pytest.raises(error, match=f"expected one of reference.*, got '{value}'"):
            getattr(ops, op)(**arguments(op))
        getattr(ops, op)(**arguments(op), backend="reference")  # an argument goes before it


@pytest.mark.parametrize("value", ["", "reference"])
def test_the_variable_may_be_empty_or_name_a_backend(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_BACKEND", value)
    assert ops.choose_backend() is ops.BACKENDS["reference"]


def test_every_backend_holds_every_op() -> None:
    for backend in ops.BACKENDS.values():
        assert all(callable(getattr(backend, op)) for op in OPS)
