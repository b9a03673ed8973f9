"""A query's answer in Triton has the same bits whatever is computed around it, before it or with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from triton_cases import DEVICE, Batch, attend, check, make_batch

from pagedkv.kernels.triton import attention
from pagedkv.kernels.triton.tuning import Tile

# Every example runs kernels of some seconds in the interpreter.
few = settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate])
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 9},
    {"window": 700},
    {"soft_cap": 0.9, "alibi_slopes": np.float32([0.5, 0.25, 0.1, 2.0])},
    {"sinks": np.float32([1.0, -3.0, 9.0, 0.0])},
)
LENGTHS = st.sampled_from([1, 15, 16, 17, 63, 64, 65, 130, 511, 512, 513, 1030])


def part(batch: Batch, row: int, end: int, num_queries: int) -> Batch:
    """The last `num_queries` of the first `end` tokens of one sequence, all alone."""
    start = int(batch.query_start_loc[row]) + end - int(batch.seq_lens[row])
    start += int(batch.query_start_loc[row + 1] - batch.query_start_loc[row])
    return batch._replace(
        query=batch.query[start - num_queries : start],
        block_table=batch.block_table[row : row + 1],
        seq_lens=torch.tensor([end], dtype=torch.int32, device=DEVICE),
        query_start_loc=torch.tensor([0, num_queries], dtype=torch.int32, device=DEVICE),
    )


def rows(batch: Batch, row: int) -> slice:
    return slice(int(batch.query_start_loc[row]), int(batch.query_start_loc[row + 1]))


def same(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@few
@given(
    lens=st.lists(LENGTHS, min_size=2, max_size=3),
    options=st.sampled_from(OPTIONS),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_neighbours_and_chunks_change_no_bit(
    lens: list[int], options: dict[str, Any], seed: int, data: st.DataObject
) -> None:
    queries = [data.draw(st.integers(1, min(n, 24)), label="queries") for n in lens]
    batch = make_batch(lens, queries, seed=seed)
    out, lse = attend(batch, **options)
    for row, (length, num_queries) in enumerate(zip(lens, queries, strict=True)):
        whole = out[rows(batch, row)], lse[rows(batch, row)]
        same(attend(part(batch, row, length, num_queries), **options), whole)
        cut = data.draw(st.integers(0, num_queries - 1), label="cut")
        if cut:
            first = attend(part(batch, row, length - num_queries + cut, cut), **options)
            same(first, (whole[0][:cut], whole[1][:cut]))
        last = attend(part(batch, row, length, num_queries - cut), **options)
        same(last, (whole[0][cut:], whole[1][cut:]))


@few
@given(
    lens=st.lists(LENGTHS, min_size=1, max_size=3),
    options=st.sampled_from(OPTIONS),
    heads=st.sampled_from([(4, 2), (4, 1), (4, 4)]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_splits_apart_or_in_a_row_have_the_same_bits(
    lens: list[int], options: dict[str, Any], heads: tuple[int, int], seed: int, data: st.DataObject
) -> None:
    queries = [data.draw(st.integers(1, min(n, 5)), label="queries") for n in lens]
    batch = make_batch(lens, queries, num_heads=heads[0], num_kv_heads=heads[1], seed=seed)
    answers = []
    for num_multiprocessors in (0, 3, 1000):  # one after the other, some of them apart, all of them apart
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "count_multiprocessors", lambda device, n=num_multiprocessors: n)
            answers.append(attend(batch, **options))
    same(answers[0], answers[1])
    same(answers[0], answers[2])


def groups_of(*groups: tuple[list[int], int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, first block, last block) of each group, as the kernels take them."""
    table, members = [], []
    for row_ids, first, last in groups:
        table.append([len(members), len(members) + len(row_ids), first, last])
        members += row_ids
    ints = {"dtype": torch.int32, "device": DEVICE}
    return torch.tensor(table, **ints), torch.tensor(members, **ints)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("num_multiprocessors", [0, 100])
