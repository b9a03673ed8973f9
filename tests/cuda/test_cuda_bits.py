"""The bits of a query's result depend on nothing but the query, its keys and the options."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_shim import Shim
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import Case, Options, run

SLOPES = torch.tensor([0.5, 0.25])
KINDS = {
    "float32": Case([(1100, 70)], num_kv_heads=1, dim=16),
    "bfloat16": Case([(1100, 70)], num_kv_heads=1, dim=64, dtype=torch.bfloat16),
    "float16, window": Case([(1100, 70)], num_kv_heads=1, dtype=torch.float16, options=Options(window=600)),
    "int8": Case([(1100, 70)], num_kv_heads=1, dtype=torch.bfloat16, page_dtype=torch.int8),
    "float8, cap, alibi": Case(
        [(1100, 70)],
        num_kv_heads=1,
        dtype=torch.float16,
        page_dtype=torch.float8_e4m3fn,
        options=Options(soft_cap=5.0, slopes=SLOPES),
    ),
}


def attend(shim: Shim, case: Case, chunks: list[tuple[int, int]]) -> torch.Tensor:
    """Attend from the queries [begin, end) of the case's one sequence, each chunk a sequence of a batch."""
    [(length, num_queries)] = case.shapes
    before = length - num_queries
    starts = [0]
    for begin, end in chunks:
        starts.append(starts[-1] + end - begin)
    # A batch of sequences that share all pages, seen up to different lengths.
    batch = replace(case)
    batch.table = case.table.expand(len(chunks), -1)
    batch.starts = torch.tensor(starts, dtype=torch.int32)
    batch.lens = torch.tensor([before + end for _, end in chunks], dtype=torch.int32)
    batch.query = torch.cat([case.query[begin:end] for begin, end in chunks])
    return run(shim, batch)[0]


@pytest.mark.parametrize("name", KINDS)
def test_chunks_and_batches_change_no_bit(shim: Shim, name: str) -> None:
    case = KINDS[name]
    [(_, num_queries)] = case.shapes
    whole = attend(shim, case, [(0, num_queries)])

    singly = [(i, i + 1) for i in range(num_queries)]
    assert torch.equal(attend(shim, case, singly), whole)  # decoding
    pieces = [(0, 3), (3, 40), (40, 41), (41, 70)]
    assert torch.equal(attend(shim, case, pieces), whole)  # a mixed batch
    for begin, end in pieces:
        assert torch.equal(attend(shim, case, [(begin, end)]), whole[begin:end])
    shim.limit_shared_memory(16 * 1024 + 32 * 1024)  # narrow tiles only
    assert torch.equal(attend(shim, case, [(0, num_queries)]), whole)


@pytest.fixture(scope="module")
def whole(built_shim: Shim) -> torch.Tensor:
    return attend(built_shim, KINDS["bfloat16"], [(0, 70)])


@settings(max_examples=15)
@given(data=st.data())
def test_any_chunks_change_no_bit(built_shim: Shim, whole: torch.Tensor, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, 69), max_size=6)))
    chunks = data.draw(st.permutations(list(zip([0, *cuts], [*cuts, 70], strict=True))))
    got = attend(built_shim, KINDS["bfloat16"], chunks)
    assert torch.equal(got, torch.cat([whole[begin:end] for begin, end in chunks]))


@pytest.mark.parametrize("name", KINDS)
def test_the_order_of_threads_changes_no_bit(shim: Shim, name: str) -> None:
    first, _ = run(shim, KINDS[name])
    for seed in range(1, 4):
        shim.seed(seed)
        assert torch.equal(run(shim, KINDS[name])[0], first)
