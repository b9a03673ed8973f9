"""What no policy can beat: Belady's choice on a tree of blocks, and a pool without end.

A request needs all blocks of its prompt at once; it hits those, from the first on, that are there. Belady
evicts the block whose next use is farthest, and of equal ones the deepest. A block is used whenever one below
it is, so its next use is never later than theirs: the farthest is always a leaf, and the constraint to leaves
costs nothing.

For requests that come one after the other, blocks of one size and hits counted in blocks this is optimal: to
evict the farthest instead of another block never costs a hit, by the same exchange as for single pages [1]_.
That holds against every policy that evicts whenever it likes, leaves or not, and also against those that
refuse to keep a block.

All resident blocks with the same next use belong to one request to come, and the deepest go first. So it is
enough to count them: what is left of the count when that request arrives is what it hits.

.. [1] L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
   Journal 5 (1966).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from pagedkv.policy.chains import Chains
from pagedkv.policy.trace import Trace

Hits = npt.NDArray[np.int64]


def unlimited_hits(chains: Chains) -> Hits:
    """Return the blocks that each request hits when nothing is ever evicted, [num_requests] int64."""
    seen = np.zeros(chains.num_nodes, np.bool_)
    hits = np.zeros(len(chains.nodes), np.int64)
    for number, nodes in enumerate(chains.nodes):
        hits[number] = np.count_nonzero(seen[nodes])
        seen[nodes] = True
    return hits


class Optimum:
    """Belady's hits on a trace, for any number of blocks.

    Parameters
    ----------
    trace : Trace
    chains : Chains
        Of the same trace.
    block_size : int
        That `chains` was made with.
    """

    def __init__(self, trace: Trace, chains: Chains, block_size: int) -> None:
        self._chains = chains
        lengths = np.array([request.num_tokens for request in trace.requests], np.int64)
        self._num_blocks = -(-lengths // block_size)
        """Pages that each request holds, that of the partial last block included."""
        self._next_uses: dict[int, list[list[tuple[int, int]]]] = {}

    def hits(self, num_blocks: int) -> tuple[Hits, int]:
        """Return the blocks that each request hits, [num_requests] int64, and how many were evicted.

        A request that needs more than all blocks is refused, by this as by every pool.
        """
        served = self._num_blocks <= num_blocks
        next_uses = self._next_uses_among(served)
        never = len(served)
        kept: dict[int, int] = {}  # next use: resident blocks
        farthest: list[int] = []  # a heap of −next use; may hold what is gone
        hits = np.zeros(len(served), np.int64)
        num_resident = num_evicted = 0
        for number in np.flatnonzero(served).tolist():
            hit = kept.pop(number, 0)
            hits[number] = hit
            missing = int(self._num_blocks[number]) - hit
            while missing > num_blocks - num_resident:
                use = -farthest[0]
                there = kept.get(use, 0)
                gone = min(there, missing - (num_blocks - num_resident))
                num_resident -= gone
                num_evicted += gone
                if gone == there:
                    kept.pop(use, None)
                    heappop(farthest)
                else:
                    kept[use] = there - gone
            # Blocks that are never used again go first anyway; the partial one is free at once.
            num_resident += len(self._chains.nodes[number]) - hit
            for use, count in next_uses[number]:
                if use not in kept:
                    heappush(farthest, -use)
                kept[use] = kept.get(use, 0) + count
            if len(farthest) > 2 * len(kept) + 64:
                farthest = [-use for use in kept]
                heapify(farthest)
        assert never not in kept or kept[never] <= num_resident
        return hits, num_evicted

    def _next_uses_among(self, served: npt.NDArray[np.bool_]) -> list[list[tuple[int, int]]]:
        """For each request: (a later one, blocks that this is the next to use); none at all is the end."""
        key = int(np.count_nonzero(served))  # a larger pool serves what a smaller one does, and more
        if key not in self._next_uses:
            chains = self._chains
            never = len(served)
            next_use = np.full(chains.num_nodes, never, np.int32)
            groups: list[list[tuple[int, int]]] = [[] for _ in range(never)]
            for number in np.flatnonzero(served)[::-1].tolist():
                nodes = chains.nodes[number]
                if not len(nodes):
                    continue
                uses = next_use[nodes]
                next_use[nodes] = number
                starts = np.concatenate(([0], np.flatnonzero(np.diff(uses)) + 1))
                counts = np.diff(np.append(starts, len(uses)))
                groups[number] = list(zip(uses[starts].tolist(), counts.tolist(), strict=True))
            self._next_uses[key] = groups
        return self._next_uses[key]
