"""Block digests as other engines compute them, for those who share a store, a router or a dashboard with one.

``pagedkv.schemes.vllm``
    The digests of vLLM, byte for byte; ``cbor`` and ``pickled`` write what it hashes.
"""

from __future__ import annotations

from pagedkv.schemes.vllm import VLLMScheme, event_hash, pool_key

__all__ = ["VLLMScheme", "event_hash", "pool_key"]
