"""The scheme "xxh3-128": format 1's chain with XXH3-128 in the place of SHA-256."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.hashing import (
    Adapter,
    BlockHash,
    Embeddings,
    Extra,
    Media,
    encode_extras,
    hash_blocks,
    hash_blocks_batch,
)

A = bytes(32)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=100)


def reference(token_ids: list[int], block_size: int, namespace: bytes, **what: Any) -> list[bytes]:
    """The definition, with the reference implementation of XXH3."""
    extras = encode_extras(len(token_ids), block_size, **what)
    payloads = dict(zip(extras.block_indices, extras.payloads, strict=True))
    head = b"pagedkv.block.v1" + struct.pack("<II", block_size, len(namespace)) + namespace
    digests = [xxhash.xxh3_128_digest(head)]
    for i in range(len(token_ids) // block_size):
        block = struct.pack(f"<{block_size}I", *token_ids[i * block_size : (i + 1) * block_size])
        digests.append(xxhash.xxh3_128_digest(digests[-1] + block + payloads.get(i, b"")))
    return digests[1:]


@given(
    tokens,
    st.sampled_from([1, 3, 16, 100]),
    st.binary(max_size=300),
    st.none() | st.text(min_size=1, max_size=30),
)
def test_it_equals_its_definition(ids: list[int], size: int, namespace: bytes, salt: str | None) -> None:
    extras: list[Any] = [Adapter("a", b"1"), Extra(200, b"x" * 300)]
    if len(ids) > 20:
        extras += [Media(3, 15, A), Embeddings([1, 20], A)]
    what: dict[str, Any] = {"cache_salt": salt, "extras": extras, "salt_from": 17 if salt else None}
    digests = hash_blocks(ids, block_size=size, namespace=namespace, scheme="xxh3-128", **what)
    assert digests == reference(ids, size, namespace, **what)


@given(st.lists(tokens, max_size=4))
def test_a_batch_equals_its_prompts_one_by_one(prompts: list[list[int]]) -> None:
    batch = hash_blocks_batch(prompts, scheme="xxh3-128", cache_salt="s")
    assert batch == [hash_blocks(prompt, scheme="xxh3-128", cache_salt="s") for prompt in prompts]


def test_these_digests_stand() -> None:
    digests = hash_blocks(np.arange(40), scheme="xxh3-128")
    assert [digest.hex() for digest in digests] == [
        "c11942e2cfeb85123f9c9e15a0d392d9",
        "2e4d6a0af07ef0d24cebe65ce2e731fa",
    ]
    assert all(isinstance(digest, BlockHash) and len(digest) == 16 for digest in digests)
