"""The block manager of the example, beside a plain one that is written from the description."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from block_manager import BlockManager

SIZE = 4


@dataclass
class Request:
    """A sequence as an engine has it."""

    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0


class PlainManager:
    """The same calls: a table from all tokens up to a block's end to a block, and counts of who uses it."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))  # those without a name first, then by their last release
        self.users = [0] * num_blocks
        self.names: dict[int, tuple[int, ...]] = {}

    def can_allocate(self, seq: Request) -> bool:
        return len(self.free) >= -(-len(seq.token_ids) // SIZE)

    def allocate(self, seq: Request) -> None:
        seq.num_cached_tokens = 0
        for begin in range(0, len(seq.token_ids) - SIZE, SIZE):
            name = tuple(seq.token_ids[: begin + SIZE])
            block = next((b for b, own in self.names.items() if own == name), None)
            if block is None:
                break
            self.take(seq, block)
            seq.num_cached_tokens += SIZE
        while len(seq.block_table) < -(-len(seq.token_ids) // SIZE):
            self.take(seq, self.free[0])
            self.names.pop(seq.block_table[-1], None)

    def take(self, seq: Request, block: int) -> None:
        if self.users[block] == 0:
            self.free.remove(block)
        self.users[block] += 1
        seq.block_table.append(block)

    def deallocate(self, seq: Request) -> None:
        for block in reversed(seq.block_table):
            self.users[block] -= 1
            if self.users[block] == 0:
                unnamed = [b for b in self.free if b not in self.names]
                self.free.insert(len(self.free) if block in self.names else len(unnamed), block)
        seq.block_table, seq.num_cached_tokens = [], 0

    def can_append(self, seq: Request) -> bool:
        return len(self.free) >= (len(seq.token_ids) % SIZE == 1)

    def may_append(self, seq: Request) -> None:
        if len(seq.token_ids) % SIZE == 1:
            self.take(seq, self.free[0])
            self.names.pop(seq.block_table[-1], None)

    def hash_blocks(self, seq: Request) -> None:
        for i in range(len(seq.token_ids) // SIZE):
            self.names.setdefault(seq.block_table[i], tuple(seq.token_ids[: SIZE * (i + 1)]))


class Memory:
    """What forward passes write and read: the tokens in each block."""

    def __init__(self, num_blocks: int) -> None:
        self.slots: list[int | None] = [None] * (num_blocks * SIZE)

    def run(self, seq: Request, begin: int) -> None:
        """Write the tokens from `begin` on, and read all of them."""
        places = [seq.block_table[i // SIZE] * SIZE + i % SIZE for i in range(len(seq.token_ids))]
        for i in range(begin, len(places)):
            self.slots[places[i]] = seq.token_ids[i]
        assert [self.slots[place] for place in places] == seq.token_ids


PROMPTS = st.builds(
    lambda end, number: ([0] * 14)[:end] + [1] * number, st.integers(0, 14), st.integers(1, 4)
)
CALLS = st.lists(st.tuples(st.sampled_from(["new", "step", "step", "end"]), PROMPTS, st.integers(0, 9)))


def drive(num_blocks: int, calls: list[tuple[str, list[int], int]], compare: bool) -> None:
    """Send the same requests to both managers."""
    managers = BlockManager(num_blocks, SIZE), PlainManager(num_blocks)
    memories = [Memory(num_blocks) for _ in managers]
    running: list[list[Request]] = []
    for verb, prompt, number in calls:
        if verb == "new":
            requests = [Request(list(prompt)) for _ in managers]
            fits = [m.can_allocate(seq) for m, seq in zip(managers, requests, strict=True)]
            assert not compare or fits[0] == fits[1]
            if not all(fits):
                continue
            for manager, memory, seq in zip(managers, memories, requests, strict=True):
                manager.allocate(seq)
                memory.run(seq, seq.num_cached_tokens)
                manager.hash_blocks(seq)
            running.append(requests)
        elif running:
            requests = running[number % len(running)]
            for seq in requests if verb == "step" else ():
                seq.token_ids.append(prompt[0])
            fits = [m.can_append(seq) for m, seq in zip(managers, requests, strict=True)]
            if verb == "step" and all(fits):
                for manager, memory, seq in zip(managers, memories, requests, strict=True):
                    manager.may_append(seq)
                    memory.run(seq, len(seq.token_ids) - 1)
                    manager.hash_blocks(seq)
            else:
                running.remove(requests)
                for manager, seq in zip(managers, requests, strict=True):
                    manager.deallocate(seq)
                continue
        else:
            continue
        ours, plain = requests
        assert len(ours.block_table) == len(plain.block_table)
        assert not compare or ours.num_cached_tokens == plain.num_cached_tokens
    managers[0].pool.check_integrity()


@given(CALLS)
def test_with_room_both_reuse_the_same(calls: list[tuple[str, list[int], int]]) -> None:
    drive(400, calls, compare=True)


@given(CALLS)
@settings(max_examples=300)
def test_without_room_both_read_what_was_written(calls: list[tuple[str, list[int], int]]) -> None:
    drive(9, calls, compare=False)


@pytest.mark.parametrize("length", [4, 8, 9])
def test_a_prompt_that_is_cached_whole_writes_to_a_block_of_its_own(length: int) -> None:
    manager, prompt = BlockManager(20, SIZE), list(range(length))
    requests = [Request(prompt), Request(prompt)]
    for seq in requests:
        manager.allocate(seq)
        manager.hash_blocks(seq)
    first, second = requests
    assert second.num_cached_tokens == (length - 1) // SIZE * SIZE
    assert first.block_table[-1] != second.block_table[-1]


def test_the_example_is_short() -> None:
    source = Path(sys.modules["block_manager"].__file__ or "").read_text()
    assert len(source.splitlines()) < 80
