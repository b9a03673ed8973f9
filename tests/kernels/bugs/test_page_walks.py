"""Which page is read, which part of it, and what must not be read at all."""

from __future__ import annotations

import pytest
import torch
from backends import on_every_backend
from guarded import Guards
from page_worlds import GARBAGE, make_world
from probes import identity_pages, int32, probe

from pagedkv.ops import paged_attention, write_kv

NAN = float("nan")


@on_every_backend
def test_page_ids_keep_more_than_16_bits(backend: str) -> None:
    """A pool of more than 65,536 pages answered with others (ATOM)."""
    num_pages = 65_600
    constants = (torch.arange(num_pages) % 251).to(torch.float16)[:, None, None, None]
    values = constants.repeat(1, 1, 1, 16).expand(-1, 16, -1, -1)
    keys = torch.zeros(1, 1, 1, 16, dtype=torch.float16).expand(num_pages, 16, 1, 16)
    query = torch.zeros(3, 1, 16, dtype=torch.float16)
    tables = int32([65_535], [65_536], [65_537]), int32(16, 16, 16), int32(0, 1, 2, 3)
    out = paged_attention(query, keys, values, *tables, backend=backend)  # type: ignore[arg-type]
    assert out[:, 0, 0].tolist() == [24, 25, 26]


@on_every_backend
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_garbage_behind_the_length_reaches_no_output(garbage: float, dtype: str, backend: str) -> None:
    """A weight of 0 times NaN is NaN (vLLM, flash-attention, aiter)."""
    for length in (1, 5, 15, 16, 17):
        for num_queries in {1, length, (length + 1) // 2}:
            shapes = [(length, num_queries, 0), (600 + length, 1, 0)]  # the second in several splits
            world = make_world(shapes, garbage=garbage, dtype=dtype)
            out = paged_attention(*world.arguments, backend=backend)  # type: ignore[arg-type]
            assert bool(out.isfinite().all())
            tolerance = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
            want = torch.from_numpy(world.expected()[0])
            torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)


@on_every_backend
def test_a_padded_slot_is_not_the_last_one(backend: str) -> None:
    """−1 wrapped around to the last slot, or rows were counted by the keys (vLLM)."""
    guards = Guards()
    pages = guards.copy("pages", torch.full((4, 16, 1, 16), -7.0))
    key = torch.full((3, 1, 16), NAN)
    key[0] = 1
    write_kv(key, key, pages, pages.clone(), torch.tensor([5, -1, -1]), backend=backend)  # type: ignore[arg-type]
    guards.check()
    changed = (pages != -7).flatten(2).any(-1).nonzero().tolist()
    assert changed == [[0, 5]]


