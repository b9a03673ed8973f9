"""PagedKVCache end to end on a toy model: every step's logits are held to an oracle that has no cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pool_driving import observe
from toy_model import HEAD_DIM, MAX_TOKENS, NUM_HEADS, NUM_KV_HEADS, SPEC, VOCABULARY, ToyModel

import pagedkv
from pagedkv import (
    AttentionMetadata,
    BackendUnavailableError,
    BlockPool,
    OutOfBlocksError,
    PagedKVCache,
    ShapeError,
    StateError,
    StepTables,
    UsageError,
)

MODEL = ToyModel()
PROMPT = np.random.default_rng(1).integers(0, VOCABULARY, 100).tolist()
OTHER = [(token + 1) % VOCABULARY for token in PROMPT]  # differs everywhere


def make_cache(num_blocks: int = 24, **options: Any) -> PagedKVCache:
    """A cache whose memory is garbage."""
    cache = PagedKVCache(SPEC, num_blocks, **options)
    cache.pages.blocks.fill_(float("nan"))
    return cache


@pytest.fixture
def cache() -> Iterator[PagedKVCache]:
    cache = make_cache()
    yield cache
    cache.check_integrity()


def remember(cache: PagedKVCache, token_ids: list[int], **extras: Any) -> None:
    with cache.open(token_ids, **extras) as seq:
        MODEL.step(cache, seq)


def generate(cache: PagedKVCache, seq: pagedkv.Sequence, num_tokens: int) -> list[int]:
    """Greedy tokens; `step` holds each step's logits to the oracle."""
    tokens = []
    for _ in range(num_tokens):
        tokens.append(int(MODEL.step(cache, seq)[0].argmax()))
        cache.append(seq, tokens[-1])
    return tokens


# --------------------------------------------------------------------------------- warm equals cold


