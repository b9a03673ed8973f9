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
    def __init__(self) -> None:
        self.index: dict[bytes, Stored] = {}

    def listen(self, events: list[KVEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.index = {}
            elif isinstance(event, BlockRemoved):
                for digest in event.block_hashes:
                    del self.index[digest]
                    assert digest not in self.parents(), "a block went before one that follows it"
            else:
                size, parent = event.block_size, event.parent_block_hash
                assert len(event.token_ids) == size * len(event.block_hashes)
                for i, (digest, extras) in enumerate(zip(event.block_hashes, event.extras, strict=True)):
                    assert digest not in self.index, "stored twice"
                    assert parent is None or parent in self.index, "stored before its parent"
                    self.index[digest] = Stored(parent, event.token_ids[i * size : (i + 1) * size], extras)
                    parent = digest

    def parents(self) -> set[bytes | None]:
        return {stored.parent for stored in self.index.values()}
