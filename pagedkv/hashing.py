"""The names of blocks: digest format 1, and the schemes of others.

::

    root    = SHA256("pagedkv.block.v1" ‖ u32le(block_size) ‖ u32le(len(namespace)) ‖ namespace)
    digest₀ = SHA256(root    ‖ block_size × u32le(token) ‖ extras₀)
    digestᵢ = SHA256(digestᵢ₋₁ ‖ block_size × u32le(token) ‖ extrasᵢ)

Nothing of the process enters, so every process, machine and version gives the same digests.
:mod:`pagedkv.extras` has the encoding of extras; :func:`reference_hash_blocks` is all of it in 30 lines.

====================  =========  ===================================================================
scheme                digest     what for
====================  =========  ===================================================================
sha256                32 bytes   format 1: whatever must not be mixed up, such as tiers and stores
xxh3-128              16 bytes   the same chain with XXH3-128: events and comparison, never as proof
sha256-vllm           32 bytes   equal to vLLM's, by default those of ``sha256``
sha256-cbor-vllm      32 bytes   … of ``sha256_cbor``
xxhash-vllm           16 bytes   … of ``xxhash``; a :class:`VLLMScheme` has to give the seed
xxhash-cbor-vllm      16 bytes   … of ``xxhash_cbor``, likewise
====================  =========  ===================================================================

vLLM's know no namespace, no `salt_from`, no embeddings by content and no extras of the user's own: those are
refused, not left out. They don't tell an adapter's revisions apart, whatever `Adapter.revision` says.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from typing import Any, NamedTuple

from pagedkv import _core
from pagedkv._core import BlockHash
from pagedkv.checks import check_bytes, check_int, check_iterable, check_ordered, show
from pagedkv.errors import UsageError
from pagedkv.extras import (
    Adapter,
    AnyExtra,
    BlockExtras,
    Embeddings,
    Extra,
    Media,
    check_salt_from,
)
from pagedkv.schemes.vllm import VLLM_SCHEMES, VLLMScheme
from pagedkv.spec import MAX_BLOCK_SIZE
from pagedkv.tokens import as_tokens, token_list

__all__ = [
    "DIGEST_FORMAT",
    "Adapter",
    "BlockExtras",
    "BlockHash",
    "Embeddings",
    "Extra",
    "Media",
    "VLLMScheme",
    "as_tokens",
    "encode_extras",
    "hash_blocks",
    "hash_blocks_batch",
    "reference_hash_blocks",
]

DIGEST_FORMAT = 1


def hash_blocks(
    token_ids: Any,
    *,
    block_size: int = 16,
    namespace: bytes = b"",
    cache_salt: str | bytes | None = None,
    salt_from: int | None = None,
    extras: Iterable[AnyExtra] | None = (),
    scheme: str | VLLMScheme = "sha256",
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
    salt_from : int, optional
        Let the salt enter at the block of this position, so that what precedes is shared by all.
    extras : iterable of Adapter, Media, Embeddings, Extra
        What else the KV depends on. None means none.
    scheme : str or VLLMScheme
        One of the table above; an object gives one of vLLM's with the parameters of a deployment.

    Returns
    -------
    list of BlockHash, [num_tokens // block_size]
        Empty for fewer than `block_size` tokens. A longer prompt only adds to the list of a shorter one.

    Raises
    ------
    UsageError
        For a bad argument, naming the token and its index where it is one of those, and for anything that
        the scheme can't express.
    """
    block_size = _check_options(block_size, namespace)
    resolved = _resolve(scheme)
    if isinstance(resolved, VLLMScheme):
        _check_vllm_options(resolved.name, block_size, namespace, check_salt_from(salt_from, cache_salt))
        digests = resolved.hash_blocks(
            token_list(token_ids), block_size, cache_salt=cache_salt, extras=extras
        )
        return list(map(BlockHash, digests))
    return resolved.one(token_ids, block_size, namespace, cache_salt, salt_from, extras)


