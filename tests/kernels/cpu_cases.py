"""Batches over pages for the tests of the CPU kernels, and what attention over them means, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pagedkv import _core
from pagedkv.kernels import cpu

RUNNABLE_ISAS = [name for name, reason in _core.cpu_isas().items() if not reason]
"""The instruction sets that this machine has."""


@dataclass(frozen=True)
class Case:
    """The arguments of one paged_attention call."""

    query: torch.Tensor
    key_pages: torch.Tensor
    value_pages: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def given(self, **options: Any) -> Case:
        return replace(self, options={**self.options, **options})

    def option(self, name: str, default: Any = None) -> Any:
        return self.options.get(name, default)


def make_case(
    seq_lens: Sequence[int],
    num_new: Sequence[int],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    page_dtype: torch.dtype | None = None,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    layout: str = "NHD",
    num_padding: int = 0,
    poisoned: bool = True,
    **options: Any,
) -> Case:
    """Draw a batch on scattered pages; unused table entries are −1, unwritten slots NaN if `poisoned`."""
    generator = torch.Generator().manual_seed(seed)
    page_dtype = page_dtype or dtype
    num_pages = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(num_pages) + 3
    page_ids = torch.randperm(num_blocks, generator=generator).tolist()
    block_table = torch.full((len(seq_lens), max(num_pages, default=0) + 1), -1, dtype=torch.int32)
    for row, count in enumerate(num_pages):
        block_table[row, :count] = torch.tensor([page_ids.pop() for _ in range(count)], dtype=torch.int32)

    def pages() -> torch.Tensor:
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        numbers = torch.randn(shape, generator=generator)
        if page_dtype.itemsize == 1:
            numbers = numbers * 30
        if page_dtype.is_floating_point and poisoned:
            numbers[torch.tensor(page_ids)] = math.nan
            for row, seq_len in enumerate(seq_lens):
                if seq_len % block_size:
                    numbers[block_table[row, seq_len // block_size].item(), seq_len % block_size :] = math.nan
        numbers = numbers.to(page_dtype)
        return numbers if layout == "NHD" else numbers.transpose(1, 2).contiguous().transpose(1, 2)

    starts = torch.tensor([0, *num_new]).cumsum(0).to(torch.int32)
    num_tokens = sum(num_new) + num_padding
    query = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype)
    lens = torch.tensor(list(seq_lens), dtype=torch.int32)
    return Case(query, pages(), pages(), block_table, lens, starts, options)


def attend(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel into poisoned outputs; return them."""
    out = torch.full_like(case.query, math.nan)
    lse = torch.full(case.query.shape[:2], math.nan)
    cpu.paged_attention(
        case.query,
        case.key_pages,
        case.value_pages,
        case.block_table,
        case.seq_lens,
        case.query_start_loc,
        out,
        lse,
        case.option("scale", case.query.shape[-1] ** -0.5),
        case.option("causal", True),
        case.option("window", 0),
        case.option("soft_cap", 0.0),
        case.option("alibi_slopes"),
        case.option("sinks"),
        case.option("mask"),
        case.option("key_scales"),
        case.option("value_scales"),
        case.option("prefix_groups"),
        case.option("prefix_rows"),
    )
    return out, lse


def attend_plainly(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same in float64, query by query and head by head."""
    num_heads, head_dim = case.query.shape[1:]
    group = num_heads // case.key_pages.shape[2]
    out = torch.zeros(case.query.shape, dtype=torch.float64)
    lse = torch.full(case.query.shape[:2], -math.inf, dtype=torch.float64)
    starts = case.query_start_loc.tolist()
    for row, seq_len in enumerate(case.seq_lens.tolist()):
        if seq_len == 0:
            continue
        first_new = seq_len - (starts[row + 1] - starts[row])
        for token in range(starts[row], starts[row + 1]):
            position = first_new + token - starts[row]
            seen, added = seen_keys(case, token, position, first_new, seq_len)
            keys, values = (_read(case, kind, row, seen) for kind in ("key", "value"))
            for head in range(num_heads):
                logits = keys[:, head // group] @ case.query[token, head].double()
                logits *= case.option("scale", head_dim**-0.5)
                if cap := case.option("soft_cap", 0.0):
                    logits = cap * torch.tanh(logits / cap)
                if (slopes := case.option("alibi_slopes")) is not None:
                    logits += slopes[head].double() * (seen - position)
                logits += added
                if (sinks := case.option("sinks")) is not None:
                    logits = torch.cat([logits, sinks[head : head + 1].double()])
                if not len(logits):
                    continue
                lse[token, head] = logits.logsumexp(0)
                weights = (logits - lse[token, head]).exp()[: len(seen)]
                out[token, head] = weights @ values[:, head // group]
    return out, lse


def seen_keys(
    case: Case, token: int, position: int, first_new: int, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions that a query sees, and what the mask adds to each."""
    keys = torch.arange(seq_len)
    seen = keys <= position if case.option("causal", True) else keys >= 0
    if window := case.option("window", 0):
        seen &= (keys - position).abs() < window
    added = torch.zeros(seq_len, dtype=torch.float64)
    mask = case.option("mask")
    if mask is not None:
        new = mask[token, : seq_len - first_new]
        added[first_new:] = torch.where(new, 0.0, -math.inf) if mask.dtype == torch.bool else new
    seen &= added != -math.inf
    return keys[seen], added[seen]


def _read(case: Case, kind: str, row: int, at: torch.Tensor) -> torch.Tensor:
    pages = case.key_pages if kind == "key" else case.value_pages
    block_size = pages.shape[1]
    places = case.block_table[row].long()[at // block_size], at % block_size
    bits = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages
    numbers = bits[places].view(pages.dtype).double()
    scales = case.option(f"{kind}_scales")
    return numbers if scales is None else numbers * scales[places].double()[..., None]


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ‖out − expected‖ / ‖expected‖."""
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )
