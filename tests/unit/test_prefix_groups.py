"""`prepare` tells which rows begin with the same pages: nothing false, and nothing left out."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from pool_driving import compute, remember, run
from prefix_oracle import check_prefixes

from pagedkv import BlockPool, OutOfBlocksError, Sequence, Step, StepTables, UsageError

BLOCK_SIZE = 4


def decode(pool: BlockPool, seqs: list[Sequence], multiple: int = BLOCK_SIZE) -> StepTables:
    """Compute one more token of each."""
    pool.append(seqs, [1] * len(seqs))
    step = pool.reserve(seqs, [1] * len(seqs))
    tables = pool.prepare(step, prefix_multiple=multiple)
    pool.commit(step)
    return tables


def levels(tables: StepTables) -> list[tuple[list[int], int, int]]:
    """Each group's rows and columns, in an order that says nothing of pages."""
    groups, rows = tables.prefix_groups, tables.prefix_rows
    return sorted((sorted(rows[begin:end].tolist()), *columns) for begin, end, *columns in groups.tolist())


def test_groups_have_levels() -> None:
    pool = BlockPool(200, block_size=4)
    heads = [[1] * 32, [1] * 32 + [2] * 8, [1] * 32 + [3] * 12]
    remember(pool, *([*head, 9] for head in heads))
    prompts = [heads[1], heads[1], heads[2], heads[0], heads[2], heads[1]]
    seqs = [pool.open([*prompt, 10 + i, 5]) for i, prompt in enumerate(prompts)]
    tables = run_in_multiples(pool, seqs, 4)
    assert levels(tables) == [([0, 1, 2, 3, 4, 5], 0, 8), ([0, 1, 5], 8, 10), ([2, 4], 8, 11)]
    assert check_prefixes(tables, 4, 1) == 5 * 8 + 2 * 2 + 3


def run_in_multiples(pool: BlockPool, seqs: list[Sequence], multiple: int) -> StepTables:
    step = pool.reserve(seqs, [seq.num_uncached_tokens for seq in seqs])
    tables = pool.prepare(step, prefix_multiple=multiple)
    pool.commit(step)
    return tables


def test_by_default_groups_are_of_what_the_kernels_compute_as_one() -> None:
    pool = BlockPool(400)
    remember(pool, [1] * 2100, [1] * 1200 + [2] * 400)
    seqs = [pool.open([1] * 2100 + [i]) for i in (5, 6)] + [pool.open([1] * 1200 + [2] * 400 + [7])]
    tables = run(pool, *seqs)
    # 1,200 tokens in common make two pieces of 512, and the next two, up to 2,048, only two rows share.
    assert levels(tables) == [([0, 1], 64, 128), ([0, 1, 2], 0, 64)]


def test_a_row_that_shares_less_than_a_piece_is_in_no_group() -> None:
    pool = BlockPool(200)
    remember(pool, [1] * 513)
    assert levels(run(pool, *(pool.open([1] * 511 + [i, i]) for i in (2, 3, 4)))) == []
    assert levels(run(pool, *(pool.open([1] * 512 + [i]) for i in (2, 3, 4)))) == [([0, 1, 2], 0, 32)]


def test_a_group_that_saves_one_piece_is_left_out() -> None:
    pool = BlockPool(200)
    remember(pool, [1] * 1025)
    assert levels(run(pool, *(pool.open([1] * 512 + [i]) for i in (2, 3)))) == []
    assert levels(run(pool, *(pool.open([1] * 1024 + [i]) for i in (2, 3)))) == [([0, 1], 0, 64)]


