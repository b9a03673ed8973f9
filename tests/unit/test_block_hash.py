"""BlockHash: bytes in every way, with a short repr."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from typing import Any

import numpy as np
import pytest

import pagedkv
from pagedkv import BlockHash, BlockPool, hash_blocks, hash_blocks_batch

PROMPT = np.arange(3200, dtype=np.int32)


def test_the_core_gives_objects_of_the_public_class() -> None:
    pool = BlockPool(8, events=True)
    with pool.open(range(32)) as seq:
        pool.commit(pool.reserve(seq, 32))
        (stored,) = pool.take_events()
        digests = [*seq.block_hashes, pool.digest_of(int(seq.block_ids[0])), *stored.block_hashes]  # type: ignore[union-attr]
    digests += hash_blocks(range(32)) + hash_blocks_batch([range(32)])[0]
    digests += hash_blocks(range(32), scheme="xxh3-128") + hash_blocks(range(32), scheme="sha256-vllm")
    assert {type(digest) for digest in digests} == {BlockHash} == {pagedkv.hashing.BlockHash}


def test_it_equals_and_hashes_as_the_same_bytes_do() -> None:
    for digest in hash_blocks(range(48)):
        plain = bytes(digest)
        assert type(plain) is bytes
        assert digest == plain
        assert plain == digest
        assert hash(digest) == hash(plain)
        assert {plain: 1}[digest] == 1
        assert digest[:4] + digest[4:] == plain
        assert memoryview(digest).tobytes() == plain
        assert digest < plain + b"\0"


@pytest.mark.parametrize("value", [b"", b"\x01", b"\xab\xcd\xef\x12\x34", bytes(32), bytes(300)])
def test_it_is_made_of_any_bytes_and_shows_the_first_four(value: bytes) -> None:
    assert BlockHash(value) == value
    assert repr(BlockHash(value)) == f"BlockHash({value.hex()[:8]}…)"
    assert BlockHash(list(value)) == BlockHash(bytearray(value)) == value
    assert BlockHash.fromhex(value.hex()) == value


def test_what_bytes_refuse_it_refuses() -> None:
    for bad in (1.5, [256], "text", None):
        with pytest.raises((TypeError, ValueError)):
            BlockHash(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_and_copied_it_is_the_same(protocol: int) -> None:
    for digest in hash_blocks(range(32)):
        for other in (
            pickle.loads(pickle.dumps(digest, protocol)),
            copy.copy(digest),
            copy.deepcopy(digest),
        ):
            assert type(other) is BlockHash
            assert other == digest


class Named(BlockHash):
    """A user's own class, whose objects have attributes."""


class Slotted(BlockHash):
    __slots__ = ()


def test_a_class_of_the_users_own_may_build_on_it() -> None:
    for kind in (Named, Slotted):
        references = sys.getrefcount(kind)
        for _ in range(3000):
            digest = kind(bytes(32))
            assert isinstance(digest, BlockHash)
            assert digest == bytes(32)
        del digest
        assert sys.getrefcount(kind) == references

    class Owner:
        """What goes when the digest does."""

    named, owner = Named(b"x" * 32), Owner()
    named.owner, named.itself = owner, named  # type: ignore[attr-defined]
    there = weakref.ref(owner)
    del named, owner
    gc.collect()
    assert there() is None


def test_objects_that_were_given_back_come_back_as_new() -> None:
    expected = [bytes(digest) for digest in hash_blocks(PROMPT)]
    references = sys.getrefcount(BlockHash)
    for num_kept in (0, 1, 100, 200) * 5:
        kept = [hash_blocks(PROMPT) for _ in range(10)]
        hashes = [hash(digest) for digest in kept[0]]
        again = [digest for digests in kept for digest in digests[num_kept:]]
        del kept
        for digests in (hash_blocks(PROMPT), hash_blocks(PROMPT)):
            assert digests == expected
            assert [hash(digest) for digest in digests] == hashes
        assert again == expected[num_kept:] * 10
        del digests, again
    assert sys.getrefcount(BlockHash) == references


def test_digests_of_two_lengths_do_not_mix() -> None:
    for _ in range(3):
        long, short = hash_blocks(PROMPT), hash_blocks(PROMPT, scheme="xxh3-128")
        assert ({len(d) for d in long}, {len(d) for d in short}) == ({32}, {16})
        del short, long


def test_the_class_has_no_room_for_attributes() -> None:
    digest: Any = BlockHash(bytes(32))
    with pytest.raises(AttributeError):
        digest.owner = 1
