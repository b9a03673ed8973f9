"""How the core reads tensors: what it lets pass is right, and every torch is understood."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import ShapeError, ops
from pagedkv._core import attention_fits, write_kv_fits
from pagedkv.ops import attention, writing
from pagedkv.ops.checks import check_tensor

INT32 = torch.int32
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, INT32, torch.int64, torch.bool]


def attention_tensors(num_tokens: int = 3, num_seqs: int = 2, dtype: Any = torch.float32) -> list[Any]:
    return [
        torch.zeros(num_tokens, 4, 16, dtype=dtype),
        torch.zeros(5, 8, 2, 16, dtype=dtype),
        torch.zeros(5, 8, 2, 16, dtype=dtype),
        torch.zeros(num_seqs, 3, dtype=INT32),
        torch.zeros(num_seqs, dtype=INT32),
        torch.zeros(num_seqs + 1, dtype=INT32),
        torch.zeros(num_tokens, 4, 16, dtype=dtype),
    ]


def write_tensors() -> list[Any]:
    pages = [torch.zeros(5, 8, 2, 16) for _ in "kv"]
    return [*(torch.zeros(3, 2, 16) for _ in "kv"), *pages, torch.zeros(3, dtype=torch.int64)]


@st.composite
def broken(draw: st.DrawFn, tensors: list[Any]) -> list[Any]:
    """Change up to two of the tensors in one respect each; sometimes that does no harm."""
    for _ in range(draw(st.integers(0, 2))):
        i = draw(st.integers(0, len(tensors) - 1))
        tensor = tensors[i]
        if not isinstance(tensor, torch.Tensor):
            continue
        kind = draw(st.sampled_from(["dtype", "size", "ndim", "strides", "meta", "no tensor"]))
        if kind == "dtype":
            tensor = tensor.to(draw(st.sampled_from(DTYPES)))
        elif kind == "size" and tensor.ndim:
            dim = draw(st.integers(0, tensor.ndim - 1))
            size = draw(st.integers(0, 2 * tensor.shape[dim]))
            tensor = tensor.new_zeros([*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]])
        elif kind == "ndim":
            tensor = tensor[None] if draw(st.booleans()) or not tensor.ndim else tensor.sum(0)
        elif kind == "strides":
            tensor = torch.stack([tensor] * 2, -1)[..., 0]
        elif kind == "meta":
            tensor = tensor.to("meta")
        elif kind == "no tensor":
            values = [] if tensor.is_meta else [tensor.tolist()]
            tensor = draw(st.sampled_from([None, 3, "x", np.zeros(tensor.shape), *values]))
        tensors[i] = tensor
    return tensors


@given(data=st.data())
def test_what_the_core_lets_pass_the_checks_let_pass(data: st.DataObject) -> None:
    *tensors, out = data.draw(broken(attention_tensors()))
    if attention_fits(*tensors, out):
        attention._check(*tensors)
        if out is not None:
            check_tensor("out", out, tensors[0].shape, tensors[0].dtype, tensors[0].device, "a test")
    given_tensors = data.draw(broken(write_tensors()))
    if write_kv_fits(*given_tensors):
        writing._check(*given_tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_an_ordinary_call_passes_at_once(dtype: torch.dtype, page_dtype: torch.dtype | None) -> None:
    tensors = attention_tensors(dtype=dtype)
    if page_dtype is not None:
        tensors[1:3] = (pages.to(page_dtype) for pages in tensors[1:3])
    assert attention_fits(*tensors)
    tensors[0] = torch.nn.Parameter(tensors[0])
    assert attention_fits(*tensors[:-1], None)
    assert attention_fits(*attention_tensors(0, 0, dtype))
    assert write_kv_fits(*write_tensors())


def test_what_only_looks_like_a_tensor_is_named() -> None:
    tensors = attention_tensors()[:-1]
    tensors[3] = np.zeros((2, 3), np.int32)
    with pytest.raises(ShapeError, match=r"block_table: expected a tensor .*, got ndarray"):
        ops.paged_attention(*tensors)


def test_options_may_have_any_strides() -> None:
    torch.manual_seed(0)
    query, keys, values = torch.randn(5, 4, 16), *torch.randn(2, 6, 8, 2, 16)
    ints = [torch.tensor(x, dtype=INT32) for x in ([[1, 2, 0], [4, 5, 3]], [9, 20], [0, 2, 5])]
    dense: dict[str, Any] = {
        "alibi_slopes": torch.rand(4),
        "sinks": torch.rand(4),
        "mask": torch.randn(5, 3),
        "lse": torch.empty(5, 4),
    }

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor, torch.full_like(tensor, 77)], -1)[..., 0]

    want = ops.paged_attention(query, keys, values, *ints, **dense)
    options = {name: apart(tensor) for name, tensor in dense.items()}
    got = ops.paged_attention(query, keys, values, *map(apart, ints), **options)
    assert torch.equal(got, want)
    assert torch.equal(options["lse"], dense["lse"])
    dense["mask"], options["mask"] = dense["mask"] > 0, apart(dense["mask"] > 0)
    want = ops.paged_attention(query, keys, values, *ints, **dense)
    assert torch.equal(ops.paged_attention(query, keys, values, *ints, **options), want)


@pytest.mark.slow
def test_a_torch_without_the_table_of_functions_is_asked_by_its_methods() -> None:
    code = """
import sys, pytest, torch
del torch.Tensor.__dlpack_c_exchange_api__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not slow", *sys.argv[1:]]))
"""
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no such table: every test is this one")
    here = Path(__file__).parent
    tests = [str(here / "test_ops.py"), str(here / "test_tensor_views.py")]
    chosen = "(cpu or tensor_views) and not without_the_table"
    command = [sys.executable, "-c", code, "-k", chosen, *tests]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
