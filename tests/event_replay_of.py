"""The index of a pool from its events, whatever the order in which blocks of a path go."""

from __future__ import annotations

from collections.abc import Iterable

from pagedkv.events import AllBlocksCleared, BlockRemoved, KVEvent


def replay(events: Iterable[KVEvent], index: dict[bytes, bytes | None]) -> None:
    """Apply events to an index of digests, each with that of its parent."""
    for event in events:
        if isinstance(event, AllBlocksCleared):
            index.clear()
        elif isinstance(event, BlockRemoved):
            for digest in event.block_hashes:
                del index[digest]
        else:
            parent = event.parent_block_hash
            for digest in event.block_hashes:
                assert digest not in index, "stored twice"
                index[digest] = parent
                parent = digest
