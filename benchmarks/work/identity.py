"""What may tell the KV of equal tokens apart, as the verbs take it."""

from __future__ import annotations

import hashlib
from typing import Any

from benchmarks.prompts import BLOCK_SIZE
from benchmarks.table import ADAPTER, MEDIA, NUM_MEDIA, PLAIN, SALT
from pagedkv import Adapter, Media


def identities(num_tokens: int) -> dict[str, dict[str, Any]]:
    """Keywords for `open` and `hash_blocks`. Each media item stands in a block of its own."""
    stride = num_tokens // BLOCK_SIZE // NUM_MEDIA * BLOCK_SIZE
    media = [
        Media(start=i * stride, length=BLOCK_SIZE // 2, digest=hashlib.sha256(bytes([i])).digest())
        for i in range(NUM_MEDIA)
    ]
    return {
        PLAIN: {},
        SALT: {"cache_salt": b"tenant-7"},
        ADAPTER: {"extras": [Adapter("adapter-7", hashlib.sha256(b"weights").digest())]},
        MEDIA: {"extras": media},
    }


def within(identity: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Give the same for the first tokens alone: without the items that end behind them."""
    extras = identity.get("extras", [])
    kept = [e for e in extras if not isinstance(e, Media) or e.start + e.length <= num_tokens]
    return {**identity, "extras": kept}
