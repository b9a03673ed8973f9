"""paged_attention in Triton: every option against its definition in float64."""

from __future__ import annotations

import mmap
import resource
from typing import Any

import numpy as np
import pytest
import torch
from triton_cases import DEVICE, NAN, Batch, attend, backend, check, expected, make_batch

from pagedkv import ops
from pagedkv.batch import SharedPrefixes
from pagedkv.kernels.triton import attention

# Decode, a chunk behind 14 tokens, a prefill, one token, nothing, padding with a query, two splits and a bit.
LENS, QUERIES = [37, 17, 5, 1, 0, 0, 1030], [1, 3, 5, 1, 0, 2, 2]
NUM_TOKENS = sum(QUERIES) + 3
RNG = np.random.default_rng(5)
SEEN = RNG.random((NUM_TOKENS, 7)) < 0.6
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": -0.7},
    "bidirectional": {"causal": False},
    "window": {"window": 6},
    "window of itself": {"window": 1},
    "largest window": {"window": 2**31 - 1},
    "window, bidirectional": {"window": 6, "causal": False},
    "soft cap": {"soft_cap": 0.9},
    "alibi": {"alibi_slopes": np.float32([0.5, 0.25, 0.125, 2.0])},
    "sinks": {"sinks": np.float32([1.0, -3.0, 9.0, 0.0])},
    "bool mask": {"mask": SEEN, "causal": False},
    "float mask": {"mask": np.where(SEEN, RNG.normal(size=SEEN.shape), -np.inf).astype(np.float32)},
}
OPTIONS["all"] = {
    **OPTIONS["float mask"], **OPTIONS["alibi"], **OPTIONS["sinks"],
    "window": 40, "soft_cap": 0.9, "scale": 0.3,
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_means_its_definition(name: str) -> None:
    check(make_batch(LENS, QUERIES, num_padding=3), **OPTIONS[name])


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (7, 1), (8, 2), (64, 1), (71, 1)])
def test_query_heads_share_key_heads_in_any_ratio(heads: tuple[int, int]) -> None:
    check(make_batch([33, 20], [1, 3], num_heads=heads[0], num_kv_heads=heads[1]))


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128, 192, 256, 24])
def test_any_head_dim_is_right(head_dim: int) -> None:
    check(make_batch([33, 20], [1, 3], head_dim=head_dim))


@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 32, 48, 64, 128, 192])
def test_any_block_size_is_right(block_size: int) -> None:
    check(make_batch([200, 7], [1, 3], block_size=block_size))


