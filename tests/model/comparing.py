"""What `SideBySide` compares: all that can be seen of the pool, and what its meaning says of it."""

from __future__ import annotations

from collections import Counter
from math import isnan, nan
from typing import TYPE_CHECKING

from event_replay import Stored
from pool_driving import digests
from prefix_oracle import check_prefixes

from pagedkv import StepTables
from pagedkv.testing.identity import owner

if TYPE_CHECKING:
    from side_by_side import Pair, SideBySide, StepPair


def check_pages(pools: SideBySide) -> None:
    """Who holds how many pages, what each published page is and holds, and that the tree is whole."""
    model, stats = pools.model, pools.pool.stats()
    assert stats.num_nodes == len(model.known)
    first_counts = (stats.num_blocks, stats.num_free_blocks, stats.num_writable_blocks)
    assert first_counts == stats.groups[0][:3]
    assert (stats.num_committed_blocks, stats.num_evictable_blocks) == stats.groups[0][3:5]
    for group, window in enumerate(model.windows):
        published = [page for page in model.published if page.group == group]
        num_writable = sum(page.group == group for page in model.writable)
        num_evictable = len(model.evictable(group))
        assert stats.groups[group] == (
            model.num_blocks[group],
            model.num_free(group),
            num_writable,
            len(published) - num_evictable,
            num_evictable,
            len({page for fence in model.fences for page in fence.pages if page.group == group}),
        )
        identities = {page.identity for page in published}
        for identity in identities if window is None else ():
            parent = identity[: -model.block_size]
            assert len(parent) == 1 or parent in identities, "a block outlived its parent"
        assert window is not None or identities == model.known
        names: list[bytes | None] = [None] * model.num_blocks[group]
        for page in published:
            first = pools.id_of[page] * model.block_size
            slots = [pools.kv[group].slots.get(first + i) for i in range(model.block_size)]
            assert slots == pools.kv_of[page]
            names[pools.id_of[page]] = pools.digest(page.identity)
        assert digests(pools.pool, group) == names


def check_counters(pools: SideBySide) -> None:
    """What was admitted, how much of it was found, what was evicted, when and why."""
    model, stats = pools.model, pools.pool.stats()
    assert stats.num_prompts == len(model.admitted)
    assert stats.num_prompt_tokens == sum(seq.num_prompt_tokens for seq in model.admitted if seq.is_query)
    assert stats.num_cached_tokens == model.num_cached_tokens
    assert stats.num_cached_tokens == sum(stats.hits_by_source.values())
    reasons = ("capacity", "request", "quota", "reset")
    assert stats.num_evicted_by == {reason: model.num_evicted_by[reason] for reason in reasons}
    assert list(stats.residency_histogram) == _histogram(model.residencies)
    assert list(stats.reuse_gap_histogram) == _histogram(model.reuse_gaps)
    assert stats.num_fenced_blocks == stats.groups[0].num_fenced_blocks
    assert stats.num_collisions == (model.num_not_alone if pools.are_digests_broken else 0)
    assert {salt: tuple(usage) for salt, usage in pools.pool.tenants().items()} == model.tenants()
    assert pools.pool.now_s == model.now


NOTHING = {
    "state": 0,
    "num_refs": 0,
    "depth": -1,
    "parent": -1,
    "priority": 35,
    "retained_s": 0.0,
    "eviction_rank": -1,
    "salt": None,
}


def check_map(pools: SideBySide) -> None:
    """Of every page its state and owner, what it is worth, and its place in the order of eviction."""
    for group in pools.model.groups:
        _check_map(pools, group)


