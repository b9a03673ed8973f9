"""The meaning of write_kv, copy_blocks and paged_attention, on every backend that is quick."""

from __future__ import annotations

from typing import Any

import attention_oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_worlds import World, make_world, worlds
from probes import int32, probe

from pagedkv import KVCacheSpec, KVPages, ShapeError
from pagedkv.ops import copy_blocks, paged_attention, write_kv

pytestmark = pytest.mark.usefixtures("each_exact_backend")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NAN = float("nan")
arrangements = st.sampled_from(["block", "layer"])
layouts = st.sampled_from(["NHD", "HND"])


def expected(world: World, scale: float | None = None) -> np.ndarray:
    query = world.query.double().numpy()
    starts = world.query_start_loc.tolist()
    out = np.zeros(query.shape)
    for i, (keys, values) in enumerate(zip(world.keys, world.values, strict=True)):
        if len(keys):
            rows = slice(starts[i], starts[i + 1])
            out[rows] = attention_oracle.attend(query[rows], keys, values, scale)
    return out


def check(out: torch.Tensor, world: World, scale: float | None = None) -> None:
    assert out.shape == world.query.shape
    assert out.dtype == world.query.dtype
    tolerance = TOLERANCE[out.dtype]
    np.testing.assert_allclose(out.double().numpy(), expected(world, scale), atol=tolerance, rtol=tolerance)


# ---------------------------------------------------------------------------------------------- write_kv


