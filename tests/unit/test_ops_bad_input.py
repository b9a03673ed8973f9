"""The boundary of the ops: whatever does not fit is named, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv import BackendUnavailableError, ShapeError, UsageError, ops, torch_library
from pagedkv.batch import SharedPrefixes
from pagedkv.kernels import BACKENDS, load_backend

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
    if op in ("gather_blocks", "scatter_blocks"):
        return {
            "blocks": draw(NUM_BLOCKS, 2, 3),
            "block_ids": torch.tensor([1, 3]),
            "buffer": draw(2, 2, 3),
        }
    if op == "merge_attention_states":
        return {
            "outs": draw(2, NUM_TOKENS, NUM_HEADS, HEAD_DIM),
            "lses": draw(2, NUM_TOKENS, NUM_HEADS),
            "out": torch.full((NUM_TOKENS, NUM_HEADS, HEAD_DIM), 7.0),
            "lse": torch.full((NUM_TOKENS, NUM_HEADS), 7.0),
        }
    return {
        "query": draw(NUM_TOKENS, NUM_HEADS, HEAD_DIM),
        **pages,
        "block_table": torch.tensor([[1, 2], [0, -1]], dtype=torch.int32),
        "seq_lens": torch.tensor([17, 3], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1, 3], dtype=torch.int32),
        "alibi_slopes": draw(NUM_HEADS),
        "sinks": draw(NUM_HEADS),
        "mask": draw(NUM_TOKENS, 2),
        "out": torch.full((NUM_TOKENS, NUM_HEADS, HEAD_DIM), 7.0),
        "lse": torch.full((NUM_TOKENS, NUM_HEADS), 7.0),
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
OPS = tuple(name for name in torch_library.SCHEMAS if "." not in name)
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
    **{
        (op, name): (blamed, kinds)
        for op in ("gather_blocks", "scatter_blocks")
        for name, blamed, kinds in (
            ("blocks", "buffer", ("a dimension less", "a dimension more", "wider", "dtype")),
            ("block_ids", "buffer", (*ANY_ROWS, "wider")),
        )
    },
    ("merge_attention_states", "outs"): ("lses", ("a row more", "a row less", "device")),
}
# Where the dtype or the last size is free, another argument does not fit it.
BLAMED_NEXT = {
    ("merge_attention_states", "outs", "dtype"): "out",
    ("merge_attention_states", "outs", "wider"): "out",
    ("gather_blocks", "blocks", "device"): "block_ids",
    ("scatter_blocks", "blocks", "device"): "block_ids",
}
OPTIONAL = ("out", "lse", "alibi_slopes", "sinks", "mask", "buffer")
# Blocks are of any shape and dtype; a table may be of any width.
FITS = {
    ("copy_blocks", "blocks"): ("a dimension less", "a dimension more", *ANY_ROWS, "wider", "dtype"),
    ("gather_blocks", "blocks"): ANY_ROWS,
    ("scatter_blocks", "blocks"): ANY_ROWS,
    ("paged_attention", "block_table"): ("wider",),
    ("paged_attention", "mask"): ("wider",),
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
    [
        (op, name, kind)
        for op, name in ARGUMENTS
        for kind in NO_TENSORS
        if kind != "None" or name not in OPTIONAL or (op, name) == ("scatter_blocks", "buffer")
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
    assert_refused(op, given, BLAMED_NEXT.get((op, name, kind), blamed if kind in kinds else name))


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


@pytest.mark.parametrize("soft_cap", ["1", True, [], 0, 0.0, -1.0, float("nan"), float("inf")])
def test_a_soft_cap_that_is_none_is_refused(soft_cap: Any) -> None:
    given = arguments("paged_attention")
    with pytest.raises(UsageError, match=r"soft_cap: expected a finite number above 0, got .*, in paged_att"):
        ops.paged_attention(**given, soft_cap=soft_cap)
    assert bool((given["out"] == 7).all())


@pytest.mark.parametrize("window", ["1", True, [], 0, -1, 2**31, 1.0])
def test_a_window_that_is_none_is_refused(window: Any) -> None:
    given = arguments("paged_attention")
    with pytest.raises(UsageError, match=r"window: expected an integer.*, got .*, in paged_attention"):
        ops.paged_attention(**given, window=window)
    assert bool((given["out"] == 7).all())


@pytest.mark.parametrize("causal", [None, 0, 1, "no", []])
def test_causal_is_true_or_false(causal: Any) -> None:
    with pytest.raises(UsageError, match=r"causal: expected True or False, got "):
        ops.paged_attention(**arguments("paged_attention"), causal=causal)


@pytest.mark.parametrize("name", ["key_scales", "value_scales"])
@pytest.mark.parametrize("op", ["write_kv", "paged_attention"])
def test_scales_are_of_8_bit_pages_and_fit_them(op: str, name: str) -> None:
    given: dict[str, Any] = arguments(op)
    assert_refused(op, given | {name: torch.tensor(1.0)}, name)
    given |= {pages: given[pages].to(torch.int8) for pages in ("key_pages", "value_pages")}
    shape = (NUM_BLOCKS, 16, NUM_KV_HEADS)
    for wrong in (
        1.0,
        torch.ones(1),
        torch.ones(3),
        torch.ones(shape[1:]),
        torch.ones(NUM_BLOCKS - 1, *shape[1:]),
        torch.ones(shape, dtype=torch.float16),
        torch.ones(shape, device="meta"),
    ):
        assert_refused(op, given | {name: wrong}, name)
    for right in (torch.tensor(1.0), torch.ones(NUM_KV_HEADS), torch.ones(shape)):
        getattr(ops, op)(**given | {name: right}, backend="reference")


def test_tokens_that_are_quantised_already_have_their_scales() -> None:
    given: dict[str, Any] = {name: value.to(torch.int8) for name, value in arguments("write_kv").items()}
    given["slot_mapping"] = given["slot_mapping"].long()
    scales = torch.ones(NUM_BLOCKS, 16, NUM_KV_HEADS)
    assert_refused("write_kv", given | {"key_scales": scales}, "key_scales")
    ops.write_kv(**given, key_scales=torch.tensor(2.0), backend="reference")


@pytest.mark.parametrize("name", ["key_pages", "value_pages"])
@pytest.mark.parametrize("op", ["write_kv", "paged_attention"])
def test_pages_whose_heads_are_not_dense_are_refused(op: str, name: str) -> None:
    given = arguments(op)
    given[name] = given[name].transpose(2, 3).contiguous().transpose(2, 3)
    error = assert_refused(op, given, name)
    assert (error.expected, error.got) == ("a stride of 1 in the last dimension", "2")


@pytest.mark.parametrize(
    "shared", [5, (None, None), SharedPrefixes(torch.zeros(1, 3).int(), torch.zeros(2).int())]
)
def test_shared_prefixes_that_are_none_are_refused(shared: Any) -> None:
    with pytest.raises(UsageError, match=r"shared_prefixes.*: expected .*, got .*, in paged_attention"):
        ops.paged_attention(**arguments("paged_attention"), shared_prefixes=shared)


@pytest.mark.parametrize("backend", ["cuda", "nonsense", "", "Reference", 5, 0, [], ["reference"]])
@pytest.mark.parametrize("op", OPS)
def test_a_backend_that_is_not_there_is_refused_before_anything_changes(op: str, backend: Any) -> None:
    given = arguments(op)
    before = {name: tensor.clone() for name, tensor in given.items()}
    with pytest.raises(BackendUnavailableError, match=r"backend: expected one .*, got "):
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
        with pytest.raises(error, match=f"expected one .*, got '{value}'"):
            getattr(ops, op)(**arguments(op))
        getattr(ops, op)(**arguments(op), backend="reference")  # an argument goes before it


@pytest.mark.parametrize(("value", "name"), [("", None), ("reference", None), ("nonsense", "reference")])
def test_a_backend_is_chosen_by_argument_then_variable_then_device(
    value: str, name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    default = ops.resolve_backend(None, cpu)
    monkeypatch.setenv("PAGEDKV_BACKEND", value)
    assert ops.resolve_backend(name, cpu) == (default if (value, name) == ("", None) else "reference")


def test_a_device_that_only_torch_knows_gets_the_reference() -> None:
    assert ops.resolve_backend(None, torch.device("meta")) == "reference"


def test_every_backend_there_is_holds_every_op() -> None:
    for name in BACKENDS:
        if ops.why_unavailable(name) is None:
            assert all(callable(getattr(load_backend(name), op)) for op in OPS)


def test_what_is_missing_is_said() -> None:
    assert ops.why_unavailable("reference") is None
    if (reason := ops.why_unavailable("cuda")) is not None:
        assert "cuda" in reason
