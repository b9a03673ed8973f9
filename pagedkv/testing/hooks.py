"""What tests of an engine switch on: digests that prove nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pagedkv.hashing import broken_digests


def broken_hashes() -> AbstractContextManager[None]:
    """Give every block the same digest: in `hash_blocks`, and in every pool made inside the ``with``.

    Nothing wrong may be served even so. A match compares tokens and extras, so it goes on as if nothing had
    happened; `BlockPool.lookup`, which has only the digest, finds no block that is not alone, and
    ``stats().num_collisions`` counts.
    """
    return broken_digests()
