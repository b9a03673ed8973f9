"""The index of a pool, rebuilt from its events alone."""

from __future__ import annotations

from typing import NamedTuple

from pagedkv.events import AllBlocksCleared, BlockRemoved, KVEvent


class Stored(NamedTuple):
    """What the events say of one block."""

    parent: bytes | None
    token_ids: list[int]
    extras: bytes


class EventReplay:
    """Of a pool whose groups all have windows, blocks may go before those that follow them."""

    def __init__(self, *, is_whole: bool = True) -> None:
        self.index: dict[bytes, Stored] = {}
        self.is_whole = is_whole

    def listen(self, events: list[KVEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.index = {}
            elif isinstance(event, BlockRemoved):
                for digest in event.block_hashes:
                    del self.index[digest]
                    is_last = not self.is_whole or digest not in self.parents()
                    assert is_last, "a block went before one that follows it"
            else:
                size, parent = event.block_size, event.parent_block_hash
                assert len(event.token_ids) == size * len(event.block_hashes)
                for i, (digest, extras) in enumerate(zip(event.block_hashes, event.extras, strict=True)):
                    assert digest not in self.index, "stored twice"
                    is_next = parent is None or parent in self.index or not self.is_whole
                    assert is_next, "stored before its parent"
                    self.index[digest] = Stored(parent, event.token_ids[i * size : (i + 1) * size], extras)
                    parent = digest

    def parents(self) -> set[bytes | None]:
        return {stored.parent for stored in self.index.values()}
