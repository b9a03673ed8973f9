"""The names of blocks: digest format 1.

::

    root    = SHA256("pagedkv.block.v1" ‖ u32le(block_size) ‖ u32le(len(namespace)) ‖ namespace)
    digest₀ = SHA256(root    ‖ block_size × u32le(token) ‖ extras₀)
    digestᵢ = SHA256(digestᵢ₋₁ ‖ block_size × u32le(token) ‖ extrasᵢ)

Nothing of the process enters, so every process, machine and version gives the same digests.
:mod:`pagedkv.extras` has the encoding of extras; :func:`reference_hash_blocks` is all of it in 30 lines.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

from pagedkv import _core
from pagedkv.checks import check_bytes, check_int, check_iterable, show
from pagedkv.errors import UsageError
from pagedkv.extras import (
    Adapter,
    AnyExtra,
    BlockExtras,
    Embeddings,
    Extra,
    Media,
    encode_extras,
)
from pagedkv.spec import MAX_BLOCK_SIZE
from pagedkv.tokens import as_tokens

__all__ = [
    "DIGEST_FORMAT",
    "Adapter",
    "BlockExtras",
    "BlockHash",
    "Embeddings",
    "Extra",
    "Media",
    "as_tokens",
    "encode_extras",
    "hash_blocks",
    "hash_blocks_batch",
    "reference_hash_blocks",
]

DIGEST_FORMAT = 1


class BlockHash(bytes):
    """The 32 bytes that name a block and, through its parent, all that precedes it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"BlockHash({self.hex()[:8]}…)"


def hash_blocks(
    token_ids: Any,
    *,
    block_size: int = 16,
    namespace: bytes = b"",
    cache_salt: str | bytes | None = None,
    extras: Iterable[AnyExtra] | None = (),
    scheme: str = "sha256",
) -> list[BlockHash]:
    """Name every whole block of a prompt.

    Parameters
    ----------
    token_ids : array or iterable of int
        Of any integer type, each from 0 to 2³² − 1; equal values give equal digests whatever the type.
    block_size : int
        Tokens in a block.
    namespace : bytes
        What all the KV depends on: model and revision, dtype, layout, quantisation.
    cache_salt : str or bytes, optional
        1 to 128 bytes; text counts as its UTF-8 bytes. Prompts with different salts share no digest.
    extras : iterable of Adapter, Media, Embeddings, Extra
        What else the KV depends on. None means none.
    scheme : str
        "sha256".

    Returns
    -------
    list of BlockHash, [num_tokens // block_size]
        Empty for fewer than `block_size` tokens. A longer prompt only adds to the list of a shorter one.

    Raises
    ------
    UsageError
        For a bad argument, naming the token and its index where it is one of those.
    """
    block_size = _check_options(block_size, namespace, scheme)
    tokens = as_tokens(token_ids)
    encoded = encode_extras(len(tokens), block_size, cache_salt, extras)
    digests = _core.hash_blocks(tokens, block_size, namespace, encoded.block_indices, encoded.payloads)
    return list(map(BlockHash, digests))


def hash_blocks_batch(
    prompts: Iterable[Any],
    *,
    block_size: int = 16,
    namespace: bytes = b"",
    cache_salt: str | bytes | None = None,
    extras: Iterable[AnyExtra] | None = (),
    scheme: str = "sha256",
) -> list[list[BlockHash]]:
    """:func:`hash_blocks` for many prompts with the same options, in one call of the core.

    Messages name the prompt by its index: ``prompts[2]``.
    """
    block_size = _check_options(block_size, namespace, scheme)
    extras = list(check_iterable("extras", () if extras is None else extras))
    tokens = [as_tokens(p, f"prompts[{i}]") for i, p in enumerate(check_iterable("prompts", prompts))]
    encoded = [encode_extras(len(t), block_size, cache_salt, extras) for t in tokens]
    indices = [e.block_indices for e in encoded]
    digests = _core.hash_blocks_batch(tokens, block_size, namespace, indices, [e.payloads for e in encoded])
    return [list(map(BlockHash, chain)) for chain in digests]


def reference_hash_blocks(
    token_ids: Sequence[int],
    *,
    block_size: int = 16,
    namespace: bytes = b"",
    cache_salt: str | bytes | None = None,
    extras: Iterable[AnyExtra] | None = (),
) -> list[BlockHash]:
    """Digest format 1 as it is published: what :func:`hash_blocks` gives, without its checks."""

    def u32(number: int) -> bytes:
        return struct.pack("<I", number)

    def utf8(text: str | bytes) -> bytes:
        return text.encode() if isinstance(text, str) else text

    extras = list(extras or ())
    parent = sha256(b"pagedkv.block.v1" + u32(block_size) + u32(len(namespace)) + namespace).digest()
    hashes: list[BlockHash] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        end = start + block_size
        entries: list[tuple[int, bytes]] = []
        if start == 0 and cache_salt is not None:
            entries.append((1, utf8(cache_salt)))
        for extra in extras:
            if isinstance(extra, Adapter) and start == 0:
                entries.append((2, u32(len(utf8(extra.id))) + utf8(extra.id) + extra.revision))
            elif isinstance(extra, Media) and extra.start < end and start < extra.start + extra.length:
                entries.append((3, struct.pack("<i", extra.start - start) + extra.digest))
            elif isinstance(extra, Embeddings) and any(start <= p < end for p in extra.positions):
                inside = [p - start for p in sorted(extra.positions) if start <= p < end]
                entries.append((4, struct.pack(f"<{1 + len(inside)}H", len(inside), *inside) + extra.digest))
            elif isinstance(extra, Extra) and start == 0:
                entries.append((extra.tag, extra.payload))
        encoded = b"".join(bytes([tag]) + u32(len(body)) + body for tag, body in sorted(entries))
        tokens = b"".join(map(u32, token_ids[start:end]))
        parent = sha256(parent + tokens + encoded).digest()
        hashes.append(BlockHash(parent))
    return hashes


def _check_options(block_size: int, namespace: bytes, scheme: str) -> int:
    check_bytes("namespace", namespace, 0, 2**32 - 1)
    if scheme != "sha256":
        raise UsageError(f"scheme: expected 'sha256', got {show(scheme)}")
    return check_int("block_size", block_size, 1, MAX_BLOCK_SIZE)
