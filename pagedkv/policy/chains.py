"""Which blocks of a trace are the same: each prompt as a path of numbered tree nodes."""

from __future__ import annotations

from itertools import repeat

import numpy as np
import numpy.typing as npt

from pagedkv.policy.trace import Request, Tokens, Trace

Nodes = npt.NDArray[np.int32]
_Hashes = npt.NDArray[np.uint64]


class Chains:
    """The whole blocks of each request as nodes: equal numbers are equal blocks with equal predecessors.

    What a prompt shares with those before it begins at its start, so one search among the hashes of its
    prefixes finds how far it goes, and one comparison with the prompt that brought it proves it.

    Attributes
    ----------
    nodes : list of ndarray [num_whole_blocks] int32
        One array a request.
    num_nodes : int
        Numbers given; some stand for the rest of a named block that is never asked for.
    """

    def __init__(self, trace: Trace, block_size: int) -> None:
        self._requests = trace.requests
        self._block_size = block_size
        seed = 1
        while not self._number_all(seed):
            seed += 1

    def _number_all(self, seed: int) -> bool:
        """Give every block its number; False if two different prefixes have the same hash."""
        self.nodes: list[Nodes] = []
        self.num_nodes = 0
        hashing = _PrefixHashes(seed)
        first_with: dict[int, int] = {}  # hash of a prefix: the request that brought it
        numbers: list[Nodes] = []  # of each request: the first node of each unit
        for at, request in enumerate(self._requests):
            units, per_block, per_unit = self._units(request)
            hashes = hashing.of(units, request.cache_salt)[per_block - 1 :: per_block]
            known = _count_known(hashes, first_with)
            shared: Nodes = np.empty(0, np.int32)
            if known:
                before = first_with[int(hashes[known - 1])]
                if not self._share(request, before, known):
                    return False
                shared = numbers[before][:known]
            new = len(hashes) - known
            end = self.num_nodes + per_unit * new
            fresh: Nodes = np.arange(self.num_nodes, end, per_unit, dtype=np.int32)
            self.num_nodes = end
            first_with.update(zip(hashes[known:].tolist(), repeat(at)))
            own: Nodes = np.concatenate((shared, fresh), dtype=np.int32)
            numbers.append(own)
            if per_unit > 1:
                whole = request.num_replayed_tokens(self._block_size) // self._block_size
                run: Nodes = np.arange(per_unit, dtype=np.int32)
                own = (own[:, None] + run).reshape(-1)[:whole]
            self.nodes.append(own)
        return True

    def _units(self, request: Request) -> tuple[Tokens, int, int]:
        """Return what identifies the prompt, how much of that a block has, and how many blocks each has."""
        size = request.tokens_per_id
        if size > 1 and size % self._block_size == 0:
            return request.content, 1, size // self._block_size
        return request.replayed_tokens(self._block_size), self._block_size, 1

    def _share(self, request: Request, before: int, known: int) -> bool:
        other = self._requests[before]
        units, per_block, per_unit = self._units(request)
        others, other_per_block, other_per_unit = self._units(other)
        end = known * per_block
        return (
            request.cache_salt == other.cache_salt
            and (per_block, per_unit) == (other_per_block, other_per_unit)
            and np.array_equal(units[:end], others[:end])
        )


class _PrefixHashes:
    """Hashes of all prefixes of a prompt at once: sums of mixed units, each times a power of a number."""

    def __init__(self, seed: int) -> None:
        self._seed = np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
        self._powers = np.empty(0, np.uint64)
        self._salts: dict[str | None, int] = {}

    def of(self, units: Tokens, salt: str | None) -> _Hashes:
        """Return the hash of each prefix, [num_units] uint64."""
        if len(self._powers) < len(units):
            factors = np.full(max(len(units), 2 * len(self._powers)), 0xD1342543DE82EF95, np.uint64)
            self._powers = np.cumprod(factors, dtype=np.uint64)
        of_salt = self._salts.setdefault(salt, len(self._salts) + 2**40)
        start = self._mix(np.array([of_salt], np.uint64))
        terms = self._mix(units.astype(np.uint64)) * self._powers[: len(units)]
        return np.cumsum(terms, dtype=np.uint64) + start

    def _mix(self, values: _Hashes) -> _Hashes:
        values = (values + self._seed) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(32))


def _count_known(hashes: _Hashes, first_with: dict[int, int]) -> int:
    """Return how many of the prefixes, from the shortest on, were there before."""
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if int(hashes[middle]) in first_with:
            low = middle + 1
        else:
            high = middle
    return low
