"""write_kv: new K and V into pages, quantised where these hold 8 bits."""

from __future__ import annotations

from typing import Any

import torch

import pagedkv.torch_library  # noqa: F401  (registers torch.ops.pagedkv)
from pagedkv._core import write_kv_fits
from pagedkv.config import Backend
from pagedkv.kernels import check_backend, choose_backend
from pagedkv.ops.calling import needs_operator
from pagedkv.ops.checks import (
    EIGHT_BITS,
    FLOATS,
    check_pages,
    check_scales,
    check_tensor,
    check_written,
    expand_scales,
    refuse,
    size,
)

_write_kv = torch.ops.pagedkv.write_kv.default
WHERE = "write_kv"


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """Write the K and V of new tokens into one layer's pages.

    Means, and the same for V::

        for token, slot in enumerate(slot_mapping):
            if slot < 0:
                continue
            page, offset = slot // block_size, slot % block_size
            for head in range(num_kv_heads):
                x = key[token, head]
                if key_scales.ndim == 3:  # computed here, one for each token and head
                    key_scales[page, offset, head] = max(abs(x)) / largest  # 448 or, in int8, 127
                x = x / key_scales[page, offset, head]  # 0 where the scale is 0
                key_pages[page, offset, head] = saturate(round_to_nearest_even(x))

    where pages of 16 or 32 bits, which have no scales, take `x` as it is.

    Parameters
    ----------
    key, value : Tensor [num_tokens, num_kv_heads, head_dim]
        Of the pages' device and dtype. For pages of 8 bits float32, bfloat16 or float16, which is quantised,
        or the pages' own dtype, which is stored as it is, scales or not.
    key_pages, value_pages : Tensor [num_blocks, block_size, num_kv_heads, head_dim]
        float32, bfloat16, float16, float8_e4m3fn or int8. Any strides, but 1 in the last dimension. Modified.
    slot_mapping : Tensor [num_tokens] int64
        ``page · block_size + offset``; −1 skips a token. A slot that occurs twice gets either token.
    key_scales, value_scales : Tensor float32, optional
        Only for pages of 8 bits; 1 without. One scale for all ``[]``, or one a head ``[num_kv_heads]``, is
        given and divided by. One a token and head ``[num_blocks, block_size, num_kv_heads]`` is computed, and
        modified; but if its tokens are one in memory (a stride of 0) it is given too.
    backend : str, optional
        As in `paged_attention`.

    Raises
    ------
    ShapeError
    UsageError
        By the backends "reference" and "cpu" for a slot outside of the pages.
    BackendUnavailableError
    """
    is_traced = needs_operator(key)
    if is_traced or not write_kv_fits(key, value, key_pages, value_pages, slot_mapping):
        _check(key, value, key_pages, value_pages, slot_mapping)
        is_traced = True  # which finds a way for tensors that only stand for others, or none
    if key_scales is not None:
        _check_scales("key_scales", key_scales, key_pages, key.dtype)
        key_scales = expand_scales(key_scales, key_pages)
    if value_scales is not None:
        _check_scales("value_scales", value_scales, value_pages, key.dtype)
        value_scales = expand_scales(value_scales, value_pages)
    if key.stride(2) != 1:
        key = key.contiguous()
    if value.stride(2) != 1:
        value = value.contiguous()
    name = "" if backend is None else check_backend(backend)
    arguments = key, value, key_pages, value_pages, slot_mapping, key_scales, value_scales
    if is_traced:
        _write_kv(*arguments, name)
    else:
        choose_backend(name, key).write_kv(*arguments)


def _check(key: Any, value: Any, key_pages: Any, value_pages: Any, slot_mapping: Any) -> None:
    """Check what every call has, one by one, and name the first that does not fit."""
    check_pages(key_pages, value_pages, WHERE)
    heads, device, dtype = tuple(key_pages.shape[2:]), key_pages.device, key_pages.dtype
    num_tokens = size(slot_mapping, 0, 1)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, device, WHERE)
    dtypes = (*FLOATS, dtype) if dtype in EIGHT_BITS else (dtype,)
    check_tensor("key", key, (num_tokens, *heads), dtypes, device, WHERE)
    check_tensor("value", value, (num_tokens, *heads), key.dtype, device, WHERE)
    check_written("key_pages", key_pages, WHERE)
    check_written("value_pages", value_pages, WHERE)


def _check_scales(name: str, scales: Any, pages: torch.Tensor, token_dtype: torch.dtype) -> None:
    check_scales(name, scales, pages, WHERE)
    if scales.ndim != 3 or scales.stride(1) == 0:
        return
    if token_dtype in EIGHT_BITS:
        refuse(
            name, "scales that are given, for tokens that are quantised already", "one for each token", WHERE
        )
    check_written(name, scales, WHERE)
