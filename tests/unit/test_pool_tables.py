"""The arrays of `prepare` are used again, and nobody notices."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pagedkv import BlockPool, OutOfBlocksError, Sequence, Step, StepTables


def check(tables: StepTables, step: Step) -> None:
    starts = [seq.num_computed_tokens for seq in step.sequences]
    ends = [start + count for start, count in zip(starts, step.num_new_tokens, strict=True)]
    width = max(-(-end // 4) for end in ends)
    for g in range(1 + len(tables.other_groups)):
        table = tables.group(g).block_table
        assert table.shape == (len(ends), width)
        for row, seq, end in zip(table, step.sequences, ends, strict=True):
            num_blocks = -(-end // 4)
            pages = seq.block_ids_of(g)[:num_blocks].tolist()
            assert row.tolist() == [*pages, *[-1] * (width - num_blocks)]
    assert tables.seq_lens.tolist() == ends
    assert np.diff(tables.query_start_loc).tolist() == step.num_new_tokens
    assert tables.positions.tolist() == [
        position for start, end in zip(starts, ends, strict=True) for position in range(start, end)
    ]


def change(pool: BlockPool, seqs: list[Sequence], rng: random.Random) -> None:
    """Do to the batch what may happen between two steps."""
    what = rng.choice(
        ["open", "open", "close", "fork", "truncate", "preempt", "shuffle", "nothing", "nothing"]
    )
    if what == "open" or not seqs:
        seqs.append(pool.open([rng.randrange(2) for _ in range(rng.randrange(1, 20))]))
    elif what == "shuffle":
        rng.shuffle(seqs)
    else:
        seq = rng.choice(seqs)
        if what == "close":
            seqs.remove(seq)
            seq.close()
        elif what == "fork":
            seqs.append(seq.fork())
        elif what == "truncate":
            seq.truncate(rng.randint(0, seq.num_tokens))
        elif what == "preempt":
            seq.preempt()


def arrays(tables: StepTables) -> list[np.ndarray]:
    """Those of all groups."""
    groups = [tables.group(g) for g in range(1 + len(tables.other_groups))]
    return [a for part in (tables, *groups) for a in part if isinstance(a, np.ndarray)]


@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,)], ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_tables_are_right_whatever_the_last_step_left_in_them(
    seed: int, windows: tuple[int | None, ...]
) -> None:
    rng = random.Random(seed)
    pool = BlockPool(60, block_size=4, windows=windows)
    seqs: list[Sequence] = []
    held: list[tuple[StepTables, list[np.ndarray]]] = []  # tables and what they were
    for _ in range(150):
        change(pool, seqs, rng)
        for seq in seqs:
            if seq.num_uncached_tokens == 0:
                seq.append(rng.randrange(2))
        batch = seqs[: rng.randrange(1, 6)]
        if not batch:
            continue
        try:
            step = pool.reserve(batch, [rng.randint(1, seq.num_uncached_tokens) for seq in batch])
        except OutOfBlocksError:
            while len(seqs) > 2:
                seqs.pop().close()
            continue
        tables = pool.prepare(step)
        check(tables, step)
        if rng.random() < 0.5:
            held = [*held[-3:], (tables, [a.copy() for a in arrays(tables)])]
        if rng.random() < 0.9:
            pool.commit(step, [rng.randint(0, count) for count in step.num_new_tokens])
        else:
            pool.abandon(step)
        for kept, copy in held:
            assert all(np.array_equal(a, b) for a, b in zip(arrays(kept), copy, strict=True))


def test_a_part_of_an_array_keeps_it_from_being_used_again() -> None:
    pool = BlockPool(8, block_size=4)
    one, other = pool.open([1] * 8), pool.open([2] * 8)
    first, second = pool.reserve(one, 8), pool.reserve(other, 8)
    part = pool.prepare(first).block_table[0, 1:]
    pool.prepare(second)
    assert part.tolist() == one.block_ids[1:].tolist() != other.block_ids[1:].tolist()


def test_arrays_that_nobody_holds_are_used_again() -> None:
    pool = BlockPool(8, block_size=4)
    seq = pool.open([1] * 7)
    address = pool.prepare(step := pool.reserve(seq, 6)).block_table.ctypes.data
    pool.commit(step)
    assert pool.prepare(pool.reserve(seq, 1)).block_table.ctypes.data == address
