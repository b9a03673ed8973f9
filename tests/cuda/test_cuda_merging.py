"""merge_attention_states of csrc/cuda, run on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_shim import Shim
from paged_cases import BOUNDS, error

from pagedkv.kernels.cuda import calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_states", "dim"), [(1, 64), (2, 16), (5, 80), (3, 7), (3, 256)])
def test_states_are_merged_by_their_weights(
    shim: Shim, dtype: torch.dtype, num_states: int, dim: int
) -> None:
    generator = torch.Generator().manual_seed(dim)
    outs = torch.randn(num_states, 4, 3, dim + 2, generator=generator).to(dtype)[..., :dim]
    lses = torch.randn(num_states, 3, 4, generator=generator).mul(3).transpose(1, 2)
    lses[0, 1] = -np.inf
    outs[0, 1] = float("nan")  # a state that saw nothing may hold anything
    lses[-1, 3] = -np.inf
    outs[-1, 3] = float("nan")
    lses[:, 2, 0] = -np.inf
    out = torch.full((4, 3, dim), float("nan"), dtype=dtype)
    lse = torch.full((4, 3), float("nan"))
    calls.merge_attention_states(shim, outs, lses, out, lse)

    x = lses.double().numpy()
    with np.errstate(divide="ignore"):
        expected_lse = np.log(np.exp(x).sum(0))
    weights = np.where(
        np.isinf(expected_lse), 0, np.exp(x - np.where(np.isinf(expected_lse), 0, expected_lse))
    )
    values = np.where(weights[..., None] == 0, 0, outs.double().numpy())
    assert error(out, (weights[..., None] * values).sum(0)) < BOUNDS[dtype]
    finite = np.isfinite(expected_lse)
    assert (lse.isinf().numpy() == ~finite).all()
    assert np.abs(lse.numpy()[finite] - expected_lse[finite]).max(initial=0) < 1e-5
    assert (out[~torch.from_numpy(finite)] == 0).all()