@settings(max_examples=30)
@given(
    arrangement=arrangements,
    layout=layouts,
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    head_dim=st.sampled_from([8, 80]),
    slots=st.lists(st.integers(0, 4 * 16 - 1), unique=True, max_size=24),
    num_skipped=st.integers(0, 4),
    data=st.data(),
)
def test_write_kv_fills_its_slots_and_nothing_else(
    arrangement: Any,
    layout: Any,
    dtype: str,
    head_dim: int,
    slots: list[int],
    num_skipped: int,
    data: st.DataObject,
) -> None:
    pages = KVPages(KVCacheSpec.uniform(3, 2, head_dim, dtype, layout=layout), 4, arrangement=arrangement)
    pages.blocks.fill_(-7)
    slots = data.draw(st.permutations(slots + [-1] * num_skipped))
    key, value = torch.randn(2, len(slots), 2, head_dim).to(pages.blocks.dtype)
    want = pages.blocks.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            want[slot // 16, 1, 0, slot % 16] = key[token]
            want[slot // 16, 1, 1, slot % 16] = value[token]
    write_kv(key, value, *pages[1], torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(pages.blocks, want)


def test_write_kv_skips_slot_minus_one() -> None:
    pages = torch.full((4, 16, 1, 2), -7.0)
    key = torch.tensor([[[1.0, 2.0]], [[NAN, NAN]], [[NAN, NAN]]])
    write_kv(key, key, pages, pages.clone(), torch.tensor([5, -1, -1]))
    assert pages[0, 5, 0].tolist() == [1, 2]
    assert pages[3, 15, 0].tolist() == [-7, -7]  # where an index of −1 would land
    assert int((pages != -7).sum()) == 2


def test_write_kv_with_more_rows_than_slots_is_refused() -> None:
    pages = torch.full((4, 16, 1, 2), -7.0)
    with pytest.raises(ShapeError, match=r"key: expected \[1, 1, 2\] .*, got \[8, 1, 2\] .*, in write_kv"):
        write_kv(torch.ones(8, 1, 2), torch.ones(8, 1, 2), pages, pages, torch.tensor([5]))
    assert bool((pages == -7).all())


def test_write_kv_of_no_token_changes_nothing() -> None:
    pages = torch.full((4, 16, 1, 2), -7.0)
    for num_skipped in (0, 3):
        nothing = torch.ones(num_skipped, 1, 2)
        write_kv(nothing, nothing, pages, pages, torch.full((num_skipped,), -1))
        assert bool((pages == -7).all())


def test_write_kv_takes_rows_of_any_strides() -> None:
    key_pages, value_pages = torch.zeros(2, 2, 4, 3, 5)
    packed = torch.randn(6, 5, 3, 2)  # K and V of the model's fused projection, transposed
    key, value = packed.unbind(-1)
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    assert not key.is_contiguous()
    write_kv(key, value, key_pages, value_pages, torch.arange(1, 7))
    assert torch.equal(key_pages.flatten(0, 1)[1:7], key)
    assert torch.equal(value_pages.flatten(0, 1)[1:7], value)


def test_write_kv_leaves_the_pages_outside_of_any_graph() -> None:
    pages = KVPages(KVCacheSpec.uniform(1, 1, 2), 2)
    pages.blocks.zero_()
    key = torch.ones(1, 1, 2, requires_grad=True)
    write_kv(key, key * 2, *pages[0], torch.tensor([3]))
    assert not pages.blocks.requires_grad
    assert not pages[0][0].requires_grad
    assert pages.blocks[0, 0, :, 3].flatten().tolist() == [1, 1, 2, 2]


# ------------------------------------------------------------------------------------------- copy_blocks


@settings(max_examples=30)
@given(
    arrangement=arrangements,
    layout=layouts,
    destinations=st.lists(st.integers(0, 6), unique=True, max_size=7),
    data=st.data(),
)
def test_copy_blocks_reads_every_source_before_it_writes(
    arrangement: Any, layout: Any, destinations: list[int], data: st.DataObject
) -> None:
    pages = KVPages(KVCacheSpec.uniform(2, 2, 4, layout=layout), 7, arrangement=arrangement)
    pages.blocks.copy_(torch.randn(pages.blocks.shape))
    sources = [data.draw(st.integers(0, 6)) for _ in destinations]
    want = pages.blocks.clone()
    for source, destination in zip(sources, destinations, strict=True):
        want[destination] = pages.blocks[source]
    copy_blocks(
        pages.blocks, torch.tensor(sources, dtype=torch.int64), torch.tensor(destinations, dtype=torch.int64)
    )
    assert torch.equal(pages.blocks, want)


def test_copy_blocks_swaps_and_chains() -> None:
    blocks = torch.arange(5.0)[:, None].repeat(1, 3)
    copy_blocks(blocks, torch.tensor([0, 1, 2, 3]), torch.tensor([1, 0, 3, 4]))
    assert blocks[:, 0].tolist() == [1, 0, 2, 2, 3]


def test_copy_blocks_moves_every_bit_of_garbage_too() -> None:
    blocks = torch.tensor([[NAN, float("inf"), -0.0], [1.0, 2.0, 3.0]])
    copy_blocks(blocks, torch.tensor([0]), torch.tensor([1]))
    assert torch.equal(blocks[1].view(torch.int32), blocks[0].view(torch.int32))


# --------------------------------------------------------------------------------------- paged_attention


@settings(max_examples=40)
@given(world=worlds())
def test_paged_attention_is_attention_over_the_tokens(world: World) -> None:
    before = world.pages.blocks.clone()
    check(paged_attention(*world.arguments), world)
    assert torch.equal(world.pages.blocks.view(torch.uint8), before.view(torch.uint8))


@settings(max_examples=25)
@given(world=worlds(), scale=st.sampled_from([0.0, 1.0, 0.3, -0.2, np.float32(0.5), 1]))
def test_paged_attention_uses_the_scale_it_is_given(world: World, scale: float) -> None:
    check(paged_attention(*world.arguments, scale=scale), world, float(scale))


@pytest.mark.parametrize(("num_tokens", "num_queries"), [(3000, 1), (3000, 40), (500, 500)])
def test_long_contexts_are_read_to_their_end(num_tokens: int, num_queries: int) -> None:
    world = make_world([(num_tokens, num_queries, 0), (17, 3, 1)], num_heads=2, garbage=6e4)
    check(paged_attention(*world.arguments), world)


def test_entries_behind_the_length_are_never_read() -> None:
    world = make_world([(17, 2, 0), (5, 5, 0), (40, 1, 0)])
    want = paged_attention(*world.arguments)
    for junk in (-1, -(2**31), 2**31 - 1):
        for i, num_blocks in enumerate((2, 1, 3)):
            world.block_table[i, num_blocks:] = junk
        assert torch.equal(paged_attention(*world.arguments), want)


def test_sequences_of_length_zero_give_rows_of_zeros() -> None:
    world = make_world([(0, 2, 0), (17, 3, 0), (0, 0, 0), (0, 1, 0)])
    out = paged_attention(*world.arguments, out=torch.full_like(world.query, NAN))
    assert out[[0, 1, 5]].abs().max() == 0
    check(out, world)


def test_sequences_without_queries_give_no_rows() -> None:
    world = make_world([(9, 0, 0), (17, 1, 0), (20, 0, 1)])
    out = paged_attention(*world.arguments)
    assert len(out) == 1
    check(out, world)


def test_a_batch_of_nothing_gives_nothing() -> None:
    world = make_world([])
    assert paged_attention(*world.arguments).shape == (0, 2, 16)


def test_out_is_returned_and_overwritten() -> None:
    world = make_world([(20, 4, 0), (3, 3, 0)])
    # A buffer of other strides, as a caller's slice of a larger one has.
    out = torch.full((*world.query.shape[:2], 32), NAN)[..., ::2]
    assert paged_attention(*world.arguments, out=out) is out
    check(out, world)
    want = out.clone()
    assert paged_attention(*world.arguments, out=world.query) is world.query  # in place
    assert torch.equal(world.query, want)


def test_rows_do_not_depend_on_their_neighbours_in_the_batch() -> None:
    shapes = [(17, 3, 0), (40, 1, 1), (5, 5, 0)]
    world = make_world(shapes)
    together = paged_attention(*world.arguments)
    query, key_pages, value_pages, table, lens, starts = world.arguments
    for i, (first, last) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        rows = int32(0, last - first)
        alone = paged_attention(
            query[first:last], key_pages, value_pages, table[i : i + 1], lens[i : i + 1], rows
        )
        assert torch.equal(alone, together[first:last])


def test_chunks_give_what_one_prefill_gives() -> None:
    whole = make_world([(45, 45, 0)], num_kv_heads=2, num_heads=6)
    want = paged_attention(*whole.arguments)
    query, key_pages, value_pages, table, *_ = whole.arguments
    for start in range(0, 45, 7):
        end = min(start + 7, 45)
        rows = query[start:end]
        got = paged_attention(rows, key_pages, value_pages, table, int32(end), int32(0, end - start))
        torch.testing.assert_close(got, want[start:end], atol=2e-6, rtol=2e-6)


def test_queries_of_any_strides_are_taken() -> None:
    world = make_world([(20, 4, 0)], num_heads=4)
    strided = world.query.transpose(0, 2).contiguous().transpose(0, 2)
    assert not strided.is_contiguous()
    check(paged_attention(strided, *world.arguments[1:]), world)
    broadcast = world.query[:1].expand(4, -1, -1)
    check(paged_attention(broadcast, *world.arguments[1:]), world._replace(query=broadcast))


def test_paged_attention_is_not_differentiated() -> None:
    world = make_world([(20, 4, 0)])
    query = world.query.clone().requires_grad_()
    out = torch.zeros_like(world.query, requires_grad=True)
    assert not paged_attention(query, *world.arguments[1:]).requires_grad
    check(paged_attention(query, *world.arguments[1:], out=out).detach(), world)


@pytest.mark.parametrize("head_dim", [1, 16, 64, 80, 96, 112, 192, 256])
def test_head_dims_need_be_no_power_of_two(head_dim: int) -> None:
    for dtype in ("float32", "bfloat16"):
        check(*_attended([(33, 5, 0), (16, 1, 0)], head_dim=head_dim, num_heads=6, dtype=dtype))


def _attended(shapes: list[tuple[int, int, int]], **options: Any) -> tuple[torch.Tensor, World]:
    world = make_world(shapes, **options)
    return paged_attention(*world.arguments), world


# ---------------------------------------------------------- probes whose output is the attention weights


def test_each_query_sees_every_token_up_to_its_own_and_none_behind() -> None:
    for num_queries in (1, 3, 9, 10):
        weights, _ = probe([0.0] * 10, [2, 0], num_queries=num_queries)
        for row in range(num_queries):
            position = 10 - num_queries + row
            want = [1 / (position + 1)] * (position + 1) + [0.0] * (63 - position)
            torch.testing.assert_close(weights[row], torch.tensor(want))


def test_weights_are_those_of_the_softmax() -> None:
    weights, _ = probe([0.0, 1.0, 2.0], [1])
    torch.testing.assert_close(weights[0, :3], torch.tensor([0.0900306, 0.2447285, 0.6652410]))
    # No overflow: the largest logit is subtracted first.
    weights, _ = probe([9e3, 9e3, 0.0], [1])
    torch.testing.assert_close(weights[0, :3], torch.tensor([0.5, 0.5, 0.0]))
