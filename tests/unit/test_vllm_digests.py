"""vLLM's digests, byte for byte; vllm_vectors.json says how they were made."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.errors import UsageError
from pagedkv.extras import AnyExtra
from pagedkv.hashing import Adapter, BlockHash, Embeddings, Extra, Media, hash_blocks, hash_blocks_batch
from pagedkv.schemes import VLLMScheme, cbor, event_hash, pickled, pool_key
from pagedkv.schemes.vllm import VLLMRecipe

VECTORS = json.loads(Path(__file__).with_name("vllm_vectors.json").read_text(encoding="utf-8"))
SETS = {f"{vectors['scheme']}, {vectors['name']}": vectors for vectors in VECTORS["sets"]}
CASES = [(name, case) for name, vectors in SETS.items() for case in vectors["cases"]]

A, B = bytes(32), bytes(range(32))


def scheme_of(vectors: dict[str, Any]) -> VLLMScheme:
    paths = {"adapter-a": "/models/adapter-a"}
    return VLLMScheme(vectors["scheme"], seed=vectors["seed"], recipe=vectors["recipe"], lora_modules=paths)


def hash_case(case: str, scheme: VLLMScheme | str) -> list[BlockHash]:
    inputs = VECTORS["inputs"][case]
    extras = [Adapter(inputs["lora"][0], b"any")] if inputs["lora"] else []
    return hash_blocks(inputs["tokens"], cache_salt=inputs["cache_salt"], extras=extras, scheme=scheme)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_each_vector_is_met_byte_for_byte(name: str, case: str) -> None:
    vectors, expected = SETS[name], SETS[name]["cases"][case]
    digests = hash_case(case, scheme_of(vectors))
    assert [digest.hex() for digest in digests] == expected["digests"]
    if "event_hashes" in expected:
        assert [event_hash(digest) for digest in digests] == expected["event_hashes"]
        assert [pool_key(digest).hex() for digest in digests] == expected["pool_keys"]


@pytest.mark.parametrize("name", SETS)
def test_each_none_hash_is_met_and_may_be_given_in_the_place_of_the_seed(name: str) -> None:
    vectors = SETS[name]
    scheme = scheme_of(vectors)
    assert scheme.root.hex() == vectors["none_hash"]
    given_root = VLLMScheme(vectors["scheme"], none_hash=scheme.root, recipe=vectors["recipe"])
    assert hash_case("plain", given_root) == hash_case("plain", scheme)


@pytest.mark.parametrize(
    ("name", "case"), [c for c in CASES if "first_preimage" in SETS[c[0]]["cases"][c[1]]]
)
def test_what_is_hashed_is_what_vllm_hashes(name: str, case: str) -> None:
    vectors, inputs = SETS[name], VECTORS["inputs"][case]
    salt, lora = inputs["cache_salt"], inputs["lora"]
    keys = [("lora", *lora)] if lora else []
    keys += [("cache_salt", salt)] if salt else []
    value = (bytes.fromhex(vectors["none_hash"]), tuple(inputs["tokens"][:16]), tuple(keys) or None)
    dumps = cbor.dumps if "cbor" in vectors["scheme"] else pickled.dumps
    assert dumps(value).hex() == vectors["cases"][case]["first_preimage"]
    assert dumps(vectors["seed"] or "vllm-none-hash").hex() == vectors["none_hash_preimage"]


def test_a_name_alone_stands_for_vllm_started_without_a_seed() -> None:
    for name in ("sha256-vllm", "sha256-cbor-vllm"):
        expected = SETS[f"{name}, 0.32.0, PYTHONHASHSEED unset"]["cases"]["plain"]["digests"]
        assert [digest.hex() for digest in hash_case("plain", name)] == expected


def test_a_batch_equals_its_prompts_one_by_one() -> None:
    prompts = [range(48), [], range(5), np.arange(100, dtype=np.int16)]
    for scheme in ("sha256-vllm", VLLMScheme("xxhash-cbor-vllm", seed="7")):
        batch = hash_blocks_batch(prompts, cache_salt="s", scheme=scheme)
        assert batch == [hash_blocks(prompt, cache_salt="s", scheme=scheme) for prompt in prompts]
        assert all(isinstance(digest, BlockHash) for chain in batch for digest in chain)


def test_other_processes_compute_the_same_digests_whatever_their_seed() -> None:
    code = "from pagedkv import hash_blocks; print(hash_blocks(range(16), scheme='sha256-vllm')[0].hex())"
    expected = hash_blocks(range(16), scheme="sha256-vllm")[0].hex()
    for seed in ("0", "12345"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        shown = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert shown.stdout.strip() == expected


# Extra keys beyond the vectors


def expect_keys(
    expected: list[Any], extras: list[AnyExtra], recipe: VLLMRecipe = "0.31", salt: str | None = None
) -> None:
    """Hash three blocks by hand with the keys expected of each, and compare."""
    scheme = VLLMScheme("xxhash-cbor-vllm", seed="0", recipe=recipe, lora_modules={"a": "/a"})
    digests = hash_blocks(range(48), cache_salt=salt, extras=extras, scheme=scheme)
    parent = scheme.root
    for i, digest in enumerate(digests):
        parent = xxhash.xxh3_128_digest(cbor.dumps((parent, tuple(range(16 * i, 16 * i + 16)), expected[i])))
        assert digest == parent, i
    assert len(digests) == 3


def test_media_enter_the_blocks_they_touch_with_their_offset() -> None:
    a, b = A.hex(), B.hex()
    extras: list[AnyExtra] = [Media(20, 20, B), Media(3, 2, A)]
    expect_keys([(("mm", a, 3),), (("mm", b, 4),), (("mm", b, -12),)], extras)
    expect_keys([((a, 3),), ((b, 4),), ((b, -12),)], extras, "0.20")
    expect_keys([(a,), (b,), (b,)], extras, "0.12")


def test_keys_stand_in_the_order_adapter_media_salt() -> None:
    extras: list[AnyExtra] = [Media(0, 20, B), Adapter(b"a", b"rev")]
    lora, b, salt = ("lora", "a", "/a"), B.hex(), ("cache_salt", "s")
    expect_keys([(lora, ("mm", b, 0), salt), (lora, ("mm", b, -16)), (lora,)], extras, salt="s")
    expect_keys([("a", (b, 0), "s"), ("a", (b, -16)), ("a",)], extras, "0.20", salt="s")


def test_without_extras_the_keys_are_none() -> None:
    expect_keys([None, None, None], [])
    expect_keys([(("cache_salt", "s"),), None, None], [], salt="s")


def test_an_item_behind_a_longer_one_that_it_overlaps_is_lost_as_in_vllm() -> None:
    expect_keys([(("mm", A.hex(), 0),), None, None], [Media(0, 40, A), Media(5, 5, B)])


def test_a_tag_that_comes_twice_in_a_block_is_one_object_to_pickle() -> None:
    tag = "mm"
    scheme = VLLMScheme("sha256-vllm", seed="0")
    value = (scheme.root, tuple(range(16)), ((tag, A.hex(), 1), (tag, B.hex(), 2)))
    expected = sha256(pickle.dumps(value, protocol=5)).digest()
    assert hash_blocks(range(16), extras=[Media(2, 1, B), Media(1, 1, A)], scheme=scheme) == [expected]
    assert pickled.dumps(value) != pickle.dumps(
        value, protocol=5
    )  # which takes strings for objects of their own


# What can't be expressed is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extras": [Embeddings([1], A)]}, "extras: expected at most one Adapter, and Media"),
        ({"extras": [Extra(128, b"")]}, "extras: expected at most one Adapter, and Media"),
        ({"extras": [Adapter("a", b"1"), Adapter("a", b"1")]}, "extras: expected at most one Adapter"),
        ({"extras": [Adapter("b", b"1")]}, "VLLMScheme.lora_modules: expected the path of 'b', got none"),
        ({"extras": [Adapter(b"\xff", b"1")]}, "Adapter.id: expected text"),
        ({"extras": [Media(40, 9, A)]}, "extras[0]: expected to end within the 48 tokens"),
        ({"cache_salt": b"\xff"}, "cache_salt: expected text"),
        ({"cache_salt": ""}, "cache_salt: expected 1 to 128 bytes"),
        ({"cache_salt": "s", "salt_from": 16}, "salt_from: expected the first block"),
        ({"namespace": b"m"}, "namespace: expected none"),
    ],
)
def test_what_vllm_has_no_place_for_is_refused(options: dict[str, Any], message: str) -> None:
    scheme = VLLMScheme("sha256-vllm", lora_modules={"a": "/a"})
    with pytest.raises(UsageError) as refused:
        hash_blocks(range(48), scheme=scheme, **options)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "md5"}, "VLLMScheme.name: expected one of sha256-vllm"),
        ({"name": []}, "VLLMScheme.name: expected one of sha256-vllm"),
        ({"recipe": "0.13"}, "VLLMScheme.recipe: expected one of 0.31, 0.20, 0.12"),
        ({"seed": 0}, "VLLMScheme.seed: expected the text of PYTHONHASHSEED"),
        ({"name": "xxhash-vllm"}, "VLLMScheme.seed: expected the text of PYTHONHASHSEED"),
        ({"none_hash": bytes(16)}, "VLLMScheme.none_hash: expected 32 bytes"),
        ({"none_hash": bytes(32), "seed": "0"}, "VLLMScheme: expected a seed or a none_hash"),
        ({"lora_modules": ["a"]}, "VLLMScheme.lora_modules: expected a mapping"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        VLLMScheme(**options)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_bad_token_is_refused_with_its_index(token: int) -> None:
    for tokens in ([1, token], np.array([1, token])):
        with pytest.raises(UsageError, match=f"token_ids: .* got {token}, at index 1"):
            hash_blocks(tokens, scheme="sha256-vllm")


# Numbers of events


@given(st.binary(min_size=8, max_size=32))
def test_a_signed_and_an_unsigned_reader_of_an_event_see_one_identity(digest: bytes) -> None:
    number = event_hash(digest)
    assert 0 <= number < 2**64
    (signed,) = struct.unpack("<q", struct.pack("<Q", number))
    assert signed % 2**64 == number
    assert number.to_bytes(8, "big") == digest[-8:]


def test_event_hashes_tell_salts_apart() -> None:
    salts = [None, "s", "t"]
    chains = [hash_blocks(range(48), cache_salt=salt, scheme="sha256-cbor-vllm") for salt in salts]
    assert len({event_hash(digest) for chain in chains for digest in chain}) == 9