def test_grouping_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], num_multiprocessors: int
) -> None:
    monkeypatch.setattr(attention, "count_multiprocessors", lambda device: num_multiprocessors)
    # Two levels, a group too short to hold a split, and a prefill among the members.
    batch = make_batch([1100, 1060, 1090, 1200, 30], [1, 3, 2, 40, 1], shared_blocks=64)
    groups = groups_of(([0, 1, 3, 2], 0, 33), ([2, 0], 33, 64), ([4, 0], 0, 1))
    plain = attend(batch, **options)
    same(attend(batch, groups, **options), plain)
    check(batch, groups, **options)


def test_grouping_in_tiles_of_many_sequences_changes_no_bit() -> None:
    lens = [600 + i for i in range(19)]  # more members than a tile of 32 rows and 4 heads holds
    batch = make_batch(lens, [1] * 19, num_heads=4, num_kv_heads=1, shared_blocks=33)
    groups = groups_of((list(range(19)), 0, 33))
    same(attend(batch, groups), attend(batch))


def test_groups_that_share_their_list_of_rows_change_no_bit() -> None:
    batch = make_batch([1100, 1100, 1050, 1050], [1] * 4, num_heads=32, num_kv_heads=1, shared_blocks=64)
    _, rows = groups_of(([0, 1, 2, 3], 0, 0))
    # The grid has tiles for the rows of one list: the last group gets none, and is left to each sequence.
    levels = [[0, 4, 0, 32], [0, 4, 0, 32], [1, 3, 0, 32], [0, 4, 32, 64]]
    groups = torch.tensor(levels, dtype=torch.int32, device=DEVICE), rows
    same(attend(batch, groups), attend(batch))


def test_a_group_is_read_from_the_table_of_its_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared split is computed once for all: otherwise nothing would be saved."""
    batch = make_batch([600, 620], [1, 1], shared_blocks=33)
    right = attend(batch)
    batch.block_table[1, :32] = 2**31 - 1  # the kernels would read zeros there
    same(attend(batch, groups_of(([0, 1], 0, 32))), right)
    broken = attend(batch)
    assert torch.equal(broken[0][0], right[0][0])
    assert not torch.equal(broken[0][1], right[0][1])


@few
@given(
    lens=st.lists(st.integers(513, 1100), min_size=2, max_size=5),
    seed=st.integers(0, 99),
    shared=st.integers(0, 70),
    data=st.data(),
)
def test_any_grouping_changes_no_bit(lens: list[int], seed: int, shared: int, data: st.DataObject) -> None:
    queries = [data.draw(st.integers(0, 4), label="queries") for _ in lens]
    batch = make_batch(lens, queries, shared_blocks=shared, seed=seed)
    last = min(shared, min(lens) // 16)
    middle = data.draw(st.integers(0, last), label="middle")
    members = data.draw(st.lists(st.sampled_from(range(len(lens))), min_size=1, unique=True), label="members")
    groups = groups_of((list(range(len(lens))), 0, middle), (members, middle, last))
    same(attend(batch, groups), attend(batch))


@pytest.mark.parametrize("page_dtype", [torch.float8_e4m3fn, torch.int8])
def test_pages_of_8_bits_keep_the_promise(page_dtype: torch.dtype) -> None:
    batch = make_batch([600, 530], [3, 1], page_dtype=page_dtype)
    out, lse = attend(batch)
    for row, (length, num_queries) in enumerate(((600, 3), (530, 1))):
        same(attend(part(batch, row, length, num_queries)), (out[rows(batch, row)], lse[rows(batch, row)]))
        same(attend(part(batch, row, length, 1)), (out[rows(batch, row)][-1:], lse[rows(batch, row)][-1:]))


def test_a_key_block_of_another_size_does_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests can fail: the order of sums is seen in the bits."""
    batch = make_batch([300], [4])
    out, _ = attend(batch)
    monkeypatch.setattr(attention, "choose_tile", lambda *_: Tile(32, 32, 4, 1))
    again, _ = attend(batch)
    torch.testing.assert_close(out, again)
    assert not torch.equal(out, again)