@on_every_backend
@pytest.mark.parametrize("window", [None, 4])
def test_padded_rows_poison_nothing(window: int | None, backend: str) -> None:
    """They wrote NaN into the page that padded entries read (SGLang, transformers, vLLM)."""
    real = make_world([(17, 1, 0), (9, 1, 0)], garbage=0.0)
    query, key_pages, value_pages, table, *_ = real.arguments
    want = paged_attention(*real.arguments, window=window, backend=backend)  # type: ignore[arg-type]
    before = real.pages.blocks.clone()
    padded_query = torch.cat([query, torch.full_like(query, NAN)])
    padded_table = torch.cat([table, torch.full_like(table, -1)])
    slots = torch.tensor([int(table[0, 1]) * 16, int(table[1, 0]) * 16 + 8, -1, -1])
    key, value = torch.full((2, 4, 2, 16), NAN)
    for row, slot in enumerate(slots.tolist()[:2]):
        key[row], value[row] = key_pages[slot // 16, slot % 16], value_pages[slot // 16, slot % 16]
    # The two rows of padding have a token each, or their tokens lie behind the last row's.
    for lens, starts in (
        (int32(17, 9, 0, 0), int32(0, 1, 2, 3, 4)),
        (int32(17, 9, 0, 0), int32(0, 1, 2, 2, 2)),
    ):
        for _ in range(3):
            write_kv(key, value, key_pages, value_pages, slots, backend=backend)  # type: ignore[arg-type]
            out, lse = torch.full_like(padded_query, NAN), torch.full((4, 2), NAN)
            paged_attention(
                padded_query,
                key_pages,
                value_pages,
                padded_table,
                lens,
                starts,
                window=window,
                out=out,
                lse=lse,
                backend=backend,  # type: ignore[arg-type]
            )
            assert torch.equal(real.pages.blocks, before)
            assert torch.equal(out[:2], want)
            assert out[2:].abs().max() == 0
            assert bool((lse[2:] == float("-inf")).all())


@on_every_backend
@pytest.mark.parametrize("table", [[0, 1, 2, 3], [3, 2, 1, 0], [3, 1, 2, 0]])
def test_the_order_of_pages_is_the_order_of_tokens(table: list[int], backend: str) -> None:
    """The order in memory leaked into that of the tokens (vllm-ascend)."""
    weights, _ = probe([0.0] * 40, table, backend=backend)
    torch.testing.assert_close(weights[0, :40], torch.full((40,), 0.025))
    logits = [j / 10 for j in range(40)]
    in_order, _ = probe(logits, [0, 1, 2, 3], num_queries=40, backend=backend)
    weights, _ = probe(logits, table, num_queries=40, backend=backend)
    assert torch.equal(weights, in_order)


@on_every_backend
@pytest.mark.parametrize("block_size", [8, 16, 32, 48, 64, 128, 192])
def test_a_page_is_read_to_its_end(block_size: int, backend: str) -> None:
    """A tile that does not divide the page dropped the page's tail (TileOPs)."""
    table = list(reversed(range(-(-60 // block_size))))
    weights, _ = probe([0.0] * 60, table, block_size=block_size, num_blocks=len(table), backend=backend)
    torch.testing.assert_close(weights[0, :60], torch.full((60,), 1 / 60))
    assert weights[0, 60:].abs().max() == 0
    values = torch.ones(4, block_size, 1, 16)  # and with 192 of one page
    values[2] = torch.arange(block_size, dtype=torch.float32)[:, None, None]
    tables = int32([2]), int32(block_size), int32(0, 1)
    query, keys = torch.zeros(1, 1, 16), torch.zeros(4, block_size, 1, 16)
    out = paged_attention(query, keys, values, *tables, backend=backend)  # type: ignore[arg-type]
    torch.testing.assert_close(out, torch.full_like(out, (block_size - 1) / 2))


@on_every_backend
def test_tokens_beyond_the_table_are_not_written(backend: str) -> None:
    """Drafts ran past the limit and wrote behind table and pool (exllamav2, vLLM, vllm-ascend)."""
    guards = Guards()
    pages = [
        guards.copy("pages", kind) for kind in identity_pages([0.0] * 30, [1, 0], num_blocks=2, garbage=0.0)
    ]
    key = torch.ones(5, 1, 64)
    slots = torch.tensor([14, 15, -1, -1, -1])  # positions 30, 31, and three that have no place
    write_kv(key, key, *pages, slots, backend=backend)  # type: ignore[arg-type]
    table = guards.copy("table", int32([1, 0]))
    query = torch.zeros(2, 1, 64)
    out = guards.empty("out", query)
    paged_attention(query, *pages, table, int32(32), int32(0, 2), out=out, backend=backend)  # type: ignore[arg-type]
    guards.check()
    assert bool(out.isfinite().all())


@on_every_backend
def test_a_stride_of_more_than_2_to_the_31_elements_is_no_other_page(backend: str) -> None:
    """Page 1 begins behind 2³¹ elements; the memory between is never touched, so the system gives none."""
    stride = 2**31 + 4096
    memory = torch.empty(stride + 16 * 16, dtype=torch.int8)
    pages = memory.as_strided((2, 16, 1, 16), (stride, 16, 16, 1))
    pages[0], pages[1] = 1, 2
    query = torch.zeros(1, 1, 16)
    tables = int32([1, 0]), int32(17), int32(0, 1)
    out = paged_attention(query, pages, pages, *tables, backend=backend)  # type: ignore[arg-type]
    torch.testing.assert_close(out, torch.full_like(out, (16 * 2 + 1) / 17))
    key = torch.full((1, 1, 16), 5, dtype=torch.int8)
    write_kv(key, key, pages, pages, torch.tensor([31]), backend=backend)  # type: ignore[arg-type]
    assert memory[stride + 15 * 16 :].tolist() == [5] * 16
