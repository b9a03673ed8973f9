"""A block manager of the kind that nano-vllm has, over BlockPool: the same six calls, so the engine stays.

A sequence is anything with `token_ids`, `block_table` and `num_cached_tokens`. The engine calls
`can_allocate` and `allocate` before a prompt runs; `hash_blocks` after every forward pass; `can_append` and
`may_append` after a token was added and before it runs; `deallocate` at the end, or to preempt.
"""

from __future__ import annotations

from typing import Protocol

from pagedkv import BlockPool, Sequence, Step


class EngineSequence(Protocol):
    """What the engine keeps of a request."""

    token_ids: list[int]
    block_table: list[int]
    num_cached_tokens: int


class BlockManager:
    """Gives sequences blocks of two tokens or more; those with the same beginning get the same ones."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        # Whole blocks only: an engine without page copies can't take up a block in the middle.
        self.pool = BlockPool(num_blocks, block_size=block_size, token_granular=False)
        self.block_size = block_size
        self._running: dict[int, Sequence] = {}
        self._steps: dict[int, Step] = {}

    def can_allocate(self, seq: EngineSequence) -> bool:
        """Whether the whole sequence would fit although nothing of it were cached."""
        return self._num_available() >= -(-len(seq.token_ids) // self.block_size)

    def allocate(self, seq: EngineSequence) -> None:
        """Set `block_table`, and `num_cached_tokens`, which need not run."""
        tokens = seq.token_ids
        # The last token always runs. The block that it ends is to be the sequence's own, not one of others.
        ends_block = len(tokens) % self.block_size == 0
        own = self.pool.open(tokens[:-1] if ends_block else tokens)
        if ends_block:
            own.append(tokens[-1])
        self._running[id(seq)] = own
        self._reserve(seq)
        seq.num_cached_tokens = own.num_cached_tokens

    def deallocate(self, seq: EngineSequence) -> None:
        """Give the blocks back; what was hashed is found until somebody needs the room."""
        self._steps.pop(id(seq), None)
        self._running.pop(id(seq)).close()
        seq.block_table, seq.num_cached_tokens = [], 0

    def can_append(self, seq: EngineSequence) -> bool:
        """Whether the token that was just added has room."""
        return self._num_available() >= (len(seq.token_ids) % self.block_size == 1)

    def may_append(self, seq: EngineSequence) -> None:
        """Add a block to `block_table` if the token that was just added begins one."""
        self._running[id(seq)].append(seq.token_ids[-1])
        self._reserve(seq)

    def hash_blocks(self, seq: EngineSequence) -> None:
        """Let others find the blocks that the last forward pass has filled."""
        self.pool.commit(self._steps.pop(id(seq)))

    def _reserve(self, seq: EngineSequence) -> None:
        own = self._running[id(seq)]
        self._steps[id(seq)] = self.pool.reserve(own, own.num_uncached_tokens)
        seq.block_table = own.block_ids.tolist()

    def _num_available(self) -> int:
        stats = self.pool.stats()
        return stats.num_free_blocks + stats.num_evictable_blocks
