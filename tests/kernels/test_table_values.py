"""Backends on the CPU also refuse wrong values in slots and tables, before anything is written."""

from __future__ import annotations

import pytest
import torch

from pagedkv import UsageError, ops

pytestmark = pytest.mark.usefixtures("each_exact_backend")

NUM_BLOCKS, BLOCK_SIZE = 4, 16


def int32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("block_table", "seq_lens", "query_start_loc", "message"),
    [
        (int32([1, 2], [0, -1]), int32(33, 3), int32(0, 1, 3), r"seq_lens\[0\]: expected .* 32 .*, got 33"),
        (
            int32([1, 2], [0, -1]),
            int32(17, 1),
            int32(0, 1, 3),
            r"seq_lens\[1\]: expected from its 2 .*, got 1",
        ),
        (int32([1, 2], [0, -1]), int32(17, -3), int32(0, 1, 3), r"seq_lens\[1\]: .*, got -3"),
        (int32([1, -1], [0, -1]), int32(17, 3), int32(0, 1, 3), r"block_table\[0\]: expected .*, got -1"),
        (int32([1, 2], [4, -1]), int32(17, 3), int32(0, 1, 3), r"block_table\[1\]: .* 0 to 3, got 4"),
        (
            int32([1, 2], [0, -1]),
            int32(17, 3),
            int32(0, 1, 4),
            r"query_start_loc\[2\]: .* 0 to at most 3, got 4",
        ),
        (int32([1, 2], [0, -1]), int32(17, 3), int32(1, 2, 3), r"query_start_loc\[0\]: .*, got 1,"),
        (int32([1, 2], [0, -1]), int32(17, 3), int32(0, 4, 3), r"query_start_loc\[1\]: .*, got 4,"),
    ],
)
def test_attention_refuses_tables_that_lead_astray(
    block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, message: str
) -> None:
    key_pages, value_pages = torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, 2, 4)
    query = torch.randn(3, 4, 4)
    with pytest.raises(UsageError, match=message):
        ops.paged_attention(query, key_pages, value_pages, block_table, seq_lens, query_start_loc)


def test_a_slot_behind_the_pages_is_refused_before_anything_is_written() -> None:
    pages = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, 1, 2), 7.0)
    key = torch.zeros(2, 1, 2)
    with pytest.raises(UsageError, match="expected slots from -1 to 63, got 64"):
        ops.write_kv(key, key, pages[0], pages[1], torch.tensor([3, 64]))
    assert bool((pages == 7).all())


@pytest.mark.parametrize(("sources", "destinations", "culprit"), [([0, -1], [1, 2], -1), ([0, 1], [2, 4], 4)])
def test_copies_from_or_to_no_block_are_refused(
    sources: list[int], destinations: list[int], culprit: int
) -> None:
    blocks = torch.arange(4.0)[:, None].clone()
    with pytest.raises(UsageError, match=f"expected block ids from 0 to 3, got {culprit}"):
        ops.copy_blocks(blocks, torch.tensor(sources), torch.tensor(destinations))
    assert torch.equal(blocks[:, 0], torch.arange(4.0))
