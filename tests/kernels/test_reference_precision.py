"""pagedkv.testing.reference: the same meaning in float64, where nothing is lost to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from page_worlds import make_world

from pagedkv.ops import paged_attention
from pagedkv.testing import reference

OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": 0.3, "window": 9, "soft_cap": 2.0},
    {"alibi_slopes": torch.tensor([0.25, 0.5, 0.125, 0.0625]), "sinks": torch.tensor([0.0, 1.0, -1.0, 2.0])},
    {"causal": False, "window": 20},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("scales", [None, "token_head"])
def test_float64_is_exact_to_its_own_precision(options: dict[str, Any], scales: str | None) -> None:
    page_dtype = "float8_e4m3fn" if scales else None
    shapes = [(40, 7, 0), (1, 1, 0), (0, 2, 0), (530, 3, 0)]
    world = make_world(shapes, num_heads=4, page_dtype=page_dtype, scales=scales)
    out, lse = reference.paged_attention(*world.arguments, **options, **world.scales)
    want_out, want_lse = world.expected(**options)
    assert out.dtype == lse.dtype == torch.float64
    np.testing.assert_allclose(out.numpy(), want_out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=1e-12, atol=1e-13)
    rounded = paged_attention(*world.arguments, **options, **world.scales, backend="reference")
    assert (rounded.double() - out).norm() < 1e-6 * out.norm()


def test_states_merge_in_float64() -> None:
    outs, lses = torch.randn(3, 4, 2, 8, dtype=torch.float64), torch.randn(3, 4, 2, dtype=torch.float64)
    out, lse = reference.merge_attention_states(outs, lses)
    torch.testing.assert_close(lse, lses.logsumexp(0), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(out, (lses.softmax(0)[..., None] * outs).sum(0), rtol=1e-13, atol=1e-14)
