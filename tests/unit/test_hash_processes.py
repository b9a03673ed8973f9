"""Digests that caches elsewhere got wrong: across processes, by token width, media, adapter and salt."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from hashlib import sha256

import numpy as np
import pytest

from pagedkv.errors import UsageError
from pagedkv.hashing import Adapter, Media, hash_blocks

PRINT_CHAINS = """
import json
from pagedkv.hashing import Adapter, hash_blocks

options = [{}, {"extras": [Adapter("a", b"1")]}, {"cache_salt": "s"}]
options += [{"extras": None}, {"extras": ()}, {"extras": []}]
print(json.dumps([[h.hex() for h in hash_blocks(range(48), **o)] for o in options]))
"""
SHUFFLED_IMPORTS = "import decimal, sqlite3, asyncio, unittest.mock, numpy.random\n"


def test_processes_with_different_hash_seeds_print_the_same_chains() -> None:
    seeds_and_code = [
        (None, PRINT_CHAINS),
        ("0", PRINT_CHAINS),
        ("12345", PRINT_CHAINS),
        (None, SHUFFLED_IMPORTS + PRINT_CHAINS),
    ]
    children = []
    for seed, code in seeds_and_code:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        env |= {} if seed is None else {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        children.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE))
    outputs = [child.communicate(timeout=60)[0] for child in children]

    assert [child.returncode for child in children] == [0, 0, 0, 0]
    assert len(set(outputs)) == 1
    plain, adapter, salt, *no_extras = json.loads(outputs[0])
    assert no_extras == [plain] * 3
    assert len({*plain, *adapter, *salt}) == 9
    assert [bytes.fromhex(h) for h in plain] == hash_blocks(range(48))
    assert plain[2] == "74562b5701642701fed483b4842a7eeaad902834d1f396a1539f014ba1af7681"


def test_token_ids_that_agree_in_their_low_bits_do_not_alias() -> None:
    ids = [65, 321, 65 + 65536, 2**32 - 1]
    digests = [hash_blocks([token] * 16)[0] for token in ids]
    assert len(set(digests)) == 4
    assert hash_blocks(np.full(16, 65, np.int32)) == hash_blocks(np.full(16, 65, np.int64)) == digests[:1]
    for token in (65 + 2**32, -1, 2**63):
        with pytest.raises(UsageError, match=f"got {token}, at index 0"):
            hash_blocks([token] * 16)


def test_media_that_differ_early_in_their_digest_do_not_alias() -> None:
    prompt = [1, 2, 3, 4, *[151655] * 40, 5, 6, 7, 8]

    def hashes(digest: bytes) -> list[bytes]:
        return list(hash_blocks(prompt, extras=[Media(4, 40, digest)]))

    one, other = bytes.fromhex("0" * 60 + "abcd"), bytes.fromhex("1" * 60 + "abcd")
    assert not set(hashes(one)) & set(hashes(other))
    assert hashes(one) == hashes(one)
    rng = random.Random(5)
    assert len({hashes(rng.randbytes(32))[0] for _ in range(1000)}) == 1000


def test_base_and_adapters_share_no_digest() -> None:
    def hashes(*adapters: Adapter) -> list[bytes]:
        return list(hash_blocks(range(32), extras=adapters))

    weights1, weights2 = sha256(b"w1").digest(), sha256(b"w2").digest()
    chains = [hashes(), hashes(Adapter("sql", weights1)), hashes(Adapter("sql", weights2))]
    chains.append(hashes(Adapter("chat", weights1)))
    assert len({digest for chain in chains for digest in chain}) == 8
    assert hashes(Adapter("sql", weights1)) == chains[1]


def test_a_salt_enters_the_first_block_alone_and_separates_all() -> None:
    chains = {salt: hash_blocks(range(48), cache_salt=salt) for salt in ("s1", "s2", None)}
    assert len({digest for chain in chains.values() for digest in chain}) == 9
    assert hash_blocks(range(48), cache_salt=b"s1") == chains["s1"]
    tokens = np.arange(48, dtype="<u4").tobytes()
    for chain in chains.values():
        assert chain[1] == sha256(chain[0] + tokens[64:128]).digest()
        assert chain[2] == sha256(chain[1] + tokens[128:]).digest()


@pytest.mark.parametrize("salt", ["/", "a@b", "\\", "\0", "..", "a" * 128, b"\xff", "é" * 64])
def test_a_salt_may_hold_any_character(salt: str | bytes) -> None:
    assert hash_blocks(range(16), cache_salt=salt) != hash_blocks(range(16))


@pytest.mark.parametrize("salt", ["", b"", "a" * 129, "é" * 65, 7, {"a": 1}, True, bytearray(b"s"), "\ud800"])
def test_a_bad_salt_is_an_error_and_not_no_salt(salt: object) -> None:
    with pytest.raises(UsageError, match=r"^cache_salt: expected .* got "):
        hash_blocks(range(16), cache_salt=salt)  # type: ignore[arg-type]
    assert len(hash_blocks(range(16))) == 1
