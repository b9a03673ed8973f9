"""What the prefix groups of a step have to be, from its other arrays alone."""

from __future__ import annotations

import numpy as np

from pagedkv import StepTables

MIN_SAVED_PIECES = 2


def shareable(tables: StepTables, block_size: int) -> list[tuple[int, ...]]:
    """Each row's leading pages that are whole, seen by all its queries and written by nobody in this step."""
    written = {slot // block_size for slot in tables.slot_mapping.tolist() if slot >= 0}
    rows = []
    for table, length in zip(tables.block_table.tolist(), tables.seq_lens.tolist(), strict=True):
        pages = table[: length // block_size]
        end = next((column for column, page in enumerate(pages) if page in written), len(pages))
        rows.append(tuple(pages[:end]))
    return rows


def num_saved(rows: list[tuple[int, ...]], multiple: int, first: int = 0, end: int = 0) -> int:
    """The page reads that groups of rows with equal beginnings save, of so many pages each or a multiple.

    The rows are known to be equal up to the column `end`, and in no group from `first` on.
    """
    saved = 0
    going_on = [row for row in rows if len(row) >= end + multiple]
    for piece in {row[: end + multiple] for row in going_on}:
        same = [row for row in going_on if row[: end + multiple] == piece]
        if len(same) < 2:
            continue
        last = end + multiple
        while min(map(len, same)) >= last + multiple and len({row[: last + multiple] for row in same}) == 1:
            last += multiple
        gain = (last - first) * (len(same) - 1)
        is_worth_it = gain >= MIN_SAVED_PIECES * multiple
        saved += gain * is_worth_it + num_saved(same, multiple, last if is_worth_it else first, last)
    return saved


def check_prefixes(tables: StepTables, block_size: int, multiple: int) -> int:
    """Check that every claim is true, and that together they save what can be saved; how much that is."""
    groups, order = tables.prefix_groups, tables.prefix_rows
    assert groups.dtype == order.dtype == np.int32
    assert groups.shape[1:] == (4,)
    rows = shareable(tables, block_size)
    assert len(set(order.tolist())) == len(order)
    cells: set[tuple[int, int]] = set()
    saved = 0
    outer: list[set[int]] = []
    for begin, end, first, last in groups.tolist():
        members = order[begin:end].tolist()
        assert 0 <= begin < end - 1 < len(order)
        assert 0 <= first < last
        assert first % multiple == last % multiple == 0
        assert all(len(rows[row]) >= last for row in members), "a page that not every query sees"
        assert len({rows[row][:last] for row in members}) == 1, "pages that are not the same"
        own = {(row, column) for row in members for column in range(first, last)}
        assert not own & cells, "a row's page in two groups"
        cells |= own
        saved += (len(members) - 1) * (last - first)
        assert (len(members) - 1) * (last - first) >= MIN_SAVED_PIECES * multiple
        assert all(set(members) <= rows or not set(members) & rows for rows in outer), "no tree"
        outer.append(set(members))
    assert saved == num_saved(rows, multiple)
    return saved
