"""The structs of ``csrc/include/pagedkv/kernels.h``, field by field."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import Structure, c_bool, c_float, c_int32, c_int64, c_void_p

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3, torch.int8: 4}
MAX_DIMS = 8
"""Of a block whose bytes are not one run."""

_Dims = c_int64 * MAX_DIMS


class PagesView(Structure):
    """K or V pages; strides in elements."""

    _fields_ = (
        ("data", c_void_p),
        ("block_stride", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
    )


class ScalesView(Structure):
    """Scales of pages; no data: all are 1."""

    _fields_ = PagesView._fields_


class TokensView(Structure):
    """New tokens."""

    _fields_ = (("data", c_void_p), ("token_stride", c_int64), ("head_stride", c_int64))


class BlocksView(Structure):
    """Blocks of any shape; strides in bytes, sizes and strides with the outermost dimension first."""

    _fields_ = (
        ("data", c_void_p),
        ("num_blocks", c_int64),
        ("block_stride", c_int64),
        ("run_bytes", c_int64),
        ("num_dims", c_int32),
        ("sizes", _Dims),
        ("strides", _Dims),
    )


class WriteKvParams(Structure):
    """Arguments of write_kv."""

    _fields_ = (
        ("key", TokensView),
        ("value", TokensView),
        ("key_pages", PagesView),
        ("value_pages", PagesView),
        ("key_scales", ScalesView),
        ("value_scales", ScalesView),
        ("slot_mapping", c_void_p),
        ("num_tokens", c_int64),
        ("num_blocks", c_int64),
        ("block_size", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("token_dtype", c_int32),
        ("page_dtype", c_int32),
    )


class AttentionParams(Structure):
    """Arguments of paged_attention."""

    _fields_ = (
        ("query", TokensView),
        ("out", TokensView),
        ("lse", c_void_p),
        ("lse_token_stride", c_int64),
        ("lse_head_stride", c_int64),
        ("key_pages", PagesView),
        ("value_pages", PagesView),
        ("key_scales", ScalesView),
        ("value_scales", ScalesView),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("seq_lens", c_void_p),
        ("query_start_loc", c_void_p),
        ("alibi_slopes", c_void_p),
        ("sinks", c_void_p),
        ("bool_mask", c_void_p),
        ("float_mask", c_void_p),
        ("mask_stride", c_int64),
        ("prefix_groups", c_void_p),
        ("prefix_rows", c_void_p),
        ("num_groups", c_int64),
        ("num_prefix_rows", c_int64),
        ("num_tokens", c_int64),
        ("num_seqs", c_int64),
        ("max_blocks", c_int64),
        ("num_blocks", c_int64),
        ("max_new", c_int64),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int32),
        ("causal", c_bool),
        ("query_dtype", c_int32),
        ("page_dtype", c_int32),
    )


class CopyBlocksParams(Structure):
    """Arguments of copy_blocks."""

    _fields_ = (
        ("blocks", BlocksView),
        ("sources", c_void_p),
        ("destinations", c_void_p),
        ("num_copies", c_int64),
    )


class MoveBlocksParams(Structure):
    """Arguments of gather_blocks and scatter_blocks."""

    _fields_ = (("blocks", BlocksView), ("buffer", BlocksView), ("block_ids", c_void_p))


class MergeStatesParams(Structure):
    """Arguments of merge_attention_states."""

    _fields_ = (
        ("outs", c_void_p),
        ("outs_state_stride", c_int64),
        ("outs_token_stride", c_int64),
        ("outs_head_stride", c_int64),
        ("lses", c_void_p),
        ("lses_state_stride", c_int64),
        ("lses_token_stride", c_int64),
        ("lses_head_stride", c_int64),
        ("out", TokensView),
        ("lse", c_void_p),
        ("lse_token_stride", c_int64),
        ("lse_head_stride", c_int64),
        ("num_states", c_int64),
        ("num_tokens", c_int64),
        ("num_heads", c_int32),
        ("head_dim", c_int32),
        ("dtype", c_int32),
    )


_VIEWS: tuple[type[Structure], ...] = (PagesView, ScalesView, TokensView)
_IN_FULL: tuple[type[Structure], ...] = (
    BlocksView,
    WriteKvParams,
    AttentionParams,
    CopyBlocksParams,
    MoveBlocksParams,
    MergeStatesParams,
)


def numbers() -> list[int]:
    """Return what `pagedkv_cuda_abi` has to answer: sizes of all structs and offsets of their fields."""
    return list(_numbers())


def _numbers() -> Iterator[int]:
    for view in _VIEWS:
        yield ctypes.sizeof(view)
        yield getattr(view, view._fields_[-1][0]).offset
    for struct in _IN_FULL:
        yield ctypes.sizeof(struct)
        for name, *_ in struct._fields_:
            yield getattr(struct, name).offset
