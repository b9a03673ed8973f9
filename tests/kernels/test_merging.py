"""merge_attention_states, on every quick backend: parts of the keys, in any number, are all of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.ops import merge_attention_states

pytestmark = pytest.mark.usefixtures("each_exact_backend")

INF, NAN = float("inf"), float("nan")


def softmax_state(logits: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Attention over some keys, in float64: logits [..., keys], values [keys, head_dim]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        top = np.maximum(logits.max(-1, initial=-INF), -1e300)
        weights = np.exp(logits - top[..., None])
        total = weights.sum(-1)
        out = np.where(total[..., None] > 0, weights @ values / total[..., None], 0)
        return out, np.where(total > 0, top + np.log(total), -INF)


@settings(max_examples=60)
@given(
    cuts=st.lists(st.integers(0, 12), max_size=5),
    head_dim=st.sampled_from([1, 8, 17, 64]),
    spread=st.sampled_from([0.0, 1.0, 30.0, 300.0]),
    hidden=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_merged_parts_are_attention_over_all_keys(
    cuts: list[int], head_dim: int, spread: float, hidden: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(5, 3, 12)) * spread
    logits[rng.random(logits.shape) < hidden] = -INF
    values = rng.normal(size=(12, head_dim))
    edges = sorted([0, 12, *cuts])
    parts = [softmax_state(logits[..., a:b], values[a:b]) for a, b in pairwise(edges)]
    outs = torch.tensor(np.stack([out for out, _ in parts]), dtype=torch.float32)
    lses = torch.tensor(np.stack([lse for _, lse in parts]), dtype=torch.float32)
    outs[lses == -INF] = NAN  # what saw nothing may hold anything
    lse = torch.full((5, 3), NAN)
    out = merge_attention_states(outs, lses, lse=lse)
    want, want_lse = softmax_state(logits, values)
    # The error of a state's lse in float32 is one of the weights.
    tolerance = 1e-6 * max(1.0, spread)
    np.testing.assert_allclose(out.numpy(), want, atol=20 * tolerance, rtol=20 * tolerance)
    np.testing.assert_allclose(lse.numpy(), want_lse, atol=10 * tolerance, rtol=1e-6)


@settings(max_examples=30)
@given(at=st.integers(0, 3), seed=st.integers(0, 2**32 - 1))
def test_one_state_among_empty_ones_keeps_its_bits(at: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    outs, lses = torch.full((4, 6, 2, 24), NAN), torch.full((4, 6, 2), -INF)
    outs[at], lses[at] = torch.randn(6, 2, 24, generator=generator), 0.0
    lse = torch.empty(6, 2)
    assert torch.equal(merge_attention_states(outs, lses, lse=lse), outs[at])
    assert (lse == 0).all()
