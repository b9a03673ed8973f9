"""Operators in CUDA graphs: captured over padded, fixed-size metadata and replayed over other batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_cases import Case, run

MAX_SEQS, MAX_TOKENS, MAX_BLOCKS = 6, 12, 40


def pad(tensor: torch.Tensor, size: tuple[int, ...], value: float) -> torch.Tensor:
    padded = torch.full(size, value, dtype=tensor.dtype)
    padded[tuple(slice(length) for length in tensor.shape)] = tensor
    return padded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_captured_step_serves_other_batches(backend: Any, dtype: torch.dtype) -> None:
    batches = [
        [(70, 1), (33, 5), (530, 3), (1, 1)],
        [(64, 1)],
        [(17, 1), (200, 9), (600, 1), (90, 1)],
    ]
    num_blocks = 100
    static: dict[str, torch.Tensor] = {}

    def load(case: Case) -> None:
        num_seqs = len(case.shapes)
        starts = torch.full([MAX_SEQS + 1], int(case.starts[-1]), dtype=torch.int32)
        starts[: num_seqs + 1] = case.starts
        held = {
            "query": pad(case.query, (MAX_TOKENS, 4, 64), 0),
            "keys": pad(case.keys, (num_blocks, 16, 2, 64), float("nan")),
            "values": pad(case.values, (num_blocks, 16, 2, 64), float("nan")),
            "table": pad(case.table, (MAX_SEQS, MAX_BLOCKS), -1),
            "lens": pad(case.lens, (MAX_SEQS,), 0),
            "starts": starts,
        }
        for name, tensor in held.items():
            if name in static:
                static[name].copy_(tensor)
            else:
                static[name] = tensor.cuda()

    def step() -> None:
        given = [static[name] for name in ("query", "keys", "values", "table", "lens", "starts")]
        options = (0.25, True, 0, 0.0, None, None, None, None, None, None, None)
        new = torch.zeros(MAX_TOKENS, 2, 64, dtype=dtype, device="cuda")
        backend.module.write_kv(new, new, static["keys"], static["values"], static["slots"], None, None)
        backend.module.paged_attention(*given, static["out"], static["lse"], *options)

    static["slots"] = torch.full([MAX_TOKENS], -1, dtype=torch.int64, device="cuda")
    static["out"] = torch.empty(MAX_TOKENS, 4, 64, dtype=dtype, device="cuda")
    static["lse"] = torch.empty(MAX_TOKENS, 4, device="cuda")
    cases = [Case(shapes, dim=64, dtype=dtype, seed=i) for i, shapes in enumerate(batches)]
    load(cases[0])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # compiles what has to be compiled
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case in cases:
        expected, expected_lse = run(backend, case)
        load(case)
        static["out"].fill_(float("nan"))
        graph.replay()
        num_tokens = len(case.query)
        assert torch.equal(static["out"][:num_tokens].cpu(), expected)
        assert torch.equal(static["lse"][:num_tokens].cpu(), expected_lse)
        assert (static["out"][num_tokens:] == 0).all()
        assert (static["lse"][num_tokens:] == -torch.inf).all()
