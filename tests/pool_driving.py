"""Driving a pool without a model: KV is a note of what was computed, so a foreign page is seen at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pagedkv
from pagedkv.extras import Adapter, Embeddings, Extra, Media


def run(pool: pagedkv.BlockPool, *seqs: pagedkv.Sequence) -> pagedkv.StepTables:
    """Compute every token of the sequences in one step."""
    step = pool.reserve(list(seqs), [seq.num_uncached_tokens for seq in seqs])
    tables = pool.prepare(step)
    pool.commit(step)
    return tables


def compute(pool: pagedkv.BlockPool, token_ids: Iterable[int], **extras: Any) -> pagedkv.Sequence:
    """Open a prompt and compute it."""
    seq = pool.open(token_ids, **extras)
    run(pool, seq)
    return seq


def remember(pool: pagedkv.BlockPool, *prompts: Iterable[int], **extras: Any) -> None:
    """Leave prompts in the cache, each released after the one before."""
    for token_ids in prompts:
        compute(pool, token_ids, **extras).close()


def num_block_tokens(pool: pagedkv.BlockPool, token_ids: Iterable[int], **extras: Any) -> int:
    return int(pool.match(token_ids, **extras).num_block_tokens)


def digests(pool: pagedkv.BlockPool, group: int = 0) -> list[bytes | None]:
    """Of every page: the digest of the published block that it holds."""
    num_blocks = pool.num_blocks_by_group[group]
    return [pool.digest_of(block_id, group=group) for block_id in range(num_blocks)]


def drain(pool: pagedkv.BlockPool) -> list[int]:
    """Evict page after page; the block ids in the order they went."""
    order: list[int] = []
    while True:
        before = digests(pool)
        if pool.evict(1) == 0:
            return order
        after = digests(pool)
        order += [i for i in range(pool.num_blocks) if before[i] is not None and after[i] is None]


def observe(pool: pagedkv.BlockPool, *seqs: pagedkv.Sequence) -> tuple[Any, ...]:
    """All that can be seen without changing anything, but for how long ago it was."""
    pool.check_integrity()
    lengths = [
        (
            seq.num_tokens,
            seq.num_cached_tokens,
            seq.num_computed_tokens,
            seq.num_committed_tokens,
            seq.num_reserved_tokens,
            seq.num_releasable_blocks,
            seq.usage,
            seq.is_closed,
            seq.token_ids.tolist(),
            seq.block_ids.tolist(),
        )
        for seq in seqs
    ]
    stats, pages = pool.stats(), pool.snapshot()
    counts = [
        sum(value) if name.endswith("histogram") else value  # its buckets depend on time
        for name, value in stats._asdict().items()
    ]
    facts = [pages.state, pages.num_refs, pages.depth, pages.parent, pages.priority, pages.eviction_rank]
    is_retained = pages.retained_s > 0
    tenants = [pages.salts[i] if i >= 0 else None for i in pages.tenant]
    columns = [column.tolist() for column in (*facts, is_retained)]
    return counts, columns, tenants, pool.tenants(), digests(pool), lengths


class NotedKV:
    """Memory; its slots hold a number for "all that this K/V was computed from": equal numbers, equal causes.

    Numbers come from a table of (number of the token before, this token, the items that cover it), so no two
    different histories share one.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, int] = {}
        self._numbers: dict[Any, int] = {}

    def causes(
        self,
        token_ids: Sequence[int],
        cache_salt: Any = None,
        extras: Iterable[Any] = (),
        *,
        salt_from: int | None = None,
        items_end: int | None = None,
        generation: int = 0,
    ) -> list[int]:
        """Of each token, the number of what its K/V is computed from; items end before `items_end`."""
        extras, items_end = list(extras), len(token_ids) if items_end is None else items_end
        salt = cache_salt.encode() if isinstance(cache_salt, str) else cache_salt
        salted_from = (salt_from or 0) // self.block_size * self.block_size
        request_wide = {repr(x) for x in extras if isinstance(x, Adapter | Extra)}
        cause: Any = (generation, frozenset(request_wide))
        causes: list[int] = []
        for i, token in enumerate(token_ids):
            cover = {(x.digest, _place(x, i)) for x in extras if i < items_end and _place(x, i) is not None}
            reason = (cause, salt if i == salted_from else None, int(token), frozenset(cover))
            cause = self._numbers.setdefault(reason, len(self._numbers))
            causes.append(cause)
        return causes

    def execute(
        self,
        tables: pagedkv.StepTables,
        causes: Sequence[list[int]],
        *,
        group: int = 0,
        window: int | None = None,
    ) -> None:
        """Run the planned copies, write the step's K/V, and read back all that the step's queries may see."""
        size, own = self.block_size, tables.group(group)
        for source, destination, num_tokens in own.copies:
            for offset in range(size):  # what is behind the copied tokens is garbage
                self.slots.pop(destination * size + offset, None)
            for offset in range(num_tokens):
                self.slots[destination * size + offset] = self.slots[source * size + offset]
        rows = tables.query_start_loc.tolist()
        for i, expected in enumerate(causes):
            for j in range(rows[i], rows[i + 1]):
                if (slot := int(own.slot_mapping[j])) >= 0:
                    self.slots[slot] = expected[int(tables.positions[j])]
        for i, expected in enumerate(causes):
            table, end = own.block_table[i].tolist(), int(tables.seq_lens[i])
            first_query = end - (rows[i + 1] - rows[i])
            first = 0 if window is None else max(0, first_query - window + 1)
            read = [self.slots.get(table[p // size] * size + p % size) for p in range(first, end)]
            assert read == expected[first:end], f"sequence {i} of the step reads KV of other tokens"

    def spoil(self, block_ids: Iterable[int]) -> None:
        """Fill pages with what belongs to nobody."""
        for block_id in block_ids:
            for offset in range(self.block_size):
                self.slots[int(block_id) * self.block_size + offset] = -1


def _place(extra: Any, position: int) -> int | None:
    """Which part of a media item or of embeddings a token stands for."""
    if isinstance(extra, Media) and 0 <= position - extra.start < extra.length:
        return position - extra.start
    if isinstance(extra, Embeddings) and position in extra.positions:
        return list(extra.positions).index(position)
    return None
