"""Checks of tensors; a message is only made when one fails."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from pagedkv.errors import ShapeError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)


def check_tensor(
    name: str,
    tensor: Any,
    shape: tuple[int, ...],
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
    where: str,
) -> None:
    """Check shape (−1: any size), dtype and device.

    Raises
    ------
    ShapeError
    """
    dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if not isinstance(tensor, torch.Tensor):
        refuse(name, f"a tensor {_describe(shape, dtypes, device)}", kind(tensor), where)
    got = tensor.shape
    fits = got == shape or (len(shape) == len(got) and all(map(_fits, shape, got)))
    if not (fits and tensor.dtype in dtypes and tensor.device == device):
        refuse(name, _describe(shape, dtypes, device), kind(tensor), where)
    if tensor.layout is not torch.strided:
        refuse(name, "a dense tensor", str(tensor.layout), where)


def check_written(name: str, tensor: torch.Tensor, where: str) -> None:
    """Check that no two numbers of what is written are one in memory, as far as strides of 0 tell.

    Raises
    ------
    ShapeError
    """
    steps = tensor.stride()
    if 0 in steps and any(step == 0 and length > 1 for step, length in zip(steps, tensor.shape, strict=True)):
        refuse(name, "memory for each of its numbers", f"an expanded tensor of strides {list(steps)}", where)


def share_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are parts of one storage."""
    return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)


def check_pages(key_pages: Any, value_pages: Any, where: str) -> None:
    """Check that K and V are pages, and alike.

    Raises
    ------
    ShapeError
    """
    if not isinstance(key_pages, torch.Tensor) or key_pages.ndim != 4 or key_pages.numel() == 0:
        expected = "a tensor [num_blocks, block_size, num_kv_heads, head_dim], none of them 0"
        refuse("key_pages", expected, kind(key_pages), where)
    device = key_pages.device
    check_tensor("key_pages", key_pages, tuple(key_pages.shape), FLOATS + EIGHT_BITS, device, where)
    check_tensor("value_pages", value_pages, tuple(key_pages.shape), key_pages.dtype, device, where)
    for name, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        if pages.stride(3) != 1 and pages.shape[3] > 1:
            refuse(name, "a stride of 1 in the last dimension", str(pages.stride(3)), where)


def check_scales(name: str, scales: Any, pages: torch.Tensor, where: str) -> None:
    """Check the scales of pages that have been checked.

    Raises
    ------
    ShapeError
    """
    if pages.dtype not in EIGHT_BITS:
        refuse(name, f"None for pages of {dtype_name(pages.dtype)}", kind(scales), where)
    shape = tuple(pages.shape[:3])
    ndim = scales.ndim if isinstance(scales, torch.Tensor) else 3
    if ndim not in (0, 1, 3):
        what = f"a scale, one for each of {shape[2]} heads, or {list(shape)}"
        refuse(name, what, kind(scales), where)
    check_tensor(name, scales, shape[3 - ndim :], torch.float32, pages.device, where)


def expand_scales(scales: torch.Tensor | None, pages: torch.Tensor) -> torch.Tensor | None:
    """Scales that fit, in the one form that kernels know: ``[num_blocks, block_size, num_kv_heads]``."""
    if scales is None or scales.ndim == 3:
        return scales
    # Not by `expand`, which gives a block of one token a stride; without one they are given, not computed.
    return scales.as_strided(pages.shape[:3], (0, 0, scales.stride(0) if scales.ndim else 0))


def size(tensor: Any, dim: int, ndim: int) -> int:
    """Return a size that others are checked against; −1 (any) if `tensor` will be refused anyway."""
    return tensor.shape[dim] if isinstance(tensor, torch.Tensor) and tensor.ndim == ndim else -1


def kind(value: Any) -> str:
    """Say what a value is: a tensor's shape, dtype and device, or a type."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return _describe(tuple(value.shape), (value.dtype,), value.device)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without torch's."""
    return str(dtype).removeprefix("torch.")


def refuse(name: str, expected: str, got: str, where: str) -> NoReturn:
    """Raise a ShapeError."""
    raise ShapeError(f"{name}: expected {expected}, got {got}, in {where}", name, expected, got)


def _fits(want: int, got: int) -> bool:
    return want in (-1, got)


def _describe(shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device) -> str:
    sizes = ", ".join("any" if number == -1 else str(number) for number in shape)
    return f"[{sizes}] {' or '.join(map(dtype_name, dtypes))} on {device}"