def _check_map(pools: SideBySide, group: int) -> None:
    model, page_map = pools.model, pools.pool.snapshot(group=group)
    model.expire()
    published = [page for page in model.published if page.group == group]
    ids = {pools.id_of[page]: page for page in (*model.writable, *published) if page.group == group}
    order = [pools.id_of[page] for page in model.evictable(group)]
    first_of = {page.identity: pools.id_of[page] for page in reversed(published)}
    for block_id in range(model.num_blocks[group]):
        page = ids.get(block_id)
        meant: dict[str, object] = {**NOTHING}
        idle_s = nan
        if page is not None:
            meant.update(state=1, num_refs=len(page.holders))
        if page is not None and page.identity:
            claim = model.claim(page.identity)
            meant.update(
                state=2 if page.holders else 3,
                depth=(len(page.identity) - 1) // model.block_size - 1,
                parent=first_of.get(page.identity[: -model.block_size], -1),
                priority=claim.priority,
                retained_s=claim.until - model.now if claim.priority != 35 else 0.0,
                salt=owner(page.identity),
            )
            if not page.holders:
                meant.update(eviction_rank=order.index(block_id))
                idle_s = model.now - page.used_at
        seen = {name: getattr(page_map, name)[block_id].item() for name in meant if name != "salt"}
        tenant = page_map.tenant[block_id]
        seen["retained_s"] = round(seen["retained_s"], 3)  # single precision
        seen["salt"] = None if tenant < 0 else page_map.salts[tenant]
        assert seen == meant, f"block {block_id}"
        assert isnan(idle_s) == isnan(page_map.idle_s[block_id])
        assert isnan(idle_s) or page_map.idle_s[block_id] == idle_s


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
        assert real.num_releasable_blocks == seq.num_releasable_blocks
        assert real.usage == seq.usage
        assert real.usage.num_tokens == seq.num_prompt_tokens
        assert real.num_reserved_tokens == len(seq.pages) * seq.block_size
        num_nameable = min(len(seq.tokens), seq.num_nameable_tokens)
        ends = range(seq.block_size, num_nameable + 1, seq.block_size)
        assert real.block_hashes == [pools.digest(seq.identity(end)) for end in ends]


def check_tables(pools: SideBySide, step: StepPair, tables: StepTables) -> None:
    for group in pools.model.groups:
        _check_tables(pools, step, tables, group)
    assert len(tables.other_groups) == len(pools.model.windows) - 1


def _check_tables(pools: SideBySide, step: StepPair, tables: StepTables, group: int) -> None:
    size, row, own = pools.model.block_size, 0, tables.group(group)
    written: list[int] = []
    assert own.block_table.shape[0] == len(tables.seq_lens) == len(step.pairs)
    for i, (pair, n) in enumerate(zip(step.pairs, step.model.num_new_tokens, strict=True)):
        start, seq = pair.model.num_computed_tokens, pair.model
        pages = pools.ids(seq.tables[group])
        table = own.block_table[i].tolist()
        assert table == pages + [-1] * (len(table) - len(pages))
        assert len({page for page in pages if page >= 0}) == sum(page >= 0 for page in pages)
        assert tables.query_start_loc[i] == row
        assert tables.seq_lens[i] == start + n
        positions = list(range(start, start + n))
        assert tables.positions[row : row + n].tolist() == positions
        assert tables.token_ids[row : row + n].tolist() == seq.tokens[start : start + n]
        slots = [pages[p // size] * size + p % size if p >= seq.num_written_tokens else -1 for p in positions]
        assert own.slot_mapping[row : row + n].tolist() == slots
        written += [slot for slot in slots if slot >= 0]
        row += n
    assert tables.query_start_loc.tolist()[-1] == row == len(own.slot_mapping)
    assert len(set(written)) == len(written), "two tokens are written to one slot"
    read = Counter(id_ for pair in pools.pairs for id_ in pair.real.block_ids_of(group).tolist())
    for block_id in {slot // size for slot in written}:
        assert pools.pool.digest_of(block_id, group=group) is None, "a published page is written"
        assert read[block_id] <= 1, "a page is written that another sequence reads"
    assert [tuple(map(int, copy)) for copy in own.copies] == step.real.copies_of(group)
    meant = [(pools.id_of[src], pools.id_of[dst], n) for src, dst, n in step.model.copies[group]]
    assert step.real.copies_of(group) == meant
    if pools.model.windows[group] is None:
        check_prefixes(tables._replace(**own._asdict()), size, 1)
    else:
        assert not len(own.prefix_groups)


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


def _histogram(seconds: list[float]) -> list[int]:
    """Counts by powers of two milliseconds."""
    counts = [0] * 33
    for value in seconds:
        counts[int(value * 1000).bit_length()] += 1
    return counts
