"""A hit never changes an answer: what a query gets is a function of its keys alone, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from backends import on_every_backend
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import KVCacheSpec, KVPages, SharedPrefixes
from pagedkv.ops import paged_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 32


class Prompt(NamedTuple):
    """One sequence, and what is asked of it."""

    query: torch.Tensor  # [num_tokens, NUM_HEADS, HEAD_DIM]
    key: torch.Tensor  # [num_tokens, NUM_KV_HEADS, HEAD_DIM]
    value: torch.Tensor
    options: dict[str, Any]


def make_prompt(num_tokens: int, dtype: torch.dtype, seed: int, **options: Any) -> Prompt:
    generator = torch.Generator().manual_seed(seed)

    def draw(num_heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, num_heads, HEAD_DIM, generator=generator).to(dtype)

    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.rand(NUM_HEADS, generator=generator) / 64
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(NUM_HEADS, generator=generator)
    return Prompt(draw(NUM_HEADS), draw(NUM_KV_HEADS), draw(NUM_KV_HEADS), options)


class Placed(NamedTuple):
    """Prompts in pages, `tables` being rows of one block table."""

    pages: KVPages
    tables: torch.Tensor


def place(prompts: list[Prompt], seed: int, *, block_size: int = 16) -> Placed:
    """Write prompts into scattered pages."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-len(prompt.key) // block_size) for prompt in prompts]
    ids = torch.randperm(sum(blocks) + 2, generator=generator).tolist()
    dtype = str(prompts[0].key.dtype).removeprefix("torch.")
    pages = KVPages(KVCacheSpec.uniform(1, NUM_KV_HEADS, HEAD_DIM, dtype, block_size), len(ids))
    pages.blocks.fill_(float("nan"))
    tables = torch.full((len(prompts), max(blocks)), -1, dtype=torch.int32)
    for i, prompt in enumerate(prompts):
        tables[i, : blocks[i]] = torch.tensor([ids.pop() for _ in range(blocks[i])])
        positions = torch.arange(len(prompt.key))
        places = tables[i, positions // block_size].long(), positions % block_size
        for kind, tokens in zip(pages[0], (prompt.key, prompt.value), strict=True):
            kind[places] = tokens
    return Placed(pages, tables)


Row = tuple[int, int, int]
"""A row of a batch: which prompt, and its queries [begin, end)."""


def attend(
    prompts: list[Prompt], placed: Placed, rows: list[Row], backend: Any, **more: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """out and lse of each row of a batch."""
    query = torch.cat([prompts[i].query[begin:end] for i, begin, end in rows])
    starts = [0]
    for _, begin, end in rows:
        starts.append(starts[-1] + end - begin)
    out = torch.full_like(query, float("nan"))
    lse = torch.full(query.shape[:2], float("nan"))
    paged_attention(
        query,
        *placed.pages[0],
        placed.tables[[i for i, _, _ in rows]],
        torch.tensor([end for _, _, end in rows], dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        out=out,
        lse=lse,
        backend=backend,
        **prompts[0].options | more,
    )
    return [(out[a:b], lse[a:b]) for a, b in pairwise(starts)]


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


@st.composite
def asked(draw: st.DrawFn) -> Prompt:
    return make_prompt(
        draw(st.sampled_from([5, 64, 130, 513, 600])),
        draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        draw(st.integers(0, 2**16)),
        window=draw(st.sampled_from([None, None, 20, 300])),
        soft_cap=draw(st.sampled_from([None, 3.0])),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
    )


def chunked(num_tokens: int, sizes: list[int]) -> Iterator[tuple[int, int]]:
    begin = 0
    while begin < num_tokens:
        size = sizes[begin % len(sizes)]
        yield begin, min(begin + size, num_tokens)
        begin += size


@on_every_backend
@settings(max_examples=8)
@given(
    prompt=asked(),
    sizes=st.lists(st.sampled_from([1, 2, 7, 16, 40, 150]), min_size=3, max_size=3),
    seed=st.integers(0, 9),
)
def test_chunks_give_the_bits_of_one_prefill(
    prompt: Prompt, sizes: list[int], seed: int, backend: str
) -> None:
    num_tokens = len(prompt.query)
    [(want, want_lse)] = attend([prompt], place([prompt], 1), [(0, 0, num_tokens)], backend)
    placed = place([prompt], 10 + seed)  # other pages: found and not computed
    for begin, end in chunked(num_tokens, sizes):
        [(out, lse)] = attend([prompt], placed, [(0, begin, end)], backend)
        assert same(out, want[begin:end]), (begin, end)
        assert same(lse, want_lse[begin:end]), (begin, end)


@on_every_backend
def test_decoding_token_by_token_gives_the_bits_of_one_prefill(backend: str) -> None:
    prompt = make_prompt(530, torch.float32, 5)
    placed = place([prompt], 2)
    [(want, _)] = attend([prompt], placed, [(0, 0, 530)], backend)
    for position in [*range(0, 40, 3), *range(490, 530)]:
        [(out, _)] = attend([prompt], placed, [(0, position, position + 1)], backend)
        assert same(out, want[position : position + 1]), position


@on_every_backend
@settings(max_examples=8)
@given(seed=st.integers(0, 2**16), dtype=st.sampled_from([torch.float32, torch.bfloat16]), data=st.data())
def test_the_batch_around_a_query_changes_no_bit(
    seed: int, dtype: torch.dtype, data: st.DataObject, backend: str
) -> None:
    lengths = data.draw(st.lists(st.sampled_from([1, 17, 130, 512, 700]), min_size=2, max_size=5))
    prompts = [make_prompt(length, dtype, seed + i) for i, length in enumerate(lengths)]
    placed = place(prompts, seed)
    begins = [data.draw(st.integers(max(0, length - 40), length - 1)) for length in lengths]
    rows = [(i, begin, length) for i, (begin, length) in enumerate(zip(begins, lengths, strict=True))]
    together = attend(prompts, placed, rows, backend)
    for row, (out, lse) in zip(rows, together, strict=True):
        [(alone, alone_lse)] = attend(prompts, placed, [row], backend)
        assert same(alone, out)
        assert same(alone_lse, lse)


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, backend: str) -> None:
    prompts = [make_prompt(2100, dtype, 3), make_prompt(40, dtype, 4)]
    placed = place(prompts, 3)
    rows = [(0, 2099, 2100), (1, 0, 40), (0, 2060, 2090)]
    num_threads = torch.get_num_threads()
    answers = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            answers.append(attend(prompts, placed, rows, backend))
    finally:
        torch.set_num_threads(num_threads)
    for answer in answers[1:]:
        for (out, lse), (want, want_lse) in zip(answer, answers[0], strict=True):
            assert same(out, want)
            assert same(lse, want_lse)


@on_every_backend
@pytest.mark.parametrize("block_size", [8, 32, 128])
def test_the_size_of_a_block_changes_no_bit(block_size: int, backend: str) -> None:
    prompt = make_prompt(600, torch.float32, 8)
    rows = [(0, 560, 600), (0, 599, 600)]
    want = attend([prompt], place([prompt], 1), rows, backend)
    got = attend([prompt], place([prompt], 2, block_size=block_size), rows, backend)
    for (out, _), (wanted, _) in zip(got, want, strict=True):
        assert same(out, wanted)


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 900])
def test_pages_that_are_read_once_for_many_give_the_same_bits(
    dtype: torch.dtype, window: int | None, backend: str
) -> None:
    # Two levels: all five share 1,040 tokens, three of them 1,600.
    first = make_prompt(1700, dtype, 1, window=window)
    prompts = [first]
    for i, num_shared in enumerate((1600, 1600, 1040, 1040), 2):
        own = make_prompt(num_shared + 40 * i, dtype, i)
        key, value = own.key.clone(), own.value.clone()
        key[:num_shared], value[:num_shared] = first.key[:num_shared], first.value[:num_shared]
        prompts.append(own._replace(key=key, value=value))
    # Rows 0, 1, 2 hold the same pages up to 1,600, all rows up to 1,040.
    alone = place(prompts, 1)
    for i, num_shared in enumerate((1600, 1600, 1040, 1040), 1):
        alone.tables[i, : num_shared // 16] = alone.tables[0, : num_shared // 16]
    rows = [(i, len(prompt.query) - 1 - i, len(prompt.query)) for i, prompt in enumerate(prompts)]
    want = attend(prompts, alone, rows, backend)
    groups = torch.tensor([[0, 5, 0, 65], [5, 8, 65, 100]], dtype=torch.int32)
    shared = SharedPrefixes(groups, torch.tensor([0, 1, 2, 3, 4, 0, 1, 2], dtype=torch.int32))
    got = attend(prompts, alone, rows, backend, shared_prefixes=shared)
    for (out, lse), (wanted, wanted_lse) in zip(got, want, strict=True):
        assert same(out, wanted)
        assert same(lse, wanted_lse)
