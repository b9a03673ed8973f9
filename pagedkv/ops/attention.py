"""paged_attention: its meaning, its arguments and their checks."""

from __future__ import annotations

from math import isfinite
from numbers import Real
from typing import Any

import torch

import pagedkv.torch_library  # noqa: F401  (registers torch.ops.pagedkv)
from pagedkv._core import attention_fits
from pagedkv.batch import SharedPrefixes
from pagedkv.checks import check_bool, check_int, show
from pagedkv.config import Backend
from pagedkv.errors import UsageError
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
    share_memory,
    size,
)

_paged_attention = torch.ops.pagedkv.paged_attention.default
_plain_attention = torch.ops.pagedkv.paged_attention.plain
WHERE = "paged_attention"
NO_OPTIONS = (None,) * 7  # the tensors of a backend's paged_attention that options come with


def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    shared_prefixes: SharedPrefixes | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attend from new tokens to the pages of their sequences; prefill, decode and all between in one batch.

    Sequence i has the queries ``[query_start_loc[i], query_start_loc[i + 1])``; they stand at its last
    positions. Means, for one query token of sequence i, at `position`, and one head::

        logits, values = [], []
        first_new = seq_lens[i] - num_queries_of_i
        for p in range(seq_lens[i]):
            if causal and p > position:
                continue
            if window and not position - window < p < position + window:
                continue
            page, offset = block_table[i, p // block_size], p % block_size
            logit = query[token, head] @ key_pages[page, offset, head // group]
            logit *= scale * key_scales[page, offset, head // group]
            if soft_cap:
                logit = soft_cap * tanh(logit / soft_cap)
            logit += alibi_slopes[head] * (p - position)
            if p >= first_new:
                if mask[token, p - first_new] is False:
                    continue
                logit += mask[token, p - first_new]  # when it holds numbers; −inf hides the key
            logits.append(logit)
            value = value_pages[page, offset, head // group]
            values.append(value * value_scales[page, offset, head // group])
        lse[token, head] = log(sum(exp(logits)) + exp(sinks[head]))
        out[token, head] = exp(logits - lse[token, head]) @ values

    A query that sees no key gives zeros, and −inf as its `lse` (or its sink).

    Parameters
    ----------
    query : Tensor [num_tokens, num_heads, head_dim]
        float32, bfloat16 or float16. `num_heads` is a multiple of `num_kv_heads`; ``group`` is the quotient.
    key_pages, value_pages : Tensor [num_blocks, block_size, num_kv_heads, head_dim]
        Of the query's dtype, or float8_e4m3fn or int8. Any strides, but 1 in the last dimension. What no
        query sees is never read.
    block_table : Tensor [num_seqs, max_blocks] int32
        Entries behind a sequence's length or in front of its window are never read.
    seq_lens : Tensor [num_seqs] int32
        Keys of each sequence, those of its queries included. A length of 0 is padding: zeros, and −inf as
        `lse`.
    query_start_loc : Tensor [num_seqs + 1] int32
        Ascends from 0. Tokens behind its last entry are padding.
    scale : float, optional
        ``head_dim ** −0.5`` by default.
    causal : bool
        Whether a query sees no key behind its own position.
    window : int, optional
        Positions that a query sees, its own included.
    soft_cap : float, optional
        Bounds the logits, before anything is added to them.
    alibi_slopes : Tensor [num_heads] float32, optional
    sinks : Tensor [num_heads] float32, optional
        A logit for each head that has no value and only enters the sum.
    mask : Tensor [num_tokens, max_new] bool or float32, optional
        Over the keys of the query's own sequence that are new in this call, in addition to `causal` and
        `window`: True for a key that is seen, or what is added to its logit. Trees of speculative tokens need
        it.
    key_scales, value_scales : Tensor float32, optional
        Of pages of 8 bits: what a stored number is multiplied by. One for all ``[]``, one a head
        ``[num_kv_heads]``, or one a token and head ``[num_blocks, block_size, num_kv_heads]``.
    shared_prefixes : SharedPrefixes, optional
        Which sequences hold the same pages, so that these are read once for all of them. Changes no bit of
        the result; ``AttentionMetadata.shared_prefixes`` has it.
    out : Tensor [num_tokens, num_heads, head_dim], optional
        Overwritten and returned; a new tensor by default. May be `query`, or lie in its memory.
    lse : Tensor [num_tokens, num_heads] float32, optional
        Overwritten with the natural logarithm of each query's sum of exponentials, for
        `merge_attention_states`.
    backend : str, optional
        "reference", "cpu", "triton" or "cuda"; by default PAGEDKV_BACKEND, or else the best for the device.

    Returns
    -------
    Tensor [num_tokens, num_heads, head_dim]

    Raises
    ------
    ShapeError
        For a tensor.
    UsageError
        For another option; by the backends "reference" and "cpu" also for tables that lead outside of the
        pages.
    BackendUnavailableError

    Notes
    -----
    The result for a query does not depend on the batch around it: not on how a prompt is cut into chunks, on
    the number of threads, on what is shared, nor on whether its pages were computed or found. Keys are taken
    in splits at fixed positions, one after the other.

    Page tables as in Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention" (2023).
    """
    tensors = query, key_pages, value_pages, block_table, seq_lens, query_start_loc
    is_traced, is_aside = needs_operator(query), False
    if is_traced or not attention_fits(*tensors, out):
        _check(*tensors)
        if out is not None:
            check_tensor("out", out, query.shape, query.dtype, query.device, WHERE)
            check_written("out", out, WHERE)
            is_aside = out is query or (not is_traced and share_memory(out, query)) or out.stride(2) != 1
        is_traced = True  # which finds a way for tensors that only stand for others, or none
    scale = query.shape[2] ** -0.5 if scale is None else _number("scale", scale, "a finite number")
    name = "" if backend is None else check_backend(backend)
    if (
        (causal is True and window is None and soft_cap is None and shared_prefixes is None)
        and (alibi_slopes is sinks is mask is key_scales is value_scales is lse is None)
        and query.stride(2) == 1
        and not is_aside
    ):
        if out is None:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if is_traced:
            _plain_attention(*tensors, out, scale, name)
        else:
            attend = choose_backend(name, query).paged_attention
            attend(*tensors, out, None, scale, True, 0, 0.0, *NO_OPTIONS)
        return out
    if window is not None:
        window = check_int("window", window, 1, 2**31 - 1, f", in {WHERE}")
    if soft_cap is not None:
        soft_cap = _number("soft_cap", soft_cap, "a finite number above 0", above=0.0)
    if causal is not True:
        causal = check_bool("causal", causal)
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes, query.shape[1:2], torch.float32, query.device, WHERE)
    if sinks is not None:
        check_tensor("sinks", sinks, query.shape[1:2], torch.float32, query.device, WHERE)
    if mask is not None:
        dtypes = torch.bool, torch.float32
        check_tensor("mask", mask, (query.shape[0], size(mask, 1, 2)), dtypes, query.device, WHERE)
    if key_scales is not None:
        check_scales("key_scales", key_scales, key_pages, WHERE)
        key_scales = expand_scales(key_scales, key_pages)
    if value_scales is not None:
        check_scales("value_scales", value_scales, value_pages, WHERE)
        value_scales = expand_scales(value_scales, value_pages)
    groups, rows = (None, None) if shared_prefixes is None else _prefixes(shared_prefixes, query.device)
    if lse is not None:
        check_tensor("lse", lse, query.shape[:2], torch.float32, query.device, WHERE)
        check_written("lse", lse, WHERE)

    # A kernel may write before it has read every query, and takes only dense heads.
    given = None
    if out is None or is_aside or out.stride(2) != 1:
        given, out = out, torch.empty_like(query, memory_format=torch.contiguous_format)
    if query.stride(2) != 1:
        query = query.contiguous()
    arguments = (
        *(query, key_pages, value_pages, block_table, seq_lens, query_start_loc, out, lse),
        *(scale, causal, window or 0, soft_cap or 0.0, alibi_slopes, sinks, mask, key_scales, value_scales),
        *(groups, rows),
    )
    if is_traced:
        _paged_attention(*arguments, name)
    else:
        choose_backend(name, query).paged_attention(*arguments)
    if given is None:
        return out
    with torch.no_grad():
        return given.copy_(out)


def _check(
    query: Any, key_pages: Any, value_pages: Any, block_table: Any, seq_lens: Any, starts: Any
) -> None:
    """Check what every call has, one by one, and name the first that does not fit."""
    check_pages(key_pages, value_pages, WHERE)
    num_kv_heads, head_dim = key_pages.shape[2:]
    device, dtype = key_pages.device, key_pages.dtype
    num_tokens, num_heads = size(query, 0, 3), size(query, 1, 3)
    dtypes = FLOATS if dtype in EIGHT_BITS else dtype
    check_tensor("query", query, (num_tokens, num_heads, head_dim), dtypes, device, WHERE)
    if num_heads == 0 or num_heads % num_kv_heads:
        refuse("query", f"a multiple of {num_kv_heads} heads", f"{num_heads}", WHERE)
    num_seqs, max_blocks = size(seq_lens, 0, 1), size(block_table, 1, 2)
    check_tensor("seq_lens", seq_lens, (num_seqs,), torch.int32, device, WHERE)
    check_tensor("block_table", block_table, (num_seqs, max_blocks), torch.int32, device, WHERE)
    check_tensor("query_start_loc", starts, (num_seqs + 1,), torch.int32, device, WHERE)


def _prefixes(shared: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(shared, SharedPrefixes):
        raise UsageError(f"shared_prefixes: expected SharedPrefixes, got {show(shared)}, in {WHERE}")
    groups, rows = shared
    check_tensor("shared_prefixes.groups", groups, (size(groups, 0, 2), 4), torch.int32, device, WHERE)
    check_tensor("shared_prefixes.rows", rows, (size(rows, 0, 1),), torch.int32, device, WHERE)
    return groups, rows


def _number(name: str, value: Any, what: str, above: float | None = None) -> float:
    if type(value) is not float and (not isinstance(value, Real) or isinstance(value, bool)):
        raise UsageError(f"{name}: expected {what}, got {show(value)}, in {WHERE}")
    number = float(value)
    if not isfinite(number) or (above is not None and number <= above):
        raise UsageError(f"{name}: expected {what}, got {show(value)}, in {WHERE}")
    return number
