"""What `SideBySide` compares: all that can be seen of the pool, and what its meaning says of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from event_replay import Stored
from pool_driving import digests

from pagedkv import StepTables

if TYPE_CHECKING:
    from side_by_side import Pair, SideBySide, StepPair


def check_pages(pools: SideBySide) -> None:
    """Who holds how many pages, what each published page is and holds, and that the tree is whole."""
    model, stats = pools.model, pools.pool.stats()
    num_evictable = len(model.evictable)
    assert stats.num_free_blocks == model.num_free_blocks
    assert stats.num_writable_blocks == len(model.writable)
    assert stats.num_committed_blocks == len(model.published) - num_evictable
    assert stats.num_evictable_blocks == num_evictable
    assert stats.num_evicted_blocks == len(model.evicted)
    identities = {page.identity for page in model.published}
    assert stats.num_nodes == len(identities)
    for identity in identities:
        parent = identity[: -model.block_size]
        assert len(parent) == 1 or parent in identities, "a block outlived its parent"
    names: list[bytes | None] = [None] * model.num_blocks
    for page in model.published:
        first = pools.id_of[page] * model.block_size
        assert [pools.kv.slots.get(first + i) for i in range(model.block_size)] == pools.kv_of[page]
        names[pools.id_of[page]] = pools.digest(page.identity)
    assert digests(pools.pool) == names


def check_counters(pools: SideBySide) -> None:
    """What was admitted, and how much of it was found."""
    stats = pools.pool.stats()
    assert (stats.num_prompts, stats.num_prompt_tokens) == (pools.num_prompts, pools.num_prompt_tokens)
    assert 0 <= stats.num_cached_tokens <= pools.num_cached_tokens
    assert pools.has_given_up_a_run or stats.num_cached_tokens == pools.num_cached_tokens


def check_sequence(pools: SideBySide, pair: Pair) -> None:
    real, seq = pair.real, pair.model
    assert real.is_closed == seq.is_closed
    if not seq.is_closed:
        assert real.is_preempted == seq.is_preempted
        assert real.token_ids.tolist() == seq.tokens
        assert real.num_tokens == len(seq.tokens)
        assert real.num_cached_tokens == seq.num_cached_tokens
        assert real.num_computed_tokens == seq.num_computed_tokens
        assert real.num_cached_tokens <= real.num_computed_tokens <= real.num_tokens
        assert real.num_uncached_tokens == pair.num_uncached_tokens
        assert real.num_committed_tokens == seq.num_committed_tokens
        assert real.num_reserved_tokens == len(seq.pages) * seq.block_size
        num_nameable = min(len(seq.tokens), seq.num_nameable_tokens)
        ends = range(seq.block_size, num_nameable + 1, seq.block_size)
        assert real.block_hashes == [pools.digest(seq.identity(end)) for end in ends]


def check_tables(pools: SideBySide, step: StepPair, tables: StepTables) -> None:
    size, row = pools.model.block_size, 0
    written: list[int] = []
    assert tables.block_table.shape[0] == len(tables.seq_lens) == len(step.pairs)
    for i, (pair, n) in enumerate(zip(step.pairs, step.model.num_new_tokens, strict=True)):
        start, seq = pair.model.num_computed_tokens, pair.model
        pages = [pools.id_of[page] for page in seq.pages]
        table = tables.block_table[i].tolist()
        assert table == pages + [-1] * (len(table) - len(pages))
        assert len(set(pages)) == len(pages)
        assert tables.query_start_loc[i] == row
        assert tables.seq_lens[i] == start + n
        positions = list(range(start, start + n))
        assert tables.positions[row : row + n].tolist() == positions
        assert tables.token_ids[row : row + n].tolist() == seq.tokens[start : start + n]
        slots = [pages[p // size] * size + p % size if p >= seq.num_written_tokens else -1 for p in positions]
        assert tables.slot_mapping[row : row + n].tolist() == slots
        written += [slot for slot in slots if slot >= 0]
        row += n
    assert tables.query_start_loc.tolist()[-1] == row == len(tables.slot_mapping)
    assert len(set(written)) == len(written), "two tokens are written to one slot"
    read = Counter(id_ for pair in pools.pairs for id_ in pair.real.block_ids.tolist())
    for block_id in {slot // size for slot in written}:
        assert pools.pool.digest_of(block_id) is None, "a published page is written"
        assert read[block_id] <= 1, "a page is written that another sequence reads"
    assert [tuple(map(int, copy)) for copy in tables.copies] == step.real.copies
    assert step.real.copies == [(pools.id_of[src], pools.id_of[dst], n) for src, dst, n in step.model.copies]


def check_events(pools: SideBySide) -> None:
    """Replaying all events so far gives exactly the index."""
    pools.replay.listen(pools.pool.take_events())
    size = pools.model.block_size
    meant = {
        pools.digest(identity): Stored(
            None if len(identity) == 1 + size else pools.digest(identity[:-size]),
            [token for token, _, _ in identity[-size:]],
            pools.format.extras(identity),
        )
        for identity in pools.model.index
    }
    assert pools.replay.index == meant
