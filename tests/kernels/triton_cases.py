"""What tests of the Triton kernels share: batches over scattered pages, and attention by its definition.

Imported only by modules that have found Triton to work here, on a GPU or in its interpreter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'pagedkv[triton]'")
import triton
import triton.language as tl

from pagedkv.kernels import triton as backend
from pagedkv.kernels.triton.launching import INTERPRETING

if backend.why_unavailable() is not None:
    pytest.skip(f"no Triton kernels here: {backend.why_unavailable()}", allow_module_level=True)
if INTERPRETING:
    from triton_interpreter import patch_interpreter

    patch_interpreter()

__all__ = [
    "DEVICE",
    "LARGEST",
    "NAN",
    "Batch",
    "attend",
    "backend",
    "check",
    "expected",
    "make_batch",
    "tl",
    "triton",
]
DEVICE = "cpu" if INTERPRETING else "cuda"
NAN = float("nan")
# Relative to the norm of the right answer. On a GPU float32 products are made of three of tf32.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


class Batch(NamedTuple):
    """Tensors as a backend is given them, and the same K and V as lists of tokens in float64."""

    query: torch.Tensor
    key_pages: torch.Tensor
    value_pages: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scales: tuple[torch.Tensor | None, torch.Tensor | None]
    keys: list[np.ndarray]
    values: list[np.ndarray]


def make_batch(
    lens: list[int],
    queries: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    page_dtype: torch.dtype | None = None,
    scales: str = "token",
    layout: str = "block NHD",
    garbage: float = NAN,
    num_padding: int = 0,
    shared_blocks: int = 0,
    seed: int = 0,
) -> Batch:
    """Scatter sequences over pages that hold garbage wherever no sequence has a token.

    The first `shared_blocks` blocks are the same pages in every sequence that is long enough. `scales` are
    for pages of 8 bits: "none", "tensor", "head" or "token".
    """
    rng = np.random.default_rng(seed)
    page_dtype = page_dtype or dtype
    num_blocks = [-(-n // block_size) for n in lens]
    total = sum(num_blocks) + 3  # three pages are nobody's
    pages = _empty_pages(layout, total, block_size, num_kv_heads, head_dim, page_dtype)
    if page_dtype == torch.int8:
        pages.fill_(-128)
    else:
        pages.copy_(torch.full((), garbage))
    shape = {"tensor": (), "head": (num_kv_heads,), "token": (total, block_size, num_kv_heads)}.get(scales)
    given: list[Any] = [None, None]
    if page_dtype in LARGEST and shape is not None:
        drawn = [rng.uniform(0.5, 2.0, shape).astype(np.float32) / 64 for _ in "kv"]
        given = [torch.as_tensor(x, device=DEVICE).expand(total, block_size, num_kv_heads) for x in drawn]
    ids = rng.permutation(total).tolist()
    table = np.full((len(lens), max(num_blocks, default=0) + 1), -1, np.int32)
    keys, values = [], []
    for i, length in enumerate(lens):
        shared = min(shared_blocks, length // block_size)
        table[i, :shared] = table[0, :shared] if i else [ids.pop() for _ in range(shared)]
        table[i, shared : num_blocks[i]] = [ids.pop() for _ in range(num_blocks[i] - shared)]
        for which, tokens in enumerate((keys, values)):
            new = torch.from_numpy(rng.normal(size=(length, num_kv_heads, head_dim)))
            new = (new * 40).round().clamp(-127, 127) if page_dtype == torch.int8 else new
            stored = new.to(page_dtype)
            for block in range(num_blocks[i]):
                page = int(table[i, block])
                begin, end = block * block_size, min((block + 1) * block_size, length)
                if i == 0 or block >= shared:
                    pages[which, page, : end - begin] = stored[begin:end]
                stored[begin:end] = pages[which, page, : end - begin].cpu()
            places = table[i, np.arange(length) // block_size], np.arange(length) % block_size
            factor = 1.0 if given[which] is None else given[which].cpu()[places].double().numpy()[..., None]
            tokens.append(stored.double().numpy() * factor)
    starts = np.cumsum([0, *queries]).astype(np.int32)
    query = torch.from_numpy(rng.normal(size=(int(starts[-1]) + num_padding, num_heads, head_dim))).to(dtype)
    return Batch(
        query.to(DEVICE),
        pages[0],
        pages[1],
        torch.from_numpy(table).to(DEVICE),
        torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        torch.from_numpy(starts).to(DEVICE),
        (given[0], given[1]),
        keys,
        values,
    )


def _empty_pages(
    layout: str, total: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype
) -> Any:
    """[2, num_blocks, block_size, num_kv_heads, head_dim], with strides as the layout has them."""
    arrangement, order = layout.split()
    inner = (block_size, heads) if order == "NHD" else (heads, block_size)
    if arrangement == "block":  # layer 1 of 3
        pages = torch.empty(total, 3, 2, *inner, head_dim, dtype=dtype, device=DEVICE)[:, 1].transpose(0, 1)
    else:
        pages = torch.empty(3, 2, total, *inner, head_dim, dtype=dtype, device=DEVICE)[1]
    return pages if order == "NHD" else pages.transpose(2, 3)


def attend(batch: Batch, groups: Any = (None, None), **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels on outputs full of NaN."""
    out = torch.full_like(batch.query, NAN)
    lse = torch.full(batch.query.shape[:2], NAN, device=DEVICE)
    tensors = {
        name: torch.as_tensor(options[name]).to(DEVICE) if options.get(name) is not None else None
        for name in ("alibi_slopes", "sinks", "mask")
    }
    backend.paged_attention(
        *batch[:6], out, lse,
        options.get("scale", batch.query.shape[-1] ** -0.5), options.get("causal", True),
        options.get("window", 0), options.get("soft_cap", 0.0), *tensors.values(), *batch.scales, *groups,
    )  # fmt: skip
    return out.cpu(), lse.cpu()


