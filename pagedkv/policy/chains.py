"""Which blocks of a trace are the same: each prompt as a path of numbered tree nodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pagedkv.hashing import hash_blocks
from pagedkv.policy.trace import Request, Trace

Nodes = npt.NDArray[np.int32]
Progress = Callable[[int], None]
"""Called with the number of requests done since the last call."""
NOTIFY_EVERY = 256


class Chains:
    """The whole blocks of each request as nodes: equal numbers are equal blocks with equal predecessors.

    Attributes
    ----------
    nodes : list of ndarray [num_whole_blocks] int32
        One array a request.
    num_nodes : int
        Distinct blocks.
    """

    def __init__(self, trace: Trace, block_size: int, progress: Progress | None = None) -> None:
        self._block_size = block_size
        self._node_of: dict[tuple[int, int, str | None] | bytes, int] = {}
        self._num_named = 0
        self.num_nodes = 0
        self.nodes: list[Nodes] = []
        for number, request in enumerate(trace.requests, 1):
            size = request.tokens_per_id
            named = size > 1 and size % block_size == 0
            self.nodes.append(self._by_name(request) if named else self._by_digest(request))
            if progress is not None and number % NOTIFY_EVERY == 0:
                progress(NOTIFY_EVERY)

    def _by_name(self, request: Request) -> Nodes:
        """Walk the named blocks; each is a chain of smaller ones, numbered in a row."""
        per_name = request.tokens_per_id // self._block_size
        node_of = self._node_of
        first, parent = [], -1
        for name in request.content.tolist():
            key = (parent, name, request.cache_salt if parent < 0 else None)
            node = node_of.get(key)
            if node is None:
                node = node_of[key] = self.num_nodes
                self.num_nodes += per_name
            first.append(node)
            parent = node
        run = np.arange(per_name, dtype=np.int32)
        nodes = (np.array(first, np.int32)[:, None] + run).reshape(-1)
        return nodes[: request.num_replayed_tokens(self._block_size) // self._block_size]

    def _by_digest(self, request: Request) -> Nodes:
        node_of = self._node_of
        digests = hash_blocks(
            request.replayed_tokens(self._block_size),
            block_size=self._block_size,
            cache_salt=request.cache_salt,
            scheme="xxh3-128",
        )
        nodes = np.empty(len(digests), np.int32)
        for place, digest in enumerate(digests):
            node = node_of.setdefault(digest, self.num_nodes)
            self.num_nodes += node == self.num_nodes
            nodes[place] = node
        return nodes
