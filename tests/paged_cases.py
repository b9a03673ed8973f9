"""Batches for paged_attention with every option, and what the definition says of them, in float64.

Shares no code with the package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float64]
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""‖out − expected‖ / ‖expected‖."""


@dataclass
class Options:
    scale: float = 0.25
    causal: bool = True
    window: int = 0
    soft_cap: float = 0.0
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


@dataclass
class Case:
    """Sequences of (length, queries); `padding` tokens belong to none."""

    shapes: list[tuple[int, int]]
    num_kv_heads: int = 2
    group: int = 2
    dim: int = 32
    dtype: torch.dtype = torch.float32
    page_dtype: torch.dtype | None = None
    block_size: int = 16
    heads_first: bool = False
    padding: int = 0
    garbage: float = float("nan")
    seed: int = 0
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        page_dtype = self.page_dtype or self.dtype
        sizes = [-(-length // self.block_size) for length, _ in self.shapes]
        num_blocks = sum(sizes) + 2
        ids = torch.randperm(num_blocks, generator=generator).tolist()
        self.table = torch.full((len(self.shapes), max(sizes, default=0) + 1), -1, dtype=torch.int32)
        for row, size in enumerate(sizes):
            self.table[row, :size] = torch.tensor([ids.pop() for _ in range(size)], dtype=torch.int32)
        starts = [0, *np.cumsum([queries for _, queries in self.shapes]).tolist()]
        self.starts = torch.tensor(starts, dtype=torch.int32)
        self.lens = torch.tensor([length for length, _ in self.shapes], dtype=torch.int32)
        num_heads = self.num_kv_heads * self.group
        shape = starts[-1] + self.padding, num_heads, self.dim
        self.query = torch.randn(shape, generator=generator).to(self.dtype)

        def draw_pages() -> torch.Tensor:
            inner = [self.block_size, self.num_kv_heads]
            order = inner[::-1] if self.heads_first else inner
            drawn = torch.randn(num_blocks, *order, self.dim, generator=generator)
            if page_dtype == torch.int8:
                drawn = drawn * 40
            pages = drawn.clamp(-120, 120).to(page_dtype)
            return pages.transpose(1, 2) if self.heads_first else pages

        self.keys, self.values = draw_pages(), draw_pages()
        self.written = torch.zeros(num_blocks, self.block_size, dtype=torch.bool)
        for row, (length, _) in enumerate(self.shapes):
            for position in range(length):
                self.written[self.place(row, position)] = True
        if page_dtype != torch.int8:
            for pages in (self.keys, self.values):
                bits = pages.view(torch.uint8) if page_dtype.itemsize == 1 else pages
                bits[~self.written] = 0x7F if page_dtype.itemsize == 1 else self.garbage

    def place(self, row: int, position: int) -> tuple[int, int]:
        return int(self.table[row, position // self.block_size]), position % self.block_size

    def dense(self, row: int) -> tuple[Array, Array, Array]:
        """K, V and the keys' scales of a sequence."""
        o = self.options
        places = [self.place(row, position) for position in range(int(self.lens[row]))]
        if not places:
            nothing = np.zeros((0, self.num_kv_heads, self.dim))
            return nothing, nothing, nothing[..., 0]
        pages, offsets = (torch.tensor(part) for part in zip(*places, strict=True))

        def read(tensor: torch.Tensor) -> torch.Tensor:
            wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor
            return wide[pages, offsets].double()

        keys, values = read(self.keys), read(self.values)
        ones = torch.ones(len(places), self.num_kv_heads, dtype=torch.float64)
        scales = ones if o.key_scales is None else read(o.key_scales)
        if o.value_scales is not None:
            values = values * read(o.value_scales)[..., None]
        return keys.numpy(), values.numpy(), scales.numpy()

    def expected(self) -> tuple[Array, Array]:
        out = np.zeros(self.query.shape)
        lse = np.full(self.query.shape[:2], -np.inf)
        for row, (length, _) in enumerate(self.shapes):
            first, last = self.starts[row : row + 2].tolist()
            keys, values, scales = self.dense(row)
            for token in range(first, last) if length else ():
                for head in range(self.query.shape[1]):
                    position = length - (last - token)
                    query = self.query[token, head].double().numpy()
                    kv_head = head // self.group
                    seen_keys = keys[:, kv_head], scales[:, kv_head]
                    one = self._attend(query, *seen_keys, position, token, head, last - first)
                    seen = np.isfinite(one)
                    sink = self.options.sinks
                    extra = [] if sink is None else [float(sink[head])]
                    if not seen.any() and not extra:
                        continue
                    top = max([*one[seen], *extra])
                    weights = np.exp(one[seen] - top)
                    total = weights.sum() + sum(np.exp(x - top) for x in extra)
                    out[token, head] = weights @ values[seen, kv_head] / total
                    lse[token, head] = top + np.log(total)
        return out, lse

    def _attend(
        self, query: Array, keys: Array, scales: Array, position: int, token: int, head: int, num_new: int
    ) -> Array:
        """Logits of one query and head; −inf for what it does not see."""
        o = self.options
        logits = np.full(len(keys), -np.inf)
        for key in range(len(keys)):
            if o.causal and key > position:
                continue
            if o.window and abs(key - position) >= o.window:
                continue
            logit = float(keys[key] @ query) * o.scale * scales[key]
            if o.soft_cap:
                logit = o.soft_cap * np.tanh(logit / o.soft_cap)
            if o.slopes is not None:
                logit += float(o.slopes[head]) * (key - position)
            column = key - (len(keys) - num_new)
            if o.mask is not None and column >= 0:
                masked = o.mask[token, column]
                if o.mask.dtype == torch.bool:
                    logit = logit if bool(masked) else -np.inf
                else:
                    logit += float(masked)
            logits[key] = logit
        return logits

    def arguments(self, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[Any, ...]:
        o = self.options
        given = (self.query, self.keys, self.values, self.table, self.lens, self.starts, out, lse)
        options = (o.scale, o.causal, o.window, o.soft_cap, o.slopes, o.sinks, o.mask)
        return (*given, *options, o.key_scales, o.value_scales, None, None)


def run(shim: Any, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs that lie between guards, which must stay as they were."""
    num_tokens, num_heads, dim = case.query.shape
    out = torch.full((num_tokens + 2, num_heads, dim + 8), float("nan"), dtype=case.dtype)
    lse = torch.full((num_tokens + 2, num_heads + 1), float("nan"))
    inner, inner_lse = out[1:-1, :, :dim], lse[1:-1, :-1]
    shim.paged_attention(*case.arguments(inner, inner_lse))
    results = inner.clone(), inner_lse.clone()
    inner.fill_(float("nan"))
    inner_lse.fill_(float("nan"))
    assert out.isnan().all()
    assert lse.isnan().all()
    return results


def error(got: torch.Tensor, expected: Array) -> float:
    size = float(np.linalg.norm(expected))
    return float(np.linalg.norm(got.double().numpy() - expected)) / (size or 1.0)


def check(shim: Any, case: Case, expected: tuple[Array, Array] | None = None) -> None:
    """Run a case against the definition, or against what a like case `expected`."""
    out, lse = run(shim, case)
    expected, expected_lse = expected or case.expected()
    bound = BOUNDS[case.dtype]
    assert error(out, expected) < bound
    assert (lse.isinf().numpy() == np.isinf(expected_lse)).all()
    seen = np.isfinite(expected_lse)
    saw_nothing = torch.from_numpy((expected == 0).all(-1))
    assert (out[saw_nothing] == 0).all()
    assert np.abs(lse.double().numpy()[seen] - expected_lse[seen]).max(initial=0) < 2e-5
