"""What changes in the index, for routers and other watchers.

Replaying the events of a pool from empty gives exactly what a prompt can hit in it. A block is named by its
digest, and its parent in an event is the block before it in the prompt.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from pagedkv.hashing import BlockHash


class BlockStored(NamedTuple):
    """Blocks of one prompt that can be hit from now on, each the parent of the next.

    Attributes
    ----------
    block_hashes : list of BlockHash
    parent_block_hash : BlockHash or None
        Of the first block; None where the prompt begins.
    token_ids : list of int, [len(block_hashes) · block_size]
    block_size : int
    extras : list of bytes
        Each block's encoded salt, adapter, media and so on, as they enter its digest; empty for most.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    extras: list[bytes]


class BlockRemoved(NamedTuple):
    """Blocks that can't be hit any more, each after those that follow it in a prompt."""

    block_hashes: list[BlockHash]


class AllBlocksCleared(NamedTuple):
    """Nothing that was stored before can be hit any more, but for what is stored anew behind it.

    After `reset` and `bump_generation`, and where `take_events` came too late for all that had changed.
    """


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def event_from_core(
    block_size: int,
    kind: str,
    hashes: list[BlockHash],
    parent: BlockHash | None,
    token_ids: list[int],
    extras: list[bytes],
) -> KVEvent:
    """Give one of the core's events its class."""
    if kind == "stored":
        return BlockStored(hashes, parent, token_ids, block_size, extras)
    return BlockRemoved(hashes) if kind == "removed" else AllBlocksCleared()
