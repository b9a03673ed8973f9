"""The batches that attention is timed with, for every library alike. Needs nothing but Python."""

from __future__ import annotations

from typing import NamedTuple

BLOCK_SIZE = 16

THREADS = (1, 2)


class Batch(NamedTuple):
    """Sequences of one length, in bfloat16.

    Attributes
    ----------
    num_seqs, num_queries : int
        Sequences, and new tokens of each.
    num_keys : int
        Tokens of each, the new ones included.
    num_shared : int
        Of these, the tokens at the beginning that all sequences have in the same pages.
    """

    num_seqs: int
    num_queries: int
    num_keys: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    num_shared: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of one sequence."""
        return -(-self.num_keys // BLOCK_SIZE)

    @property
    def token_numbers(self) -> int:
        """Numbers of a token's K and V."""
        return 2 * self.num_kv_heads * self.head_dim

    def kv_bytes(self, number_bytes: int = 2, *, once: bool = True) -> int:
        """Bytes of K and V that must be read; `once`: what is shared counts once."""
        num_tokens = self.num_seqs * self.num_keys
        if once and self.num_shared:
            num_tokens -= (self.num_seqs - 1) * self.num_shared
        return num_tokens * self.token_numbers * number_bytes

    @property
    def num_operations(self) -> int:
        """Additions and multiplications of causal attention: two products over all keys that a query sees."""
        first = self.num_keys - self.num_queries
        num_pairs = self.num_queries * first + self.num_queries * (self.num_queries + 1) // 2
        return 4 * self.num_seqs * num_pairs * self.num_heads * self.head_dim


DECODE = Batch(8, 1, 4_096)
DECODE_SMALL = Batch(32, 1, 4_096, num_heads=9, num_kv_heads=3, head_dim=64)
PREFILL_CACHED = Batch(1, 512, 4_096 + 512)
PREFILL = Batch(1, 4_096, 4_096)
SHARED = Batch(32, 1, 8_192 + 128, num_shared=8_192)
UNSHARED = Batch(32, 1, 1_024)
ONE_TOKEN = Batch(1, 1, 1)

PEER_BATCHES = {
    "decode": DECODE,
    "decode_small": DECODE_SMALL,
    "prefill_cached": PREFILL_CACHED,
    "prefill": PREFILL,
}
"""What another engine's kernel is given too, by row."""


def with_threads(row: str, num_threads: int) -> str:
    """Name a row on so many threads."""
    return f"{row}_{num_threads}t"