@pytest.mark.parametrize("multiple", [1, 4, 6, 16, 512])
def test_pieces_are_whole_blocks(multiple: int) -> None:
    pool = BlockPool(600, block_size=4)
    remember(pool, [1] * 550)
    tables = run_in_multiples(pool, [pool.open([1] * 550 + [i]) for i in (2, 3, 4)], multiple)
    piece = int(np.lcm(multiple, 4))
    assert levels(tables) == [([0, 1, 2], 0, 550 // piece * piece // 4)]


def test_the_page_of_a_full_hit_is_shared_and_a_page_that_is_written_is_not() -> None:
    pool = BlockPool(20, block_size=4)
    compute(pool, [1] * 8)
    hits = [pool.open([1] * 8) for _ in range(3)]  # whole blocks: nothing is written
    assert levels(run_in_multiples(pool, hits, 4)) == [([0, 1, 2], 0, 2)]
    forks = [hits[0], hits[0].fork()]
    pool.append(forks, [[2, 3], [4, 5]])
    assert levels(run_in_multiples(pool, forks, 4)) == [([0, 1], 0, 2)]
    more = [forks[0], forks[0].fork()]  # of a page that is partly filled
    assert levels(decode(pool, more)) == [([0, 1], 0, 2)]


def test_equal_tokens_in_different_pages_are_not_shared() -> None:
    pool = BlockPool(40, block_size=4)
    twins = [pool.open([1] * 9), pool.open([1] * 9)]  # both compute the same blocks
    assert levels(run_in_multiples(pool, twins, 4)) == []
    assert twins[0].block_ids[0] != twins[1].block_ids[0]
    third = pool.open([1] * 8 + [2])
    batch = [*twins, third]
    pool.append(twins, [2, 3])
    assert levels(run_in_multiples(pool, batch, 4)) == [([0, 2], 0, 2)]


def test_more_sequences_than_pages() -> None:
    pool = BlockPool(3, block_size=4)
    compute(pool, [1] * 12).close()
    seqs = [pool.open([1] * 12) for _ in range(40)]
    assert levels(run_in_multiples(pool, seqs, 4)) == [(list(range(40)), 0, 3)]


def test_what_was_found_is_kept_and_what_is_new_is_found() -> None:
    pool = BlockPool(200, block_size=4)
    remember(pool, [1] * 20)
    seqs = [pool.open([1] * 20 + [i]) for i in (2, 3)]
    run(pool, *seqs)
    for _ in range(20):
        assert levels(decode(pool, seqs)) == [([0, 1], 0, 5)]
    third = pool.open([1] * 12 + [4])
    run(pool, third)
    assert levels(decode(pool, [third, *seqs])) == [([0, 1, 2], 0, 3), ([1, 2], 3, 5)]
    seqs[0].preempt()
    assert levels(decode(pool, seqs)) == [([0, 1], 0, 5)]  # in pages that it matched again
    seqs[1].truncate(18)
    assert levels(decode(pool, [seqs[1], third])) == [([0, 1], 0, 3)]


def test_nothing_is_looked_for_when_that_is_off() -> None:
    pool = BlockPool(40, block_size=4)
    remember(pool, [1] * 9)
    seqs = [pool.open([1] * 8 + [i]) for i in (2, 3)]
    step = pool.reserve(seqs, [1, 1])
    for is_on in (True, False, True, False):
        tables = pool.prepare(step, share_prefixes=is_on, prefix_multiple=4)
        assert levels(tables) == ([([0, 1], 0, 2)] if is_on else [])
        assert tables.prefix_groups.shape == (int(is_on), 4)


@pytest.mark.parametrize("multiple", [0, -1, 2**31, 1.5, "4", True, None])
def test_a_multiple_that_is_no_number_of_tokens_is_refused(multiple: object) -> None:
    pool = BlockPool(4)
    step = pool.reserve(pool.open([1]), 1)
    with pytest.raises(UsageError, match="prefix_multiple: expected an integer"):
        pool.prepare(step, prefix_multiple=multiple)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="share_prefixes: expected"):
        pool.prepare(step, share_prefixes="no")  # type: ignore[arg-type]
    assert step.state == "reserved"


def test_groups_cannot_be_written_and_stay_for_who_holds_them() -> None:
    pool = BlockPool(40, block_size=4)
    remember(pool, [1] * 9)
    seqs = [pool.open([1] * 8 + [i]) for i in (2, 3, 4)]
    run(pool, *seqs)
    tables = decode(pool, seqs)
    groups, rows = tables.prefix_groups, tables.prefix_rows
    assert not groups.flags.writeable
    assert not rows.flags.writeable
    del tables, rows
    for batch in (seqs[:2], seqs[1:], seqs[:1]):
        decode(pool, batch)
        assert groups.tolist() == [[0, 3, 0, 2]]


# ---------------------------------------------------------------- whatever happens between two steps


def prompt(rng: random.Random) -> list[int]:
    """Draw from a tree of few beginnings, so that prompts part at any place."""
    return [int(rng.random() < 0.1) for _ in range(rng.choice([0, 3, 8, 13, 40]))] + [
        rng.randrange(2) for _ in range(rng.randrange(1, 9))
    ]


class Driver:
    """A batch that is changed between steps in every way that an engine may."""

    def __init__(self, seed: int, num_blocks: int) -> None:
        self.rng = random.Random(seed)
        self.pool = BlockPool(num_blocks, block_size=BLOCK_SIZE, token_granular=seed % 3 > 0)
        self.seqs: list[Sequence] = []
        self.open_steps: list[tuple[Step, StepTables, int]] = []
        self.seen: Counter[str] = Counter()

    def change(self) -> None:
        rng, in_step = self.rng, {id(seq) for step, _, _ in self.open_steps for seq in step.sequences}
        free = [seq for seq in self.seqs if id(seq) not in in_step]
        verbs = ["open", "open", "fork", "fork", "truncate", "preempt", "close", "evict", "shuffle", "twins"]
        what = rng.choice(verbs + ["nothing"] * 4)
        if what == "open" or not free:
            self.seqs.append(self.pool.open(prompt(rng)))
        elif what == "twins":  # they compute the same blocks side by side
            tokens = prompt(rng)
            self.seqs += [self.pool.open(tokens), self.pool.open(tokens)]
        elif what == "evict":
            self.pool.evict(rng.randrange(6))
        elif what == "shuffle":
            rng.shuffle(self.seqs)
        elif what != "nothing":
            seq = rng.choice(free)
            if what == "fork":
                self.seqs += [seq.fork() for _ in range(rng.randrange(1, 4))]
            elif what == "truncate":
                seq.truncate(rng.randint(max(0, seq.num_tokens - 9), seq.num_tokens))
            elif what == "preempt":
                seq.preempt()
            elif what == "close":
                self.seqs.remove(seq)
                seq.close()

    def step(self) -> None:
        rng, in_step = self.rng, {id(seq) for step, _, _ in self.open_steps for seq in step.sequences}
        batch = [seq for seq in self.seqs if id(seq) not in in_step][: rng.choice([1, 3, 12, 40])]
        for seq in batch:
            if seq.num_uncached_tokens == 0:
                seq.append(rng.randrange(2))
        if not batch:
            return
        counts = [rng.choice([1, seq.num_uncached_tokens]) for seq in batch]
        try:
            step = self.pool.reserve(batch, counts)
        except OutOfBlocksError:
            self.seen["full"] += 1
            for seq in self.seqs[3:]:
                if id(seq) not in in_step:
                    self.seqs.remove(seq)
                    seq.close()
            return
        multiple = rng.choice([1, 1, 1, 1, 2, 3])
        tables = self.pool.prepare(step, prefix_multiple=multiple * BLOCK_SIZE)
        self.seen["saved"] += check_prefixes(tables, BLOCK_SIZE, multiple) > 0
        self.seen["levels"] += len({row[2] for row in tables.prefix_groups.tolist()}) > 1
        self.seen["groups"] += len(tables.prefix_groups)
        if rng.random() < 0.3:
            self.open_steps.append((step, tables, multiple))
        else:
            self.end(step)

    def end(self, step: Step) -> None:
        if self.rng.random() < 0.2:
            self.pool.abandon(step)
        else:
            self.pool.commit(
                step, [self.rng.choice([n, self.rng.randint(0, n)]) for n in step.num_new_tokens]
            )

    def end_oldest(self) -> None:
        """A step that was open meanwhile: its arrays still are what they were."""
        step, tables, multiple = self.open_steps.pop(0)
        check_prefixes(tables, BLOCK_SIZE, multiple)
        again = self.pool.prepare(step, prefix_multiple=multiple * BLOCK_SIZE)
        assert levels(again) == levels(tables)
        del tables, again
        self.end(step)


@pytest.mark.parametrize("num_blocks", [14, 60, 400])
@pytest.mark.parametrize("seed", range(8))
def test_groups_are_right_whatever_happened_since_the_last_step(seed: int, num_blocks: int) -> None:
    driver = Driver(seed, num_blocks)
    for _ in range(200):
        driver.change()
        driver.step()
        if len(driver.open_steps) > driver.rng.randrange(3):
            driver.end_oldest()
    driver.pool.check_integrity()
    assert driver.seen["saved"] > (3 if num_blocks < 60 else 30)
    assert driver.seen["levels"] > 10 or num_blocks < 60
    assert driver.seen["full"] > 0 or num_blocks > 60