def hash_blocks_batch(
    prompts: Iterable[Any],
    *,
    block_size: int = 16,
    namespace: bytes = b"",
    cache_salt: str | bytes | None = None,
    salt_from: int | None = None,
    extras: Iterable[AnyExtra] | None = (),
    scheme: str | VLLMScheme = "sha256",
) -> list[list[BlockHash]]:
    """:func:`hash_blocks` for many prompts with the same options, in one call of the core.

    It hashes two prompts interleaved where the processor gains by it. Messages name the prompt by its index:
    ``prompts[2]``.
    """
    block_size = _check_options(block_size, namespace)
    resolved = _resolve(scheme)
    extras = list(check_iterable("extras", () if extras is None else extras))
    prompts = list(check_ordered("prompts", prompts))
    if isinstance(resolved, VLLMScheme):
        _check_vllm_options(resolved.name, block_size, namespace, check_salt_from(salt_from, cache_salt))
        lists = [token_list(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]
        chains = (resolved.hash_blocks(t, block_size, cache_salt=cache_salt, extras=extras) for t in lists)
        return [list(map(BlockHash, chain)) for chain in chains]
    return resolved.batch(prompts, block_size, namespace, cache_salt, salt_from, extras)


def encode_extras(
    num_tokens: int,
    block_size: int,
    cache_salt: str | bytes | None = None,
    extras: Iterable[AnyExtra] | None = (),
    *,
    salt_from: int | None = None,
) -> BlockExtras:
    """Encode the extras of a prompt, block by block; a partly filled last block counts as one.

    Raises
    ------
    UsageError
        For an empty, too long or otherwise bad salt, a `salt_from` without a salt, something that is no
        extra, or an item that reaches beyond `num_tokens`.
    """
    return BlockExtras(*_core.encode_extras(num_tokens, block_size, cache_salt, salt_from, extras))


def reference_hash_blocks(
    token_ids: Sequence[int],
    *,
    block_size: int = 16,
    namespace: bytes = b"",
    cache_salt: str | bytes | None = None,
    salt_from: int | None = None,
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
        if start <= (salt_from or 0) < end and cache_salt is not None:
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


class _CoreScheme(NamedTuple):
    one: Callable[..., list[BlockHash]]
    batch: Callable[..., list[list[BlockHash]]]


_CORE_SCHEMES = {
    "sha256": _CoreScheme(_core.hash_blocks, _core.hash_blocks_batch),
    "xxh3-128": _CoreScheme(_core.hash_blocks_xxh3, _core.hash_blocks_batch_xxh3),
}


def _check_options(block_size: int, namespace: bytes) -> int:
    check_bytes("namespace", namespace, 0, 2**32 - 1)
    return check_int("block_size", block_size, 1, MAX_BLOCK_SIZE)


_are_broken: ContextVar[bool] = ContextVar("pagedkv digests are broken", default=False)


def digests_are_broken() -> bool:
    """Whether this is inside :func:`pagedkv.testing.broken_hashes`."""
    return _are_broken.get()


@contextmanager
def broken_digests() -> Iterator[None]:
    """Give every block one and the same digest; see :func:`pagedkv.testing.broken_hashes`."""
    before = _are_broken.set(True)
    try:
        yield
    finally:
        _are_broken.reset(before)


def _broken(scheme: _CoreScheme) -> _CoreScheme:
    def zeros(digests: list[BlockHash]) -> list[BlockHash]:
        return [BlockHash(len(digest)) for digest in digests]

    return _CoreScheme(
        lambda *arguments: zeros(scheme.one(*arguments)),
        lambda *arguments: list(map(zeros, scheme.batch(*arguments))),
    )


def _resolve(scheme: str | VLLMScheme) -> _CoreScheme | VLLMScheme:
    resolved = _named(scheme)
    if not _are_broken.get():
        return resolved
    return _broken(resolved if isinstance(resolved, _CoreScheme) else _CORE_SCHEMES["sha256"])


def _named(scheme: str | VLLMScheme) -> _CoreScheme | VLLMScheme:
    if isinstance(scheme, VLLMScheme):
        return scheme
    if isinstance(scheme, str) and scheme in _CORE_SCHEMES:
        return _CORE_SCHEMES[scheme]
    for name in VLLM_SCHEMES:
        if isinstance(scheme, str) and scheme == name:  # an array would compare its elements
            return VLLMScheme(name)
    names = ", ".join((*_CORE_SCHEMES, *VLLM_SCHEMES))
    raise UsageError(f"scheme: expected one of {names}, or a VLLMScheme, got {show(scheme)}")


def _check_vllm_options(scheme: str, block_size: int, namespace: bytes, salt_from: int) -> None:
    if namespace:
        raise UsageError(f"namespace: expected none for the scheme '{scheme}', got {show(namespace)}")
    if salt_from >= block_size:
        raise UsageError(f"salt_from: expected the first block for the scheme '{scheme}', got {salt_from}")
