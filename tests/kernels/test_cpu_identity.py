"""A hit never changes an answer: the same bits whatever the batch, the chunks, the groups and the threads."""

from __future__ import annotations

from typing import Any

import torch
from cpu_cases import Case, attend, make_case, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

lengths = st.sampled_from([1, 2, 15, 16, 17, 100, 511, 512, 513, 700, 1024, 1100, 1600])


@st.composite
def cases(
    draw: st.DrawFn,
    max_new: int = 40,
    lens: st.SearchStrategy[int] = lengths,
    max_rows: int = 3,
    poisoned: bool = True,
) -> Case:
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    group = draw(st.sampled_from([1, 2, 3, 4, 5, 7]))
    head_dim = draw(st.sampled_from([16, 64, 80, 24, 20]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    page_dtype = draw(st.sampled_from([dtype, dtype, torch.int8, torch.float8_e4m3fn]))
    seq_lens = draw(st.lists(lens, min_size=1, max_size=max_rows))
    num_new = [draw(st.integers(1, min(seq_len, max_new))) for seq_len in seq_lens]
    options: dict[str, Any] = {"causal": draw(st.sampled_from([True, True, False]))}
    num_heads = group * num_kv_heads
    if draw(st.booleans()):
        options["window"] = draw(st.sampled_from([1, 5, 128, 600]))
    if draw(st.booleans()):
        options["soft_cap"] = 5.0
    if draw(st.booleans()):
        options["alibi_slopes"] = torch.linspace(0.01, 0.2, num_heads)
    if draw(st.booleans()):
        options["sinks"] = torch.linspace(-2, 2, num_heads)
    case = make_case(
        seq_lens,
        num_new,
        seed=draw(st.integers(0, 1000)),
        dtype=dtype,
        page_dtype=page_dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=draw(st.sampled_from([8, 16, 32, 128])),
        layout=draw(st.sampled_from(["NHD", "HND"])),
        poisoned=poisoned,
        **options,
    )
    if page_dtype.itemsize == 1:
        shape = case.key_pages.shape[:3]
        key_scales = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 0.05
        case = case.given(key_scales=key_scales, value_scales=key_scales.flip(0))
    return case


def rows_of(case: Case, row: int, first: int, last: int) -> Case:
    """Return the queries [first, last) of one sequence as a batch of their own, with the keys up to them."""
    start, end = case.query_start_loc[row : row + 2].tolist()
    seq_len = int(case.seq_lens[row]) - (end - start) + last
    return Case(
        case.query[start + first : start + last],
        case.key_pages,
        case.value_pages,
        case.block_table[row : row + 1],
        torch.tensor([seq_len], dtype=torch.int32),
        torch.tensor([0, last - first], dtype=torch.int32),
        case.options,
    )


@settings(max_examples=max(10, settings.default.max_examples // 5))
@given(cases(), st.integers(1, 3))
def test_threads_change_no_bit(case: Case, num_threads: int) -> None:
    torch.set_num_threads(1)
    expected = attend(case)
    torch.set_num_threads(num_threads)
    for got, want in zip(attend(case), expected, strict=True):
        assert same_bits(got, want)


@settings(max_examples=max(10, settings.default.max_examples // 5))
@given(cases())
def test_the_batch_around_a_sequence_changes_no_bit(case: Case) -> None:
    whole = attend(case)
    starts = case.query_start_loc.tolist()
    for row in range(len(case.seq_lens)):
        start, end = starts[row], starts[row + 1]
        for got, want in zip(attend(rows_of(case, row, 0, end - start)), whole, strict=True):
            assert same_bits(got, want[start:end])


@settings(max_examples=max(10, settings.default.max_examples // 5))
@given(cases(), st.data())
def test_chunks_of_a_prefill_change_no_bit(case: Case, data: st.DataObject) -> None:
    case = case.given(causal=True)
    whole = attend(case)
    start, end = case.query_start_loc[:2].tolist()
    first = 0
    while first < end - start:
        last = data.draw(st.integers(first + 1, end - start))
        for got, want in zip(attend(rows_of(case, 0, first, last)), whole, strict=True):
            assert same_bits(got, want[start + first : start + last])
        first = last


@settings(max_examples=max(10, settings.default.max_examples // 5))
@given(cases(max_new=300, lens=st.sampled_from([300, 513, 900]), max_rows=1))
def test_a_prefill_is_its_tokens_one_by_one(case: Case) -> None:
    case = case.given(causal=True)
    whole = attend(case)
    start, end = case.query_start_loc[:2].tolist()
    for token in range(0, end - start, 37):
        for got, want in zip(attend(rows_of(case, 0, token, token + 1)), whole, strict=True):
            assert same_bits(got, want[start + token : start + token + 1])


@settings(max_examples=max(10, settings.default.max_examples // 5))
@given(
    cases(max_new=4, lens=st.sampled_from([1100, 1600, 2100]), max_rows=1, poisoned=False),
    st.integers(2, 5),
    st.integers(0, 600),
    st.integers(1, 3),
)
def test_groups_change_no_bit(case: Case, num_rows: int, own: int, num_threads: int) -> None:
    # Every row has the first row's pages; those from `own` on are its own in the last rows.
    table = case.block_table[:1].repeat(num_rows, 1)
    block_size = case.key_pages.shape[1]
    seq_len = int(case.seq_lens[0])
    num_new = int(case.query_start_loc[1])
    first_own = own // block_size
    for row in range(1, num_rows):
        used = table[row, first_own : -(-seq_len // block_size)]
        used.copy_(used.roll(row) if row % 2 else used)
    query = torch.randn(num_rows * num_new, *case.query.shape[1:]).to(case.query.dtype)
    batch = Case(
        query,
        case.key_pages,
        case.value_pages,
        table,
        case.seq_lens[:1].repeat(num_rows),
        torch.arange(num_rows + 1, dtype=torch.int32) * num_new,
        case.options,
    )
    torch.set_num_threads(1)
    expected = attend(batch)
    torch.set_num_threads(num_threads)
    # A tree: all rows share the first part, some a part behind it, and one hint is wrong.
    num_blocks = table.shape[1] - 1
    middle = num_blocks // 2
    groups = [[0, num_rows, 0, middle], [num_rows, num_rows + 2, middle, num_blocks]]
    rows = [*range(num_rows), 0, num_rows - 1]
    grouped = batch.given(
        prefix_groups=torch.tensor(groups, dtype=torch.int32),
        prefix_rows=torch.tensor(rows, dtype=torch.int32),
    )
    for got, want in zip(attend(grouped), expected, strict=True):
        assert same_bits(got, want)


@settings(max_examples=max(10, settings.default.max_examples // 5))
@given(cases(), st.data())
def test_where_pages_lie_changes_no_bit(case: Case, data: st.DataObject) -> None:
    order = torch.tensor(data.draw(st.permutations(range(len(case.key_pages)))))
    new_place = torch.empty_like(order)
    new_place[order] = torch.arange(len(order))
    options = dict(case.options)
    for name in ("key_scales", "value_scales"):
        if name in options:
            options[name] = options[name][order]
    key_pages, value_pages = (
        (pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages)[order].view(pages.dtype)
        for pages in (case.key_pages, case.value_pages)
    )
    table = torch.where(case.block_table < 0, -1, new_place[case.block_table.clamp(min=0).long()])
    moved = Case(
        case.query,
        key_pages,
        value_pages,
        table.to(torch.int32),
        case.seq_lens,
        case.query_start_loc,
        options,
    )
    for got, want in zip(attend(moved), attend(case), strict=True):
        assert same_bits(got, want)
