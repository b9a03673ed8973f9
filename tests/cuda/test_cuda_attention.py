"""paged_attention of csrc/cuda, run on the host, against its definition in float64."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
from cuda_shim import Shim
from paged_cases import Case, Options, check, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# decode, chunks behind a cached part, prefill, padding, more than one split
MIXED = [(70, 1), (33, 5), (0, 1), (40, 40), (16, 0), (530, 3), (1, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 256])
def test_every_head_dim(shim: Shim, dtype: torch.dtype, dim: int) -> None:
    check(shim, Case([(35, 1), (20, 20)], num_kv_heads=1, dim=dim, dtype=dtype, padding=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 1, 5])
def test_mixed_batches_over_every_block_size(shim: Shim, dtype: torch.dtype, block_size: int) -> None:
    check(shim, Case(MIXED, dtype=dtype, block_size=block_size, padding=2, heads_first=block_size == 32))


@pytest.mark.parametrize(("num_kv_heads", "group"), [(3, 3), (1, 7), (2, 4), (1, 64), (1, 20), (2, 1)])
@pytest.mark.parametrize("shapes", [[(70, 1), (20, 1)], [(90, 3)], [(30, 30), (17, 1)]], ids=str)
def test_every_ratio_of_heads(
    shim: Shim, num_kv_heads: int, group: int, shapes: list[tuple[int, int]]
) -> None:
    check(shim, Case(shapes, num_kv_heads=num_kv_heads, group=group, dtype=torch.bfloat16))


def tree_mask(num_tokens: int, num_new: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(num_tokens, num_new, generator=generator) < 0.5
    mask[1] = False
    return mask


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.3, -1.0, 2.0, float("-inf")])
OPTIONS = {
    "not causal": Options(causal=False),
    "window": Options(window=7),
    "window of one": Options(window=1),
    "window, not causal": Options(causal=False, window=9),
    "soft cap": Options(scale=1.0, soft_cap=2.0),
    "alibi": Options(slopes=SLOPES),
    "sinks": Options(sinks=SINKS),
    "tree": Options(causal=False, mask=tree_mask(8, 6)),
    "tree, causal": Options(mask=tree_mask(8, 9)),
    "tree, all": Options(0.3, False, 20, 3.0, SLOPES, SINKS, tree_mask(8, 6)),
    "added mask": Options(mask=torch.where(tree_mask(8, 6), torch.linspace(-2, 2, 6), float("-inf"))),
    "everything": Options(0.3, True, 40, 3.0, SLOPES, SINKS, torch.linspace(-1, 1, 48).view(8, 6)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(shim: Shim, dtype: torch.dtype, name: str) -> None:
    case = Case([(70, 2), (0, 1), (530, 5)], dtype=dtype, options=OPTIONS[name])
    check(shim, case)


def test_options_in_prefill(shim: Shim) -> None:
    mask = torch.rand(80, 80, generator=torch.Generator().manual_seed(1)) < 0.7
    for options in (Options(window=30), Options(0.3, False, 50, 3.0, SLOPES, SINKS, mask)):
        check(shim, Case([(600, 80)], dtype=torch.bfloat16, options=options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("scales", ["none", "one", "by head", "by token"])
def test_pages_of_eight_bits(shim: Shim, dtype: torch.dtype, page_dtype: torch.dtype, scales: str) -> None:
    case = Case([(70, 1), (40, 40), (530, 3)], dtype=dtype, page_dtype=page_dtype, dim=48)
    shape = case.keys.shape[:3]
    generator = torch.Generator().manual_seed(3)
    drawn = torch.rand(2, *shape, generator=generator) * 0.05 + 0.01
    drawn = (
        drawn if scales == "by token" else drawn[:, :1, :1] if scales == "by head" else drawn[:, :1, :1, :1]
    )
    case.options.scale = 0.25 if scales != "none" else 0.02
    if scales != "none":
        case.options.key_scales, case.options.value_scales = drawn.expand(2, *shape).unbind()
    if scales == "by token":  # what was never written has no scale either
        case.options.key_scales[~case.written] = float("nan")
        case.options.value_scales[~case.written] = float("nan")
    check(shim, case)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf"), 6e4])
def test_garbage_that_nobody_sees_reaches_no_output(shim: Shim, garbage: float) -> None:
    check(shim, Case(MIXED, dtype=torch.float16, garbage=garbage))


def test_pages_in_front_of_a_window_are_not_read(shim: Shim) -> None:
    case = Case(MIXED, dtype=torch.float16, options=Options(window=20))
    expected = case.expected()
    for row, (length, queries) in enumerate(case.shapes):
        case.table[row, : max(0, length - queries - 19) // case.block_size] = -1
    # The id −1 would read as zeros, which might not show: so a real page, full of NaN.
    nobodys = int((~case.written.any(1)).nonzero()[0])
    case.table[case.table == -1] = nobodys
    check(shim, case, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_an_infinite_value_reaches_only_who_sees_it(shim: Shim, dtype: torch.dtype, odd: float) -> None:
    """Query 66 of a prefill wrote it, so the ones before keep their bits.

    A warp has eight queries here and takes keys by sixteens: key 66 is among the first it takes of a tile,
    its own queries 64 and 65 don't see it, and another warp has to clear it.
    """
    case = Case([(100, 100), (90, 4)], dtype=dtype)
    clean, _ = run(shim, case)
    case.values[case.place(0, 66)] = odd
    case.values[case.place(1, 88)] = odd
    for seed in range(4):
        shim.seed(seed)
        got, _ = run(shim, case)
        touched = torch.zeros_like(got, dtype=torch.bool)
        touched[66:100] = True
        touched[102:104] = True
        assert torch.equal(got[~touched], clean[~touched])
        assert not got[touched].isfinite().any()


def test_rows_need_not_be_aligned(shim: Shim) -> None:
    """Heads of 20 numbers, and pages that begin at odd places."""
    for dtype, dim in ((torch.bfloat16, 20), (torch.float32, 33), (torch.float16, 64)):
        case = Case([(70, 1), (40, 40)], dim=dim, dtype=dtype)
        for name in ("query", "keys", "values"):
            tensor = getattr(case, name)
            wide = torch.full((*tensor.shape[:-1], dim + 3), float("nan"), dtype=dtype)
            wide[..., 1:-2] = tensor
            setattr(case, name, wide[..., 1:-2])
        check(shim, case)


def test_a_small_device_gets_the_same_bits(shim: Shim) -> None:
    for dtype in DTYPES:
        case = Case([(600, 70), (90, 30)], num_kv_heads=1, dim=256, dtype=dtype)
        wide, _ = run(shim, case)
        shim.limit_shared_memory(100 * 1024)
        narrow, _ = run(shim, case)
        assert torch.equal(wide, narrow)
        shim.limit_shared_memory(227 * 1024)


def test_page_ids_out_of_range_touch_no_memory(shim: Shim) -> None:
    case = Case([(40, 1)])
    case.table[0, 1] = 10**6
    run(shim, case)


def test_indices_beyond_two_to_the_31(shim: Shim) -> None:
    """Pages 3 · 2³⁰ bytes apart from each other; only what is written is real memory."""
    apart = 3 << 30
    case = Case([(30, 2)], num_kv_heads=1, dim=16, page_dtype=torch.int8)
    assert len(case.keys) == 4
    near = case.keys, case.values
    expected, _ = run(shim, case)
    memory = torch.empty(3 * apart + 2 * near[0][0].numel(), dtype=torch.int8)
    for i, (name, pages) in enumerate(zip(("keys", "values"), near, strict=True)):
        size = pages[0].numel()
        far = memory[i * size :].as_strided(pages.shape, (apart, *pages.stride()[1:]))
        far.copy_(pages)
        setattr(case, name, far)
    assert torch.equal(run(shim, case)[0], expected)


def test_splits_that_do_not_fit_the_scratch_memory_come_in_waves(shim: Shim) -> None:
    """A window across the place where two waves of three meet, in a table of a million tokens."""
    num_seqs, group, dim = 4, 64, 256
    case = Case([(200, 1)] * num_seqs, num_kv_heads=1, group=group, dim=dim, options=Options(window=150))
    wave_splits = (256 << 20) // (num_seqs * group * (dim + 2) * 4)
    shift = wave_splits * 512 - 112  # the window begins in front of it and ends behind
    expected = case.expected()
    table = torch.full((num_seqs, (2 * wave_splits + 1) * 512 // 16), -1, dtype=torch.int32)
    table[:, shift // 16 : shift // 16 + case.table.shape[1]] = case.table
    case.table = table
    case.lens += shift
    check(shim, case, expected)


@pytest.mark.parametrize("shape", [(35, 1), (35, 3)], ids=str)
def test_nothing_behind_the_last_query_is_read(shim: Shim, shape: tuple[int, int]) -> None:
    """Rows of a tile that no query fills. What lies there is forbidden: to read it would end the process."""
    case = Case([shape], num_kv_heads=1, group=2, dim=64, dtype=torch.bfloat16)
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    behind = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + mmap.PAGESIZE
    assert libc.mprotect(ctypes.c_void_p(behind), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    at_the_end = torch.frombuffer(
        memory, dtype=case.dtype, count=case.query.numel(), offset=mmap.PAGESIZE - case.query.nbytes
    )
    case.query = at_the_end.view_as(case.query).copy_(case.query)
    check(shim, case)
