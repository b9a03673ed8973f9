"""What changes in the index, for routers and other watchers.

Replaying the events of a pool from empty gives exactly what a prompt can hit in it. A block is named by its
digest, and its parent in an event is the block before it in the prompt.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

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
    """Nothing that was stored before can be hit any more: after `reset` and `bump_generation`."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def event_from_core(
    block_size: int,
    kind: str,
    digests: list[bytes],
    parent: bytes | None,
    token_ids: npt.NDArray[np.uint32],
    extras: list[bytes],
) -> KVEvent:
    """Give one of the core's events its class."""
    hashes = list(map(BlockHash, digests))
    if kind == "stored":
        parent_hash = None if parent is None else BlockHash(parent)
        return BlockStored(hashes, parent_hash, token_ids.tolist(), block_size, extras)
    return BlockRemoved(hashes) if kind == "removed" else AllBlocksCleared()
