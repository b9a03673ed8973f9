"""The index that a router builds from a pool's events alone."""

from __future__ import annotations

from pagedkv import BlockHash, BlockPool
from pagedkv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent


class Watcher:
    """A router's view, built from events alone: of each block the prompt that ends with it."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.prompts: dict[BlockHash, list[int]] = {}
        self.parents: dict[BlockHash, BlockHash | None] = {}

    def listen(self) -> None:
        """Hear what happened since the last time."""
        self.hear(self.pool.take_events())

    def hear(self, events: list[KVEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.prompts, self.parents = {}, {}
            elif isinstance(event, BlockRemoved):
                for digest in event.block_hashes:
                    assert digest not in self.parents.values(), "a block went before one that follows it"
                    del self.prompts[digest], self.parents[digest]
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert len(event.extras) == len(event.block_hashes)
        parent = event.parent_block_hash
        for i, digest in enumerate(event.block_hashes):
            assert digest not in self.prompts, "stored twice"
            before = [] if parent is None else self.prompts[parent]
            self.prompts[digest] = before + event.token_ids[i * size : (i + 1) * size]
            self.parents[digest] = parent
            parent = digest