@pytest.mark.parametrize("layout", ["block NHD", "block HND", "layer NHD", "layer HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_any_layout_and_dtype_is_right(layout: str, dtype: torch.dtype) -> None:
    check(make_batch([70, 20], [1, 3], layout=layout, dtype=dtype))


@pytest.mark.parametrize("scales", ["none", "tensor", "head", "token"])
@pytest.mark.parametrize("page_dtype", [torch.float8_e4m3fn, torch.int8])
def test_pages_of_8_bits_are_read_with_their_scales(scales: str, page_dtype: torch.dtype) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        scale = 1e-3 if scales == "none" and page_dtype == torch.int8 else 0.25
        check(make_batch([70, 20], [1, 3], dtype=dtype, page_dtype=page_dtype, scales=scales), scale=scale)


def test_e4m3_without_hardware_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([70, 20], [1, 3], page_dtype=torch.float8_e4m3fn)
    out, lse = attend(batch)
    monkeypatch.setattr(attention, "has_e4m3", lambda target: False)
    again, again_lse = attend(batch)
    assert torch.equal(out, again)
    assert torch.equal(lse, again_lse)


@pytest.mark.parametrize("garbage", [NAN, float("inf"), float("-inf"), 6e4])
def test_what_no_query_may_see_reaches_no_answer(garbage: float) -> None:
    for window in (0, 9):
        batch = make_batch([1, 15, 16, 17, 90], [1, 2, 1, 1, 2], garbage=garbage, dtype=torch.float16)
        if window:  # the pages in front of a window are somebody else's by now, and so is what they hold
            gone = batch.block_table[4, :5].long()
            batch.key_pages[gone] = garbage
            batch.value_pages[gone] = garbage
            batch.block_table[4, :5] = -1
        check(batch, window=window)


def test_entries_that_are_not_needed_are_never_read() -> None:
    batch = make_batch([90, 33], [1, 2])
    right = attend(batch, window=9)
    batch.block_table[0, :5] = 2**31 - 1
    batch.block_table[1, 3:] = -(2**31)
    assert torch.equal(attend(batch, window=9)[0], right[0])


def test_a_page_that_there_is_not_reads_nothing_outside_of_the_pages() -> None:
    batch = make_batch([40, 33], [1, 2])
    right = attend(batch)[0]
    batch.block_table[0, 1] = 2**31 - 1
    batch.block_table[0, 2] = -1
    out = attend(batch)[0]
    assert torch.equal(out[1:], right[1:])
    assert out.isfinite().all()


def test_outputs_with_strides_are_written_nowhere_else() -> None:
    batch = make_batch([40, 33], [1, 2])
    around = torch.full((5, 8, 40), 7.0, device=DEVICE)
    out, lse = around[1:4, ::2, 3:19], torch.full((9, 4), 7.0, device=DEVICE)
    query = torch.zeros(6, 5, 16, device=DEVICE)[::2, :4].copy_(batch.query)
    options = [0.25, True, 0, 0.0, None, None, None, None, None, None, None]
    backend.paged_attention(query, *batch[1:6], out, lse[1:7:2], *options)
    right, right_lse = attend(batch)
    assert torch.equal(out.cpu(), right)
    assert torch.equal(lse[1:7:2].cpu(), right_lse)
    out.fill_(7.0)
    lse[1:7:2] = 7.0
    assert (around == 7).all()
    assert (lse == 7).all()


def test_without_lse_the_answer_is_the_same() -> None:
    batch = make_batch([40], [2])
    out = torch.empty_like(batch.query)
    options = [0.25, True, 0, 0.0, None, None, None, None, None, None, None]
    backend.paged_attention(*batch[:6], out, None, *options)
    assert torch.equal(out.cpu(), attend(batch)[0])


def test_a_batch_of_padding_gives_zeros() -> None:
    check(make_batch([], [], num_padding=3))
    check(make_batch([0, 0], [1, 0], num_padding=2), sinks=np.zeros(4, np.float32))
    assert attend(make_batch([4], [0]))[0].shape[0] == 0


def test_a_query_that_sees_nothing_has_its_sink_or_nothing() -> None:
    batch = make_batch([4], [2])
    mask = np.array([[True, True], [False, False]])
    out, lse = attend(batch, mask=mask, window=1)
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()
    check(batch, mask=mask, window=1, sinks=np.float32([1, 2, 3, 4]))


def test_head_dims_beyond_the_table_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim up to 256, got 320"):
        attend(make_batch([4], [1], head_dim=320))


@pytest.mark.parametrize("num_multiprocessors", [0, 2, 100])
def test_splits_apart_or_in_a_row_are_right(
    monkeypatch: pytest.MonkeyPatch, num_multiprocessors: int
) -> None:
    monkeypatch.setattr(attention, "count_multiprocessors", lambda device: num_multiprocessors)
    batch = make_batch([1030, 512, 513, 40], [2, 1, 4, 20])
    check(batch)
    check(batch, window=515, sinks=np.zeros(4, np.float32))


def test_values_of_any_size_survive_the_fold() -> None:
    for factor in (1e-4, 1e4):
        batch = make_batch([1030], [2])
        batch = batch._replace(
            value_pages=batch.value_pages * factor, values=[x * factor for x in batch.values]
        )
        out, _ = attend(batch)
        right, _ = expected(batch)
        assert np.linalg.norm(out.numpy() - right) <= 2e-6 * np.linalg.norm(right)


def _identity_values(batch: Batch) -> Batch:
    """Make `out` the vector of attention weights."""
    for page in range(len(batch.key_pages)):
        batch.value_pages[page] = 0
    for position in range(int(batch.seq_lens[0])):
        page = batch.block_table[0, position // 16]
        batch.value_pages[page, position % 16, :, position] = 1
    return batch


def test_weights_of_a_window_are_those_of_its_keys() -> None:
    batch = _identity_values(make_batch([10], [10], head_dim=16, num_heads=1, num_kv_heads=1))
    out, _ = attend(batch, scale=0.0, window=4)
    for position in range(10):
        seen = range(max(0, position - 3), position + 1)
        right = torch.tensor([1 / len(seen) if i in seen else 0.0 for i in range(16)])
        torch.testing.assert_close(out[position, 0], right)


def test_the_checked_entries_reach_these_kernels() -> None:
    batch = make_batch([600, 620, 30], [1, 2, 1], shared_blocks=33)
    ints = {"dtype": torch.int32, "device": DEVICE}
    shared = SharedPrefixes(torch.tensor([[0, 2, 0, 33]], **ints), torch.tensor([0, 1], **ints))
    slopes, sinks = torch.rand(4, device=DEVICE), torch.rand(4, device=DEVICE)
    lse = torch.empty(4, 4, device=DEVICE)
    out = ops.paged_attention(
        *batch[:6],
        lse=lse,
        window=300,
        alibi_slopes=slopes,
        sinks=sinks,
        shared_prefixes=shared,
        backend="triton",
    )
    right, right_lse = attend(batch, window=300, alibi_slopes=slopes, sinks=sinks)
    assert torch.equal(out.cpu(), right)
    assert torch.equal(lse.cpu(), right_lse)


@pytest.mark.skipif(DEVICE != "cpu", reason="reserves memory of the CPU")
def test_pages_beyond_two_billion_elements_are_reached() -> None:
    """By their strides, in memory that is reserved but for three pages never touched."""
    batch = make_batch([40], [1], num_heads=2, num_kv_heads=1, dtype=torch.float16)
    right = attend(batch)
    stride = 2**30 + 16
    num_elements = 5 * stride
    no_reserve = 0x4000  # Linux; Python 3.13 has a name for it
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    storage = torch.frombuffer(mmap.mmap(-1, 2 * num_elements, flags=flags), dtype=torch.float16)
    pages = [storage.as_strided((5, 16, 1, 16), (stride, 16, 16, 1), offset) for offset in (0, 4096)]
    table = torch.tensor([[4, 2, 3]], dtype=torch.int32)
    for far, near in zip(pages, batch[1:3], strict=True):
        for column in range(3):
            far[table[0, column]] = near[batch.block_table[0, column]]
    far_batch = batch._replace(key_pages=pages[0], value_pages=pages[1], block_table=table)
    out, lse = attend(far_batch)
    assert torch.equal(out, right[0])
    assert torch.equal(lse, right[1])
    backend.write_kv(*torch.ones(2, 1, 1, 16).half(), *pages, torch.tensor([4 * 16 + 15]), None, None)
    assert (pages[0][4, 15] == 1).all()
    assert (pages[1][4, 15] == 1).all()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20  # kilobytes
