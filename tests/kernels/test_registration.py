"""The operators are torch's own: schemas that say what is modified, and graphs without a break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import on_every_backend
from torch.library import opcheck

from pagedkv import SharedPrefixes, ops
from pagedkv.torch_library import SCHEMAS

NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, NUM_HEADS, HEAD_DIM = 5, 16, 2, 4, 32


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pages(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    return tuple((drawn * 20).to(dtype) if dtype == torch.int8 else drawn.to(dtype))  # type: ignore[return-value]


def scales() -> torch.Tensor:
    return torch.rand(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS)


QUERY, TABLES = torch.randn(3, NUM_HEADS, HEAD_DIM), (int32([1, 2], [0, -1]), int32(17, 3), int32(0, 1, 3))
OPTIONS = (0.2, True, 5, 3.0)
NO_OPTIONS = (None,) * 7
# What each operator is given, but for the backend: with and without what is optional.
SAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "write_kv": lambda: (
        *torch.randn(2, 3, NUM_KV_HEADS, HEAD_DIM),
        *pages(),
        torch.tensor([1, 20, -1]),
        None,
        None,
    ),
    "write_kv computing scales": lambda: (
        *torch.randn(2, 3, NUM_KV_HEADS, HEAD_DIM),
        *pages(torch.int8),
        torch.tensor([1, 20, -1]),
        scales(),
        scales(),
    ),
    "paged_attention": lambda: (
        QUERY,
        *pages(),
        *TABLES,
        torch.empty_like(QUERY),
        None,
        0.2,
        True,
        0,
        0.0,
        *NO_OPTIONS,
    ),
    "paged_attention of all options": lambda: (
        QUERY,
        *pages(torch.int8),
        *TABLES,
        torch.empty_like(QUERY),
        torch.empty(3, NUM_HEADS),
        *OPTIONS,
        torch.rand(NUM_HEADS),
        torch.rand(NUM_HEADS),
        torch.rand(3, 2) > 0.5,
        scales(),
        scales(),
        torch.zeros(1, 4, dtype=torch.int32),
        int32(0),
    ),
    "paged_attention.plain": lambda: (QUERY, *pages(), *TABLES, torch.empty_like(QUERY), 0.2),
    "copy_blocks": lambda: (torch.randn(4, 3, 2), torch.tensor([1, 2]), torch.tensor([0, 3])),
    "gather_blocks": lambda: (torch.randn(4, 3, 2), torch.tensor([1, 3]), torch.empty(2, 3, 2)),
    "scatter_blocks": lambda: (torch.randn(2, 3, 2), torch.tensor([1, 3]), torch.zeros(4, 3, 2)),
    "merge_attention_states": lambda: (
        torch.randn(2, 3, NUM_HEADS, HEAD_DIM),
        torch.randn(2, 3, NUM_HEADS),
        torch.empty(3, NUM_HEADS, HEAD_DIM),
        torch.empty(3, NUM_HEADS),
    ),
}


def test_every_operator_has_a_sample() -> None:
    assert {sample.split()[0] for sample in SAMPLES} == set(SCHEMAS)


@on_every_backend
@pytest.mark.parametrize("sample", SAMPLES)
def test_torch_finds_nothing_wrong_with_an_operator(sample: str, backend: str) -> None:
    name, _, overload = sample.split()[0].partition(".")
    operator = getattr(getattr(torch.ops.pagedkv, name), overload or "default")
    given = SAMPLES[sample]()
    operator(*given, backend)  # so that no memory is uninitialised
    opcheck(operator, (*given, backend))


def step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    kv_scales: tuple[torch.Tensor | None, torch.Tensor | None],
    backend: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model does in a layer, and the other operators too."""
    given = {"key_scales": kv_scales[0], "value_scales": kv_scales[1]}
    ops.copy_blocks(kv[0], torch.tensor([0]), torch.tensor([4]), backend=backend)
    ops.write_kv(key * 2, value, *kv, torch.tensor([33, 1, 2]), **given, backend=backend)
    lse = torch.empty(query.shape[:2])
    shared = SharedPrefixes(torch.zeros(1, 4, dtype=torch.int32), int32(0))
    options: dict[str, Any] = {"window": 9, "soft_cap": 3.0, "lse": lse, "shared_prefixes": shared, **given}
    out = ops.paged_attention(query + 1, *kv, *TABLES, **options, backend=backend)
    out = (
        out + ops.paged_attention(query, *kv, *TABLES, backend=backend)
        if given["key_scales"] is None
        else out
    )
    merged = ops.merge_attention_states(torch.stack([out, out]), torch.stack([lse, lse]), backend=backend)
    moved = ops.gather_blocks(kv[1], torch.tensor([2]), backend=backend)
    ops.scatter_blocks(moved, torch.tensor([3]), kv[1], backend=backend)
    return merged * 3, lse


@on_every_backend
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["same", "tensor", "head", "token_head"])
def test_a_compiled_layer_is_one_graph_and_does_the_same(kind: str, compiler: str, backend: str) -> None:
    sizes = {"tensor": (), "head": (NUM_KV_HEADS,), "token_head": (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS)}

    def make() -> tuple[Any, ...]:
        torch.manual_seed(1)
        kv = pages(torch.float32 if kind == "same" else torch.int8)
        kv_scales = (None, None) if kind == "same" else tuple(torch.rand(2, *sizes[kind]))
        return QUERY, *torch.randn(2, 3, NUM_KV_HEADS, HEAD_DIM), kv, kv_scales

    want_given, given = make(), make()
    want = step(*want_given, backend)
    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True, backend=compiler)(*given, backend)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
    for one, other in zip((*given[3], *given[4]), (*want_given[3], *want_given[4]), strict=True):
        assert one is other is None or torch.equal(one, other)


def test_the_backend_is_chosen_when_a_graph_runs_and_not_when_it_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = torch.arange(8.0).view(4, 2)
    torch._dynamo.reset()

    def copy() -> None:
        ops.copy_blocks(blocks, torch.tensor([0]), torch.tensor([1]))

    compiled = torch.compile(copy, fullgraph=True, backend="eager")
    compiled()
    monkeypatch.setenv("PAGEDKV_BACKEND", "nonsense")
    with pytest.raises(ValueError, match="PAGEDKV_BACKEND: expected one of"):
        compiled()


def test_nothing_is_differentiated() -> None:
    query = torch.randn(3, NUM_HEADS, HEAD_DIM, requires_grad=True)
    assert not ops.paged_attention(query, *pages(), *TABLES).requires_grad
    out = torch.zeros_like(query, requires_grad=True)
    ops.paged_attention(query, *pages(), *TABLES, out=out)
    with torch.inference_mode():
        ops.paged_attention(query, *pages(), *TABLES)