def expected(batch: Batch, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return `out` and `lse` by the definition, in float64."""
    num_tokens, num_heads, head_dim = batch.query.shape
    group = num_heads // batch.key_pages.shape[2]
    out, lse = np.zeros((num_tokens, num_heads, head_dim)), np.full((num_tokens, num_heads), -np.inf)
    starts = batch.query_start_loc.tolist()
    query = batch.query.double().cpu().numpy()
    slopes, sinks, mask = (options.get(name) for name in ("alibi_slopes", "sinks", "mask"))
    cap, window = options.get("soft_cap", 0.0), options.get("window", 0)
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        if seq_len == 0:
            continue
        first_new = seq_len - (starts[row + 1] - starts[row])
        position = np.arange(seq_len)
        for token in range(starts[row], starts[row + 1]):
            at = first_new + token - starts[row]
            seen = position <= at if options.get("causal", True) else position >= 0
            if window:
                seen = seen & (abs(position - at) < window)
            added = np.zeros(seq_len)
            if mask is not None:
                new = np.asarray(mask)[token, : seq_len - first_new]
                if new.dtype == bool:
                    seen = seen & np.concatenate([np.ones(first_new, bool), new])
                else:
                    added[first_new:] = new
            for head in range(num_heads):
                logits = batch.keys[row][:, head // group] @ query[token, head]
                logits = logits * options.get("scale", head_dim**-0.5)
                if cap:
                    logits = cap * np.tanh(logits / cap)
                if slopes is not None:
                    logits = logits + float(slopes[head]) * (position - at)
                logits = np.where(seen, logits + added, -np.inf)
                sink = -np.inf if sinks is None else float(sinks[head])
                top = max(logits.max(), sink)
                if top == -np.inf:
                    continue
                weights = np.exp(logits - top)
                total = weights.sum() + np.exp(sink - top)
                out[token, head] = weights @ batch.values[row][:, head // group] / total
                lse[token, head] = top + np.log(total)
    return out, lse


def check(batch: Batch, groups: Any = (None, None), **options: Any) -> None:
    """Compare the kernels with the definition."""
    out, lse = attend(batch, groups, **options)
    right, right_lse = expected(batch, **options)
    bound = BOUNDS[batch.query.dtype]
    error = np.linalg.norm(out.double().numpy() - right) / max(np.linalg.norm(right), 1e-30)
    assert error <= bound, f"relative error {error:.2e}"
    np.testing.assert_allclose(lse.numpy(), right_lse, rtol=1e-5, atol=1e-5)
    assert not out[batch.query_start_loc[-1] :].any()
