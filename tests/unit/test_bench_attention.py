"""What the benchmark of attention times is the same work on every side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("rich", reason="the benchmark's table needs the extra 'cli'")

ROOT = Path(__file__).parents[2]

SMALL = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmarks are not part of the package, and choose how torch's threads wait."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    from benchmarks.work import attention

    return attention


def test_every_row_has_a_harness_that_knows_it(work: Any) -> None:
    from benchmarks.attention_table import HARNESS, PEER, rows
    from benchmarks.child import ATTENTION_COMMANDS, ENVIRONMENTS

    made = rows(bounded=True, on_gpu=False)
    assert {row.name for row in made} == set(work.ROWS)
    assert len(made) == len(work.ROWS)
    assert {row.harness for row in made} == {HARNESS}
    assert {HARNESS, PEER} == set(ATTENTION_COMMANDS)
    assert PEER in ENVIRONMENTS


def test_the_command_line_chooses_rows_and_threads(work: Any) -> None:
    from benchmarks.attention import chosen, parse

    def names(*arguments: str) -> list[str]:
        return [row.name for row in chosen(parse([*arguments, "--rows", "shared", "decode"]))]

    assert names() == ["decode_1t", "shared_1t", "decode_2t", "shared_2t"]
    assert names("--threads", "2") == ["decode_2t", "shared_2t"]
    assert names("--device", "cuda", "--threads", "2") == ["decode_1t", "shared_1t"]


@pytest.mark.parametrize("num_queries", [1, 7])
def test_torch_is_given_the_same_numbers(work: Any, num_queries: int) -> None:
    from benchmarks.shapes import Batch

    batch = Batch(3, num_queries, 40, **SMALL)
    paged = work.Paged(batch)
    positions = torch.arange(batch.num_keys)
    arguments = paged.contiguous() | {"attn_mask": positions <= positions[-num_queries:, None]}
    meant = scaled_dot_product_attention(**arguments).transpose(1, 2).reshape(paged.out.shape)
    torch.testing.assert_close(paged.attend().float(), meant.float(), atol=0.02, rtol=0.02)


def test_shared_pages_are_the_first_of_every_sequence(work: Any) -> None:
    from benchmarks.shapes import Batch

    batch = Batch(3, 1, 1_040, num_shared=1_024, **SMALL)
    paged = work.Paged(batch)
    [[begin, end, first, last]] = paged.prefixes.groups.tolist()
    assert (begin, end, first, last) == (0, 3, 0, 64)
    assert (paged.block_table[:, :last] == paged.block_table[0, :last]).all()
    assert paged.block_table.unique().numel() == last + 3 == paged.storage.num_blocks
    alone = paged.attend().clone()
    assert torch.equal(paged.attend(paged.prefixes), alone)


def test_series_take_turns(work: Any) -> None:
    calls: list[str] = []

    def call(series: str) -> float:
        calls.append(series)
        return 1.0

    source = work.in_turns({"a": lambda: call("a"), "b": lambda: call("b")}, 3)
    assert next(source) == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert calls == ["a", "b"] + ["a", "b"] * 3  # the first ones warm up


def test_every_page_of_a_table_is_read_and_every_byte_copied(work: Any) -> None:
    from benchmarks.work import limits

    pages = torch.randint(2**62, (8, 64))
    ids = torch.tensor([6, 1, 3], dtype=torch.int32)
    for num_threads in (1, 2, 5):
        read = limits.native().read_pages(pages.data_ptr(), ids.data_ptr(), 3, 512, num_threads)
        meant = 0
        for word in pages[ids.long()].flatten().tolist():
            meant ^= word
        assert read == meant
        target = torch.zeros_like(pages)
        limits.native().copy_bytes(target.data_ptr(), pages.data_ptr(), 8 * 512 - 3, num_threads)
        assert target.view(torch.uint8).flatten()[:-3].equal(pages.view(torch.uint8).flatten()[:-3])
        assert target.view(torch.uint8).flatten()[-3:].tolist() == [0, 0, 0]


def test_an_operation_takes_as_long_as_in_a_product_of_matrices(work: Any) -> None:
    from benchmarks.work import limits

    sizes: list[int] = []

    def time(call: Any) -> float:
        call()
        sizes.append(1)
        return 6_000.0

    once = limits.multiplying(10**6, torch.float32, torch.device("cpu"), time)
    assert once() == pytest.approx(6_000 * 10**6 / (2 * 128**3))
    assert len(sizes) == 3  # two to find the size, and the measurement