@pytest.mark.parametrize("arrangement", ["block", "layer"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_every_storage_gives_the_same_answers(arrangement: Any, layout: Any) -> None:
    spec = pagedkv.KVCacheSpec.uniform(SPEC.num_layers, NUM_KV_HEADS, HEAD_DIM, layout=layout)
    cache = PagedKVCache(spec, 12, arrangement=arrangement)
    cache.pages.blocks.fill_(float("inf"))
    remember(cache, PROMPT[:48])
    with cache.open(PROMPT[:37] + OTHER[37:50]) as seq:
        assert seq.num_cached_tokens == 37
        assert generate(cache, seq, 3) == MODEL.greedy(PROMPT[:37] + OTHER[37:50], 3)


@pytest.mark.parametrize("num_shared", [1, 15, 16, 17, 31, 32, 33, 47])
def test_a_hit_that_ends_anywhere_gives_the_cold_answer(cache: PagedKVCache, num_shared: int) -> None:
    remember(cache, PROMPT[:64])
    prompt = PROMPT[:num_shared] + OTHER[num_shared:50]
    with cache.open(prompt) as seq:
        assert seq.num_cached_tokens == num_shared
        assert generate(cache, seq, 4) == MODEL.greedy(prompt, 4)
    # What the copy was taken from is as before.
    with cache.open(PROMPT[:64]) as seq:
        assert generate(cache, seq, 2) == MODEL.greedy(PROMPT[:64], 2)


def test_a_full_hit_shares_every_page_and_writes_nothing(cache: PagedKVCache) -> None:
    remember(cache, PROMPT[:48])
    before = cache.pages.blocks.clone()
    first, second = cache.open(PROMPT[:48]), cache.open(PROMPT[:48])
    assert first.num_cached_tokens == 47
    assert first.block_ids.tolist() == second.block_ids.tolist()
    step = cache.reserve([first, second], [1, 1])
    meta = cache.prepare(step)
    assert (meta.slot_mapping.tolist(), meta.seq_lens.tolist()) == ([-1, -1], [48, 48])
    MODEL.check(MODEL.forward(cache, meta), meta, [first, second])
    cache.commit(step)
    assert torch.equal(cache.pages.blocks.view(torch.int32), before.view(torch.int32))
    assert cache.stats().num_writable_blocks == 0
    # Both go on, each in pages of its own.
    for seq, token in ((first, 3), (second, 5)):
        cache.append(seq, token)
    MODEL.step(cache, [first, second])
    assert first.block_ids[:3].tolist() == second.block_ids[:3].tolist()
    assert first.block_ids[3] != second.block_ids[3]


def test_sequences_in_one_step_get_their_own_answers(cache: PagedKVCache) -> None:
    remember(cache, PROMPT[:40])
    prompts = [[*PROMPT[:40], 1, 2], PROMPT[:20] + OTHER[20:33], OTHER[:50], PROMPT[:32], [7]]
    seqs = [cache.open(prompt) for prompt in prompts]
    # Two whole blocks were published; a hit may end in one, and a full one leaves its last token.
    assert [seq.num_cached_tokens for seq in seqs] == [32, 20, 0, 31, 0]
    MODEL.step(cache, seqs)
    for _ in range(3):
        cache.append(seqs, [11] * 5)
        MODEL.step(cache, list(reversed(seqs)))
    for seq in seqs:
        seq.close()


@pytest.mark.parametrize("chunk", [1, 5, 16, 23])
def test_a_prompt_in_chunks_gives_the_answer_of_one_prefill(cache: PagedKVCache, chunk: int) -> None:
    remember(cache, PROMPT[:20])
    with cache.open(PROMPT[:60]) as seq:
        while seq.num_uncached_tokens:
            MODEL.step(cache, seq, [min(chunk, seq.num_uncached_tokens)])
        cache.append(seq, 3)
        MODEL.step(cache, seq)
        assert cache.match(PROMPT[:60]).num_block_tokens == 48


@pytest.mark.parametrize("num_kept", [0, 1, 15, 16, 17, 31, 32, 40, 48])
def test_truncate_and_append_gives_the_answer_of_the_new_tokens(cache: PagedKVCache, num_kept: int) -> None:
    remember(cache, PROMPT[:48])
    with cache.open(PROMPT[:48]) as seq, cache.open(PROMPT[:48]) as other:
        MODEL.step(cache, [seq, other])
        cache.truncate(seq, num_kept)
        cache.append(seq, OTHER[num_kept:55])
        assert generate(cache, seq, 2) == MODEL.greedy(PROMPT[:num_kept] + OTHER[num_kept:55], 2)
        # The page that the cut went through is somebody else's too.
        cache.append(other, 3)
        MODEL.step(cache, other)
    with cache.open(PROMPT[:48]) as seq:
        assert seq.num_cached_tokens == 47
        assert generate(cache, seq, 2) == MODEL.greedy(PROMPT[:48], 2)


def test_truncate_to_nothing_new_needs_one_token_to_compute(cache: PagedKVCache) -> None:
    with cache.open(PROMPT[:20]) as seq:
        MODEL.step(cache, seq)
        cache.truncate(seq, 18)
        assert seq.num_uncached_tokens == 0
        with pytest.raises(UsageError, match="num_new_tokens"):
            cache.reserve(seq, 1)


@pytest.mark.parametrize("num_tokens", [20, 32, 45])
def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened(
    cache: PagedKVCache, num_tokens: int
) -> None:
    seq = cache.open(PROMPT[:num_tokens])
    tokens = generate(cache, seq, 2)
    cache.preempt(seq)
    assert seq.block_ids.tolist() == []
    stats = cache.stats()
    assert stats.num_free_blocks + stats.num_evictable_blocks == 24
    remember(cache, OTHER[:60])  # others use the pages meanwhile
    step = cache.reserve(seq, seq.num_uncached_tokens)
    meta = cache.prepare(step)
    assert seq.num_cached_tokens == num_tokens // 16 * 16
    MODEL.check(MODEL.forward(cache, meta), meta, [seq])
    cache.commit(step)
    assert cache.stats().num_prompts == 2
    cache.append(seq, 3)
    MODEL.step(cache, seq)
    assert seq.token_ids.tolist() == PROMPT[:num_tokens] + tokens + [3]
    seq.close()


def test_a_preempted_sequence_whose_pages_were_taken_computes_again() -> None:
    cache = make_cache(4)
    seq = cache.open(PROMPT[:33])
    tokens = generate(cache, seq, 3)
    cache.preempt(seq)
    remember(cache, OTHER[:64])  # all four pages
    assert cache.match(PROMPT[:33]).num_tokens == 0
    assert generate(cache, seq, 3) == MODEL.greedy(PROMPT[:33] + tokens, 3)
    cache.check_integrity()


@pytest.mark.parametrize("written", [False, True])
def test_an_abandoned_step_can_be_tried_again(cache: PagedKVCache, written: bool) -> None:
    remember(cache, PROMPT[:48])
    with cache.open(PROMPT[:37] + OTHER[37:60]) as seq:
        assert seq.num_cached_tokens == 37
        before = observe(cache.pool, seq)
        step = cache.reserve(seq, 23)
        meta = cache.prepare(step)
        if written:  # rubbish, as from a kernel that failed half way
            rubbish = torch.full((23, NUM_KV_HEADS, HEAD_DIM), float("nan"))
            cache.write(0, rubbish, rubbish, meta)
        cache.abandon(step)
        assert observe(cache.pool, seq) == before
        assert generate(cache, seq, 3) == MODEL.greedy(PROMPT[:37] + OTHER[37:60], 3)


def test_rejected_tokens_leave_no_trace(cache: PagedKVCache) -> None:
    with cache.open(PROMPT[:30]) as seq:
        MODEL.step(cache, seq)
        cache.append(seq, OTHER[:6])  # a draft, of which two tokens hold
        step = cache.reserve(seq, 6)
        MODEL.forward(cache, cache.prepare(step))
        cache.commit(step, 2)
        assert seq.token_ids.tolist() == PROMPT[:30] + OTHER[:2]
        assert seq.num_computed_tokens == 32
        assert generate_after(cache, seq, 9) == MODEL.greedy(PROMPT[:30] + OTHER[:2] + [9], 3)
        assert cache.match(PROMPT[:30] + OTHER[:6]).num_tokens == 32


def generate_after(cache: PagedKVCache, seq: pagedkv.Sequence, token: int) -> list[int]:
    cache.append(seq, token)
    return generate(cache, seq, 3)


# -------------------------------------------------------------------------------------------- tenants


def test_two_salts_share_nothing(cache: PagedKVCache) -> None:
    remember(cache, PROMPT[:48], cache_salt="a")
    assert cache.match(PROMPT[:48], cache_salt="a").num_tokens == 48
    for salt in ("b", b"ab", None):
        assert cache.match(PROMPT[:48], cache_salt=salt).num_tokens == 0
        with cache.open(PROMPT[:48], cache_salt=salt) as seq, cache.open(PROMPT[:48], cache_salt="a") as mine:
            assert (seq.num_cached_tokens, mine.num_cached_tokens) == (0, 47)
            MODEL.step(cache, [seq, mine])
            assert not set(seq.block_ids) & set(mine.block_ids)
    assert cache.match(PROMPT[:48], cache_salt=b"a").num_tokens == 48


def test_a_cache_without_prefix_caching_finds_nothing() -> None:
    cache = make_cache(prefix_caching=False)
    remember(cache, PROMPT[:48])
    with cache.open(PROMPT[:48]) as seq:
        assert seq.num_cached_tokens == 0
        assert generate(cache, seq, 2) == MODEL.greedy(PROMPT[:48], 2)
    assert cache.stats().num_free_blocks == 24


def test_without_token_granularity_only_whole_blocks_are_found() -> None:
    cache = make_cache(token_granular=False)
    remember(cache, PROMPT[:48])
    with cache.open(PROMPT[:40] + OTHER[40:50]) as seq:
        assert seq.num_cached_tokens == 32
        MODEL.step(cache, seq)


def test_reset_forgets_everything_once_nothing_is_open(cache: PagedKVCache) -> None:
    with cache.open(PROMPT[:20]) as seq:
        MODEL.step(cache, seq)
        assert not cache.reset()
        assert cache.match(PROMPT[:20]).num_block_tokens == 16
    assert cache.reset()
    assert cache.match(PROMPT[:20]).num_tokens == 0
    assert cache.stats().num_free_blocks == 24


# ---------------------------------------------------------------------------------------------- steps


def test_copies_have_run_before_anything_is_read(cache: PagedKVCache) -> None:
    remember(cache, PROMPT[:48])
    with cache.open([*PROMPT[:41], 5]) as seq:
        source = int(seq.block_ids[2])
        step = cache.reserve(seq, 1)
        [(from_block, to_block, num_tokens)] = step.copies
        assert (from_block, num_tokens) == (source, 9)
        assert bool(cache.pages.blocks[to_block].isnan().all())
        meta = cache.prepare(step)
        assert torch.equal(cache.pages.blocks[to_block, :, :, :9], cache.pages.blocks[source, :, :, :9])
        assert meta.block_table[0].tolist()[2] == to_block
        MODEL.check(MODEL.forward(cache, meta), meta, [seq])
        cache.commit(step)


def test_preparing_again_does_not_undo_what_was_written(cache: PagedKVCache) -> None:
    remember(cache, PROMPT[:48])
    with cache.open([*PROMPT[:41], 5, 6]) as seq:
        step = cache.reserve(seq, 2)
        MODEL.forward(cache, cache.prepare(step))
        meta = cache.prepare(step)
        query = torch.ones(2, NUM_HEADS, HEAD_DIM)
        want = cache.attend(0, query, meta)
        assert torch.equal(cache.attend(0, query, cache.prepare(step)), want)
        cache.commit(step)
        cache.append(seq, 7)
        MODEL.step(cache, seq)


def test_a_source_is_kept_until_its_copy_has_run() -> None:
    cache = make_cache(6)
    remember(cache, PROMPT[:16])
    borrower = cache.open([*PROMPT[:9], 5])
    step = cache.reserve(borrower, 1)
    # Everything else that can be had is taken and written before the copy runs.
    for block_id in cache.pool.allocate(4):
        cache.pages.blocks[int(block_id)] = float("nan")
    with pytest.raises(OutOfBlocksError):
        cache.pool.allocate(1)
    meta = cache.prepare(step)
    MODEL.check(MODEL.forward(cache, meta), meta, [borrower])
    cache.commit(step)
    cache.check_integrity()


def test_metadata_stays_valid_until_its_step_ends(cache: PagedKVCache) -> None:
    slow, fast = cache.open(PROMPT[:40]), cache.open(OTHER[:20])
    step = cache.reserve(slow, 40)
    meta = cache.prepare(step)
    before = {name: value.clone() for name, value in vars(meta).items() if isinstance(value, torch.Tensor)}
    assert len(before) == 6
    for _ in range(4):  # steps of others come and go meanwhile
        MODEL.step(cache, fast)
        cache.append(fast, 1)
    for name, value in before.items():
        assert torch.equal(getattr(meta, name), value), name
    MODEL.check(MODEL.forward(cache, meta), meta, [slow])
    cache.commit(step)


def test_metadata_says_what_the_step_computes(cache: PagedKVCache) -> None:
    remember(cache, PROMPT[:32])
    seqs = [cache.open(PROMPT[:20]), cache.open(PROMPT[:32]), cache.open([4, 5, 6])]
    MODEL.step(cache, seqs[2])
    cache.append(seqs[2], [8, 9])
    step = cache.reserve(seqs, [1, 1, 2])
    meta = cache.prepare(step)
    assert (meta.num_seqs, meta.num_tokens, meta.max_query_len, meta.max_seq_len) == (3, 4, 2, 32)
    assert meta.block_size == 16
    assert meta.positions.tolist() == [19, 31, 3, 4]
    assert meta.token_ids.tolist() == [PROMPT[19], PROMPT[31], 8, 9]
    assert meta.seq_lens.tolist() == [20, 32, 5]
    assert meta.query_start_loc.tolist() == [0, 1, 2, 4]
    assert meta.last_token_index.tolist() == [0, 1, 3]
    assert meta.last_token_index.dtype == torch.int64
    tables = [seq.block_ids.tolist() for seq in seqs]
    assert meta.block_table.tolist() == [tables[0], tables[1], [*tables[2], -1]]
    page = tables[2][0] * 16
    assert meta.slot_mapping.tolist() == [-1 if i == 1 else s for i, s in enumerate(slots(meta, tables))]
    assert meta.slot_mapping.tolist()[2:] == [page + 3, page + 4]
    cache.abandon(step)


def slots(meta: AttentionMetadata, tables: list[list[int]]) -> list[int]:
    """Slot of each row, from its position and its sequence's table."""
    starts = meta.query_start_loc.tolist()
    rows = [i for i in range(meta.num_seqs) for _ in range(starts[i], starts[i + 1])]
    return [
        tables[i][position // 16] * 16 + position % 16
        for i, position in zip(rows, meta.positions.tolist(), strict=True)
    ]


def test_committing_a_step_that_was_never_prepared_is_refused(cache: PagedKVCache) -> None:
    seq = cache.open(PROMPT[:20])
    step = cache.reserve(seq, 20)
    before = observe(cache.pool, seq)
    with pytest.raises(StateError, match="commit: expected a prepared step, got one that is only reserved"):
        cache.commit(step)
    assert observe(cache.pool, seq) == before
    meta = cache.prepare(step)
    MODEL.check(MODEL.forward(cache, meta), meta, [seq])
    cache.commit(step)
    assert cache.match(PROMPT[:20]).num_block_tokens == 16


@pytest.mark.parametrize("end", ["commit", "abandon"])
def test_a_step_ends_once(cache: PagedKVCache, end: str) -> None:
    seq = cache.open(PROMPT[:20])
    step = cache.reserve(seq, 20)
    MODEL.forward(cache, cache.prepare(step))
    getattr(cache, end)(step)
    before = observe(cache.pool, seq)
    for verb in (cache.commit, cache.abandon, cache.prepare):
        with pytest.raises(StateError, match="expected an open step, got one that has ended"):
            verb(step)
    assert observe(cache.pool, seq) == before


# ------------------------------------------------------------------------------------------------ csr


def metadata(block_table: list[list[int]], seq_lens: list[int], block_size: int = 16) -> AttentionMetadata:
    starts = np.arange(len(seq_lens) + 1, dtype=np.int32)
    rows = np.zeros(len(seq_lens), np.int64)
    table = np.array(block_table, np.int32)
    lengths, no_groups = np.array(seq_lens, np.int32), np.zeros((0, 4), np.int32)
    tables = StepTables(table, rows, lengths, starts, rows, rows, [], no_groups, no_groups[0:0, 0])
    pool = BlockPool(1, block_size=block_size)
    return AttentionMetadata.from_tables(tables, pool.reserve(pool.open([0]), 1), torch.device("cpu"))


def test_csr_lists_the_pages_of_each_sequence() -> None:
    meta = metadata([[5, 3, 9], [1, -1, -1], [2, 5, -1], [7, -1, -1]], [33, 16, 31, 1])
    kv_indptr, kv_indices, kv_last_page_len = meta.csr()
    assert kv_indptr.tolist() == [0, 3, 4, 6, 7]
    assert kv_indices.tolist() == [5, 3, 9, 1, 2, 5, 7]
    assert kv_last_page_len.tolist() == [1, 16, 15, 1]


def test_a_last_page_is_full_at_a_multiple_of_the_block_size_and_empty_only_where_there_is_none() -> None:
    """A remainder of 0 was taken for an empty last page, so a whole block of KV went unread (nano-vllm)."""
    table = [[-1, -1], [0, -1], [1, -1], [2, 3], [4, 5]]
    kv_indptr, _, kv_last_page_len = metadata(table, [0, 1, 4, 5, 8], block_size=4).csr()
    assert kv_last_page_len.tolist() == [0, 1, 4, 1, 4]
    assert kv_last_page_len.dtype == torch.int32
    assert kv_indptr.tolist() == [0, 0, 1, 2, 4, 6]


@given(
    seq_lens=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 3, 16]),
    width=st.integers(0, 2),
)
def test_csr_is_the_block_table_without_its_padding(seq_lens: list[int], block_size: int, width: int) -> None:
    pages = iter(range(1000))
    tables = [[next(pages) for _ in range(-(-length // block_size))] for length in seq_lens]
    columns = max(map(len, tables)) + width
    # Also what lies behind the length but is no padding is left out.
    padded = [table + [next(pages) if width == 2 else -1] * (columns - len(table)) for table in tables]
    kv_indptr, kv_indices, kv_last_page_len = metadata(padded, seq_lens, block_size).csr()
    assert {kv_indptr.dtype, kv_indices.dtype, kv_last_page_len.dtype} == {torch.int32}
    assert kv_indices.tolist() == [page for table in tables for page in table]
    for i, (length, table) in enumerate(zip(seq_lens, tables, strict=True)):
        assert kv_indices[kv_indptr[i] : kv_indptr[i + 1]].tolist() == table
        assert (len(table) - 1) * block_size + int(kv_last_page_len[i]) == length
        assert 1 <= int(kv_last_page_len[i]) <= block_size


# ------------------------------------------------------------------------------------------ bad input


def wrong(tensor: torch.Tensor) -> list[Any]:
    return [
        None,
        "tensor",
        tensor.tolist(),
        tensor.numpy(),
        tensor[:-1],
        tensor[0],
        tensor[:, :1],
        tensor[..., :-1],
        tensor.bfloat16(),
        tensor.double(),
        tensor.to("meta"),
    ]


@pytest.mark.parametrize("kind", range(11))
@pytest.mark.parametrize("name", ["key", "value", "query", "out"])
def test_a_wrong_tensor_is_refused_and_the_cache_is_as_before(
    cache: PagedKVCache, name: str, kind: int
) -> None:
    seq = cache.open(PROMPT[:20])
    step = cache.reserve(seq, 20)
    meta = cache.prepare(step)
    tensors = {
        "key": torch.ones(20, NUM_KV_HEADS, HEAD_DIM),
        "value": torch.ones(20, NUM_KV_HEADS, HEAD_DIM),
        "query": torch.ones(20, NUM_HEADS, HEAD_DIM),
        "out": torch.full((20, NUM_HEADS, HEAD_DIM), 7.0),
    }
    if name == "out" and kind == 0:
        kind = 1  # None asks for a new tensor
    given: dict[str, Any] = {**tensors, name: wrong(tensors[name])[kind]}
    before = observe(cache.pool, seq)
    pages = cache.pages.blocks.clone()
    calls: dict[str, Callable[[], Any]] = {
        "write_kv": lambda: cache.write(0, given["key"], given["value"], meta),
        "paged_attention": lambda: cache.attend(0, given["query"], meta, out=given["out"]),
    }
    op = "write_kv" if name in ("key", "value") else "paged_attention"
    with pytest.raises(ShapeError, match=rf"expected .*, got .*, in {op}") as caught:
        calls[op]()
    # Fewer queries are blamed on whatever does not fit them.
    assert caught.value.name in ({name, "out"} if name == "query" else {name})
    assert observe(cache.pool, seq) == before
    assert torch.equal(cache.pages.blocks.view(torch.int32), pages.view(torch.int32))
    assert bool((tensors["out"] == 7).all())
    # ... and the step goes on.
    MODEL.check(MODEL.forward(cache, meta), meta, [seq])
    cache.commit(step)


@pytest.mark.parametrize("layer", [-1, 2, 2**70, True, 1.0, None, "0", [], torch.tensor(0)])
def test_an_unknown_layer_is_refused(cache: PagedKVCache, layer: Any) -> None:
    meta = cache.prepare(cache.reserve(cache.open([1]), 1))
    kv, query = torch.ones(1, NUM_KV_HEADS, HEAD_DIM), torch.ones(1, NUM_HEADS, HEAD_DIM)
    for call in (lambda: cache.write(layer, kv, kv, meta), lambda: cache.attend(layer, query, meta)):
        with pytest.raises(UsageError, match=r"layer: expected one of \[0, 1\], got "):
            call()
    assert bool(cache.pages.blocks.isnan().all())


@pytest.mark.parametrize("meta", [None, "meta", {}, torch.tensor([0])])
def test_metadata_that_is_none_is_refused(cache: PagedKVCache, meta: Any) -> None:
    kv, query = torch.ones(1, NUM_KV_HEADS, HEAD_DIM), torch.ones(1, NUM_HEADS, HEAD_DIM)
    with pytest.raises(UsageError, match="write: expected an AttentionMetadata, got "):
        cache.write(0, kv, kv, meta)
    with pytest.raises(UsageError, match="attend: expected an AttentionMetadata, got "):
        cache.attend(0, query, meta)
    with pytest.raises(UsageError, match=r"write: expected an AttentionMetadata, got .*StepTables"):
        cache.write(0, kv, kv, cache.pool.prepare(cache.reserve(cache.open([1]), 1)))  # type: ignore[arg-type]


def test_attend_returns_out_and_takes_a_scale(cache: PagedKVCache) -> None:
    seq = cache.open(PROMPT[:5])
    meta = cache.prepare(cache.reserve(seq, 5))
    values = torch.arange(5.0)[:, None, None].expand(5, NUM_KV_HEADS, HEAD_DIM)
    cache.write(1, torch.randn(5, NUM_KV_HEADS, HEAD_DIM), values, meta)
    query = torch.randn(5, NUM_HEADS, HEAD_DIM)
    out = torch.full_like(query, float("nan"))
    assert cache.attend(1, query, meta, scale=0.0, out=out) is out
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0]))  # plain means
    assert not torch.allclose(cache.attend(1, query, meta), out)


VERBS: dict[str, Callable[[PagedKVCache, Any], Any]] = {
    "append": lambda cache, seq: cache.append([seq], [1]),
    "reserve": lambda cache, seq: cache.reserve([seq], [1]),
    "truncate": lambda cache, seq: cache.truncate(seq, 0),
    "preempt": lambda cache, seq: cache.preempt(seq),
    "close": lambda cache, seq: cache.close(seq),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_closed_sequence_is_refused_and_the_cache_is_as_before(cache: PagedKVCache, verb: str) -> None:
    seq, other = cache.open(PROMPT[:40]), cache.open(OTHER[:20])
    MODEL.step(cache, [seq, other])
    cache.append(seq, 1)
    cache.close(seq)
    before = observe(cache.pool, seq, other)
    with pytest.raises(StateError, match=f"{verb}: expected an open sequence, got a closed one"):
        VERBS[verb](cache, seq)
    assert observe(cache.pool, seq, other) == before


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_no_sequence_of_this_cache_is_refused(cache: PagedKVCache, verb: str) -> None:
    stranger = make_cache(4).open(PROMPT[:4])
    before = observe(cache.pool)
    none_at_all = [] if verb == "close" else [[]]  # it takes several, and so none
    for seq in (None, "seq", 5, cache, stranger, *none_at_all):
        with pytest.raises(UsageError, match=f"{verb}: expected a [Ss]equence.*, got "):
            VERBS[verb](cache, seq)
    assert observe(cache.pool) == before
    assert stranger.num_tokens == 4


@pytest.mark.parametrize("verb", ["prepare", "commit", "abandon"])
def test_what_is_no_step_of_this_cache_is_refused(cache: PagedKVCache, verb: str) -> None:
    strange_cache = make_cache(4)
    stranger = strange_cache.reserve(strange_cache.open(PROMPT[:4]), 4)
    strange_cache.prepare(stranger)
    for step in (None, "step", [], cache.open([1]), stranger):
        with pytest.raises(UsageError, match=f"{verb}: expected a .*, got "):
            getattr(cache, verb)(step)
    assert stranger.state == "prepared"


@pytest.mark.parametrize(
    "token_ids", [[], None, "text", 5, [-1], [2**32], [1.0], [True], [[1]], np.zeros((2, 2), int)]
)
def test_a_prompt_that_is_none_is_refused(cache: PagedKVCache, token_ids: Any) -> None:
    before = observe(cache.pool)
    with pytest.raises(UsageError, match="expected"):
        cache.open(token_ids)
    assert observe(cache.pool) == before


@pytest.mark.parametrize("salt", ["", b"", "s" * 129, 5, [], "\ud800"])
def test_a_salt_that_is_none_is_refused(cache: PagedKVCache, salt: Any) -> None:
    before = observe(cache.pool)
    for verb in (cache.open, cache.match):
        with pytest.raises(UsageError, match="cache_salt: expected"):
            verb(PROMPT, cache_salt=salt)
    assert observe(cache.pool) == before


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31, True, 4.0, "4", None])
def test_a_cache_of_no_blocks_is_refused(num_blocks: Any) -> None:
    with pytest.raises(UsageError, match=r"num_blocks: expected an integer.*, got "):
        PagedKVCache(SPEC, num_blocks)


@pytest.mark.parametrize("spec", [None, "spec", SPEC.groups[0], pagedkv.KVCacheSpec])
def test_a_cache_without_a_spec_is_refused(spec: Any) -> None:
    with pytest.raises(UsageError, match="spec: expected a KVCacheSpec, got "):
        PagedKVCache(spec, 4)


@pytest.mark.parametrize("options", [{"device": "nowhere"}, {"arrangement": "page"}, {"namespace": "text"}])
def test_a_cache_with_a_wrong_option_is_refused_by_its_name(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(UsageError, match=f"{name}: expected .*, got "):
        PagedKVCache(SPEC, 4, **options)


def test_a_missing_backend_is_known_when_the_cache_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailableError, match=r"backend: expected one .*, got 'cuda'"):
        PagedKVCache(SPEC, 4, backend="cuda")
    monkeypatch.setenv("PAGEDKV_BACKEND", "cuda")
    with pytest.raises(BackendUnavailableError):
        PagedKVCache(SPEC, 4)
    assert PagedKVCache(SPEC, 4, backend="reference").backend == "reference"


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    cache = make_cache(2)
    seq = cache.open(PROMPT[:33])
    before = observe(cache.pool, seq)
    with pytest.raises(OutOfBlocksError) as caught:
        cache.reserve(seq, 33)
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (3, 2, 0)
    assert observe(cache.pool, seq) == before
    MODEL.step(cache, seq, [32])  # what fits, goes


def test_metadata_is_compared_by_identity(cache: PagedKVCache) -> None:
    step = cache.reserve(cache.open(PROMPT[:20]), 20)
    first, second = cache.prepare(step), cache.prepare(step)
    assert first == first
    assert first != second


# -------------------------------------------------------------------------------------------- anything


class CacheMachine(RuleBasedStateMachine):
    """Requests come, go, shrink and are preempted in a pool too small for them; every logit is checked."""

    NUM_BLOCKS = 7

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(self.NUM_BLOCKS)
        self.seqs: list[pagedkv.Sequence] = []

    @precondition(lambda self: len(self.seqs) < 4)
    @rule(
        starts=st.lists(st.sampled_from([(PROMPT, 16), (OTHER, 16), (PROMPT, 5), (OTHER, 11)]), max_size=3),
        tail=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        salt=st.sampled_from([None, None, "a"]),
    )
    def open(self, starts: list[tuple[list[int], int]], tail: list[int], salt: str | None) -> None:
        tokens = [token for source, length in starts for token in source[:length]]
        self.seqs.append(self.cache.open(tokens + tail, cache_salt=salt))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        ready = [seq for seq in self.seqs if seq.num_uncached_tokens]
        if not ready:
            return
        seqs = data.draw(st.lists(st.sampled_from(ready), min_size=1, unique_by=id))
        counts = [data.draw(st.integers(1, seq.num_uncached_tokens)) for seq in seqs]
        try:
            step = self.cache.reserve(seqs, counts)
        except OutOfBlocksError:
            return
        meta = self.cache.prepare(step)
        end = data.draw(st.sampled_from(["commit", "commit", "accept", "abandon unwritten", "abandon"]))
        if end == "abandon unwritten":
            return self.cache.abandon(step)
        MODEL.check(MODEL.forward(self.cache, meta), meta, seqs)
        if end == "abandon":
            return self.cache.abandon(step)
        accepted = None
        if end == "accept":
            accepted = [data.draw(st.integers(0, n)) for n in step.num_new_tokens]
        self.cache.commit(step, accepted)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), verb=st.sampled_from(["append", "append", "truncate", "preempt", "close"]))
    def change(self, data: st.DataObject, verb: str) -> None:
        seq = data.draw(st.sampled_from(self.seqs))
        if verb == "append":
            if seq.num_tokens < MAX_TOKENS // 2:
                self.cache.append(seq, data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=9)))
        elif verb == "truncate":
            self.cache.truncate(seq, data.draw(st.integers(0, seq.num_tokens)))
        elif verb == "preempt":
            self.cache.preempt(seq)
        else:
            self.seqs.remove(seq)
            self.cache.close(seq)

    @rule(num_blocks=st.integers(1, 3))
    def spoil(self, num_blocks: int) -> None:
        """Somebody else uses pages for a while, and leaves garbage in them."""
        try:
            block_ids = self.cache.pool.allocate(num_blocks)
        except OutOfBlocksError:
            return
        self.cache.pages.blocks[torch.from_numpy(block_ids).long()] = float("nan")
        self.cache.pool.free(block_ids)

    @invariant()
    def holds_together(self) -> None:
        self.cache.check_integrity()

    def teardown(self) -> None:
        for seq in self.seqs:
            self.cache.close(seq)
        assert self.cache.reset()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30)
