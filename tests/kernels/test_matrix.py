"""paged_attention with every option in every company, on every backend, against the oracle in float64.

Any two values of different options meet in `make test`, any three in `make test-all`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from backends import on_every_backend
from covering import Case, covering
from guarded import Guards
from page_worlds import World, make_world

from pagedkv.ops import paged_attention

OPTIONS: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bfloat16", "float16"),
    "page_dtype": ("same", "float8_e4m3fn", "int8"),
    "scales": (None, "tensor", "head", "token_head"),
    "head_dim": (16, 64, 80, 96, 112, 128, 256),
    "heads": ((1, 1), (1, 7), (3, 9), (2, 8), (1, 64)),  # of K and V, of queries
    "block_size": (8, 16, 32, 64, 128),
    "arrangement": ("block", "layer"),
    "layout": ("NHD", "HND"),
    "batch": ("decode", "prefill", "chunks", "drafts", "long", "padded"),
    "causal": (True, False),
    "window": (None, 1, 7, 100),
    "soft_cap": (None, 2.0),
    "alibi": (False, True),
    "sinks": (False, True),
    "mask": (None, "bool", "float"),
    "scale": (None, 0.07),
    "garbage": (float("nan"), float("-inf"), 6e4),
}
# (tokens, queries, blocks shared with the sequence before)
BATCHES = {
    "decode": [(1, 1, 0), (17, 1, 0), (130, 1, 0), (129, 1, 1), (16, 1, 0)],
    "prefill": [(33, 33, 0), (1, 1, 0), (16, 16, 0)],
    "chunks": [(70, 9, 0), (150, 17, 0), (31, 31, 0)],
    "drafts": [(40, 4, 0), (5, 5, 0), (135, 3, 0)],
    "long": [(1100, 2, 0), (514, 5, 0), (512, 1, 0)],
    "padded": [(20, 1, 0), (0, 0, 0), (0, 2, 0), (15, 3, 0), (18, 0, 0)],
}
# ‖out − oracle‖ / ‖oracle‖. What is left to the backend is a rounding of each weight to the query's dtype.
BOUNDS = {"float32": 3e-6, "float16": 1e-3, "bfloat16": 6e-3}
LSE_BOUND = 3e-5


def make_valid(case: Case) -> Case:
    if case["page_dtype"] == "same":
        case["scales"] = None
    return case


def name_of(case: Case) -> str:
    return "-".join(str(value).replace(" ", "") for value in case.values())


def run(case: Case, backend: str, seed: int = 0) -> tuple[World, dict[str, Any], torch.Tensor, torch.Tensor]:
    """Attend between guards into poisoned outputs; return what was given and what came out."""
    num_kv_heads, num_heads = case["heads"]
    world = make_world(
        BATCHES[case["batch"]],
        num_kv_heads=num_kv_heads,
        num_heads=num_heads,
        page_dtype=None if case["page_dtype"] == "same" else case["page_dtype"],
        seed=seed,
        **{
            name: case[name]
            for name in ("dtype", "scales", "head_dim", "block_size", "arrangement", "layout", "garbage")
        },
    )
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {name: case[name] for name in ("causal", "window", "soft_cap", "scale")}
    if case["alibi"]:
        options["alibi_slopes"] = torch.rand(num_heads, generator=generator) / 8
    if case["sinks"]:
        options["sinks"] = torch.randn(num_heads, generator=generator)
    if case["mask"] is not None:
        num_new = max(num_queries for _, num_queries, _ in BATCHES[case["batch"]])
        seen = torch.rand(len(world.query), num_new + 2, generator=generator) < 0.7
        seen[0] = False  # a query that may see no new key, not even its own
        added = torch.randn(seen.shape, generator=generator).where(seen, float("-inf"))
        options["mask"] = seen if case["mask"] == "bool" else added

    guards = Guards()
    query, key_pages, value_pages, *tables = (
        guards.copy(f"argument {i}", argument) for i, argument in enumerate(world.arguments)
    )
    given = {
        name: guards.copy(name, value)
        for name, value in (world.scales | options).items()
        if isinstance(value, torch.Tensor)
    }
    out, lse = guards.empty("out", query), guards.empty("lse", torch.empty(query.shape[:2]))
    everything = [query, key_pages, value_pages, *tables, *given.values()]
    before = [as_bits(tensor).clone() for tensor in everything]
    got = paged_attention(
        query,
        key_pages,
        value_pages,
        *tables,
        out=out,
        lse=lse,
        backend=backend,  # type: ignore[arg-type]
        **options | given,
    )
    assert got is out
    guards.check()
    for tensor, bits in zip(everything, before, strict=True):
        assert torch.equal(as_bits(tensor), bits)
    return world, options, out, lse


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def check(case: Case, backend: str) -> None:
    world, options, out, lse = run(case, backend)
    want_out, want_lse = world.expected(**options)
    got_out, got_lse = out.double().numpy(), lse.double().numpy()
    nothing = want_lse == -np.inf
    assert (got_lse[nothing] == -np.inf).all()
    np.testing.assert_allclose(got_lse[~nothing], want_lse[~nothing], rtol=LSE_BOUND, atol=LSE_BOUND)
    bound = BOUNDS[case["dtype"]]
    error = np.linalg.norm(got_out - want_out) / max(np.linalg.norm(want_out), 1e-30)
    assert error <= bound, f"‖out − oracle‖/‖oracle‖ is {error:.2e}"
    # No single row may hide behind the others.
    rows = np.linalg.norm(got_out - want_out, axis=-1)
    assert (rows <= 8 * bound * np.linalg.norm(want_out, axis=-1) + 1e-30).all()


@on_every_backend
@pytest.mark.parametrize("case", covering(OPTIONS, 2, make_valid), ids=name_of)
def test_any_two_options_go_together(case: Case, backend: str) -> None:
    check(case, backend)


@pytest.mark.slow
@on_every_backend
@pytest.mark.parametrize("part", range(16))
def test_any_three_options_go_together(part: int, backend: str) -> None:
    for case in covering(OPTIONS, 3, make_valid)[part::16]:
        check(case, backend)
