"""Digest format 1: what its digests promise, whatever the tokens, salt, extras and block size."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hashed_prompts import A, B, Prompt, meaning, prompts
from hypothesis import assume, given
from hypothesis import strategies as st

from pagedkv.errors import UsageError
from pagedkv.hashing import (
    Adapter,
    Embeddings,
    Extra,
    Media,
    encode_extras,
    hash_blocks,
    hash_blocks_batch,
    reference_hash_blocks,
)

any_token = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**31, 2**32 - 1])
any_prompt = prompts(any_token)


# What a digest is


@given(any_prompt)
def test_the_core_equals_the_published_definition(prompt: Prompt) -> None:
    assert prompt.hashes() == reference_hash_blocks(prompt.token_ids, **prompt.options)


@given(st.lists(st.lists(any_token, max_size=70), max_size=5), st.none() | st.just("salt"))
def test_a_batch_equals_its_prompts_one_by_one(token_lists: list[list[int]], salt: str | None) -> None:
    extras = [Extra(200, b"x")]
    batch = hash_blocks_batch(token_lists, namespace=b"m", cache_salt=salt, extras=iter(extras))
    assert batch == [hash_blocks(t, namespace=b"m", cache_salt=salt, extras=extras) for t in token_lists]


any_prompts = st.lists(prompts(any_token, max_blocks=8), max_size=5)


@given(any_prompts, any_prompt)
def test_a_batch_with_extras_equals_its_prompts_one_by_one(batch: list[Prompt], common: Prompt) -> None:
    longest = max((len(p.token_ids) for p in batch), default=0)
    fits = len(common.token_ids) <= min((len(p.token_ids) for p in batch), default=0)
    options = common.options if fits else replace(common, extras=()).options
    tokens = [p.token_ids for p in batch]
    assert hash_blocks_batch(tokens, **options) == [hash_blocks(t, **options) for t in tokens]
    for block_size in (16, longest + 1):
        plain = {**options, "block_size": block_size}
        assert hash_blocks_batch(tokens, **plain) == [reference_hash_blocks(t, **plain) for t in tokens]


def test_a_block_with_every_extra_hashes_its_preimage_as_written_down_here() -> None:
    extras = [
        Extra(255, b""),
        Embeddings([17, 30, 3], A),
        Media(13, 6, B),
        Extra(128, b"own"),
        Adapter("sql", b"rev1"),
    ]
    root = sha256(b"pagedkv.block.v1" + b"\x10\0\0\0" + b"\x05\0\0\0" + b"model").digest()
    first = sha256(
        root
        + struct.pack("<16I", *range(16))
        + b"\x01\x02\0\0\0" + "é".encode()
        + b"\x02\x0b\0\0\0" + b"\x03\0\0\0sql" + b"rev1"
        + b"\x03\x24\0\0\0" + b"\x0d\0\0\0" + B
        + b"\x04\x24\0\0\0" + b"\x01\0\x03\0" + A
        + b"\x80\x03\0\0\0" + b"own"
        + b"\xff\0\0\0\0"
    ).digest()  # fmt: skip
    second = sha256(
        first
        + struct.pack("<16I", *range(16, 32))
        + b"\x03\x24\0\0\0" + b"\xfd\xff\xff\xff" + B
        + b"\x04\x26\0\0\0" + b"\x02\0\x01\0\x0e\0" + A
    ).digest()  # fmt: skip
    third = sha256(second + struct.pack("<16I", *range(32, 48))).digest()
    assert hash_blocks(range(50), namespace=b"model", cache_salt="é", extras=extras) == [first, second, third]


@pytest.mark.parametrize("block_size", [1, 15, 16, 17, 100, 117, 118, 119, 300])
def test_extras_of_any_length_are_hashed_as_the_definition_says(block_size: int) -> None:
    tokens = range(2 * block_size)
    for num_bytes in (*range(140), *range(380, 520)):  # around every end of a block of SHA-256
        what: dict[str, Any] = {"block_size": block_size, "extras": [Extra(200, bytes(num_bytes))]}
        assert hash_blocks(tokens, **what) == reference_hash_blocks(tokens, **what)


def test_only_whole_blocks_have_a_digest() -> None:
    assert hash_blocks([]) == hash_blocks(range(15)) == hash_blocks((), cache_salt="s") == []
    assert [len(hash_blocks(range(n))) for n in (16, 31, 32, 33)] == [1, 1, 2, 2]
    assert hash_blocks_batch([]) == []
    assert hash_blocks_batch([[], range(16)]) == [[], hash_blocks(range(16))]


def test_a_block_hash_is_bytes_with_a_short_repr() -> None:
    (digest,) = hash_blocks(range(16))
    assert isinstance(digest, bytes)
    assert len(digest) == 32
    assert {digest: 1}[bytes(digest)] == 1
    assert repr(digest) == f"BlockHash({digest.hex()[:8]}…)"


# What it depends on


@given(any_prompt, st.data())
def test_a_longer_prompt_only_adds_digests(prompt: Prompt, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(prompt.token_ids)))
    ends = {Media: lambda e: e.start + e.length, Embeddings: lambda e: e.positions[-1] + 1}
    fits = tuple(e for e in prompt.extras if ends.get(type(e), lambda _: 0)(e) <= cut)
    whole = replace(prompt, extras=fits).hashes()
    part = replace(prompt, token_ids=prompt.token_ids[:cut], extras=fits).hashes()
    assert part == whole[: cut // prompt.block_size]


@given(any_prompt, st.data())
def test_a_changed_token_changes_its_block_and_all_that_follow_and_none_before(
    prompt: Prompt, data: st.DataObject
) -> None:
    i = data.draw(st.integers(0, len(prompt.token_ids) - 1))
    token = data.draw(any_token.filter(lambda t: t != prompt.token_ids[i]))
    tokens = (*prompt.token_ids[:i], token, *prompt.token_ids[i + 1 :])
    equal = [a == b for a, b in zip(prompt.hashes(), replace(prompt, token_ids=tokens).hashes(), strict=True)]
    assert equal == [block < i // prompt.block_size for block in range(len(equal))]


few_prompts = prompts(st.integers(0, 1), max_blocks=2, few=True)


@given(few_prompts, few_prompts)
def test_two_prompts_have_equal_digests_exactly_when_they_mean_the_same(one: Prompt, other: Prompt) -> None:
    assert (one.hashes() == other.hashes()) == (meaning(one) == meaning(other))
    assert (one.hashes()[-1] == other.hashes()[-1]) == (meaning(one) == meaning(other))


@given(few_prompts, st.data())
def test_changing_one_option_changes_the_digests_exactly_when_it_changes_the_meaning(
    prompt: Prompt, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["block_size", "namespace", "cache_salt", "extras", "token_ids"]))
    other = data.draw(few_prompts)
    assume(name != "extras" or len(other.token_ids) <= len(prompt.token_ids))
    assume(name != "token_ids" or len(other.token_ids) >= len(prompt.token_ids))
    changed = replace(prompt, **{name: getattr(other, name)})
    assume(changed.cache_salt is not None or changed.salt_from is None)
    assume(len(changed.token_ids) >= changed.block_size)
    assert (prompt.hashes()[-1] == changed.hashes()[-1]) == (meaning(prompt) == meaning(changed))


@pytest.mark.parametrize(
    ("one", "other", "first_changed"),
    [
        ({}, {"namespace": b"m"}, 0),
        ({"namespace": b"m"}, {"namespace": b"m\0"}, 0),
        ({}, {"cache_salt": "s"}, 0),
        ({"cache_salt": "s"}, {"cache_salt": "t"}, 0),
        ({"cache_salt": "\u00e9"}, {"cache_salt": "e\u0301"}, 0),
        ({"cache_salt": b"own"}, {"extras": [Extra(128, b"own")]}, 0),
        ({}, {"extras": [Extra(128, b"")]}, 0),
        ({"extras": [Extra(128, b"a")]}, {"extras": [Extra(129, b"a")]}, 0),
        ({"extras": [Extra(128, b"ab")]}, {"extras": [Extra(128, b"a"), Extra(128, b"b")]}, 0),
        ({"extras": [Extra(128, b"a")]}, {"extras": [Extra(128, b"a"), Extra(128, b"a")]}, 0),
        ({}, {"extras": [Adapter("x", b"1")]}, 0),
        ({"extras": [Adapter("xy", b"1")]}, {"extras": [Adapter("x", b"y1")]}, 0),
        ({"extras": [Adapter("x", b"1")]}, {"extras": [Adapter("x", b"2")]}, 0),
        ({}, {"extras": [Media(20, 20, A)]}, 1),
        ({"extras": [Media(20, 20, A)]}, {"extras": [Media(20, 20, B)]}, 1),
        ({"extras": [Media(20, 20, A)]}, {"extras": [Media(21, 19, A)]}, 1),
        ({"extras": [Media(20, 20, A)]}, {"extras": [Media(20, 12, A)]}, 2),
        ({"extras": [Media(0, 48, A)]}, {"extras": [Media(0, 16, A), Media(16, 32, A)]}, 1),
        ({}, {"extras": [Embeddings([31, 32], A)]}, 1),
        ({"extras": [Embeddings([20], A)]}, {"extras": [Embeddings([20], B)]}, 1),
        ({"extras": [Embeddings([20], A)]}, {"extras": [Embeddings([21], A)]}, 1),
        ({"extras": [Embeddings([20], A)]}, {"extras": [Embeddings([20, 40], A)]}, 2),
        ({"extras": [Embeddings([20, 21], A)]}, {"extras": [Embeddings([20], A), Embeddings([21], A)]}, 1),
    ],
)
def test_each_option_counts_from_the_first_block_that_it_touches(
    one: dict[str, Any], other: dict[str, Any], first_changed: int
) -> None:
    equal = [
        a == b for a, b in zip(hash_blocks(range(48), **one), hash_blocks(range(48), **other), strict=True)
    ]
    assert equal == [block < first_changed for block in range(3)]


def test_a_salt_that_enters_later_leaves_what_precedes_to_all() -> None:
    for salt_from, first_changed in [
        (None, 0),
        (0, 0),
        (15, 0),
        (16, 1),
        (31, 1),
        (32, 2),
        (47, 2),
        (48, 3),
        (99, 3),
    ]:
        plain, salted, other = (
            hash_blocks(range(48), cache_salt=salt, salt_from=None if salt is None else salt_from)
            for salt in (None, "s", "t")
        )
        shared = [a == b == c for a, b, c in zip(plain, salted, other, strict=True)]
        assert shared == [block < first_changed for block in range(3)]
        assert len({*plain, *salted, *other}) == 9 - 2 * first_changed


def test_an_adapter_and_the_users_own_stay_in_the_first_block_wherever_the_salt_enters() -> None:
    extras = [Adapter("a", b"1"), Extra(200, b"x")]
    encoded = encode_extras(48, 16, "s", extras, salt_from=40)
    assert encoded.block_indices == [0, 2]
    assert encoded.scopes == encoded.payloads
    assert encoded.scopes[1] == b"\x01\x01\0\0\0s"
    assert hash_blocks(range(32), cache_salt="s", salt_from=40, extras=extras) == hash_blocks(
        range(32), extras=extras
    )


@pytest.mark.parametrize("salt_from", [-1, 2**31, 1.5, "1", True])
def test_a_bad_salt_from_is_refused(salt_from: Any) -> None:
    with pytest.raises(UsageError, match=r"^salt_from: expected an integer"):
        hash_blocks(range(48), cache_salt="s", salt_from=salt_from)


def test_salt_from_without_a_salt_is_refused_unless_it_says_nothing() -> None:
    plain = hash_blocks(range(48))
    assert hash_blocks(range(48), salt_from=0) == hash_blocks(range(48), salt_from=None) == plain
    for refused in (hash_blocks, lambda tokens, **o: hash_blocks_batch([tokens], **o)):
        with pytest.raises(UsageError, match=r"^salt_from: expected a cache_salt with it, got 16"):
            refused(range(48), salt_from=16)


def test_block_sizes_share_no_digest() -> None:
    sizes = [1, 2, 4, 8, 16, 32, 64]
    digests = [digest for size in sizes for digest in hash_blocks(range(64), block_size=size)]
    assert len(set(digests)) == len(digests) == sum(64 // size for size in sizes)


# What it does not depend on


@given(any_prompt, st.randoms())
def test_the_order_of_extras_and_positions_does_not_matter(prompt: Prompt, random: Any) -> None:
    extras = list(prompt.extras)
    random.shuffle(extras)
    for i, extra in enumerate(extras):
        if isinstance(extra, Embeddings):
            positions = list(extra.positions)
            random.shuffle(positions)
            extras[i] = Embeddings(np.array(positions), extra.digest)
    assert replace(prompt, extras=tuple(extras)).hashes() == prompt.hashes()


@given(any_prompt)
def test_no_extras_may_be_written_in_every_way(prompt: Prompt) -> None:
    plain = replace(prompt, extras=()).hashes()
    for none in (None, [], iter(())):
        assert hash_blocks(prompt.token_ids, **{**prompt.options, "extras": none}) == plain


@given(st.lists(st.integers(0, 127), max_size=80))
@pytest.mark.parametrize(
    "convert",
    [
        *(lambda t, dtype=dtype: np.array(t, dtype) for dtype in "bBhHiIqQ"),
        lambda t: np.array(t, ">i4"),
        lambda t: np.array(t, ">u8"),
        lambda t: np.array(t, object),
        lambda t: np.repeat(np.array(t, np.int64), 2)[::2],
        lambda t: np.array(t[::-1], np.uint32)[::-1],
        lambda t: np.frombuffer(b"?" + np.array(t, np.int32).tobytes(), np.int32, offset=1),
        lambda t: [np.int16(x) for x in t],
        lambda t: [np.uint64(x) if i % 2 else x for i, x in enumerate(t)],
        tuple,
        iter,
        lambda t: (x for x in t),
        lambda t: memoryview(np.array(t, np.uint32)),
    ],
)
def test_the_type_that_holds_the_tokens_does_not_matter(
    convert: Callable[[list[int]], Any], tokens: list[int]
) -> None:
    assert hash_blocks(convert(tokens)) == hash_blocks(tokens) == reference_hash_blocks(tokens)


# How extras reach the pool


@given(any_prompt)
def test_encoded_extras_list_every_touched_block_once_in_order(prompt: Prompt) -> None:
    size, n = prompt.block_size, len(prompt.token_ids)
    encoded = encode_extras(n, size, prompt.cache_salt, prompt.extras, salt_from=prompt.salt_from)
    spots = [p for e in prompt.extras if isinstance(e, Embeddings) for p in e.positions]
    spots += [p for e in prompt.extras if isinstance(e, Media) for p in range(e.start, e.start + e.length)]
    has_scope = any(isinstance(e, Adapter | Extra) for e in prompt.extras)
    scoped = ({0} if has_scope else set()) | (
        {(prompt.salt_from or 0) // size} if prompt.cache_salt else set()
    )
    first = {b: min((p % size for p in spots if p // size == b), default=size) for b in range(n // size + 2)}

    assert encoded.block_indices == sorted({p // size for p in spots} | scoped)
    assert encoded.first_offsets == [first[b] for b in encoded.block_indices]
    assert all(encoded.payloads)
    scope = tuple(e for e in prompt.extras if isinstance(e, Adapter | Extra))
    alone = encode_extras(n, size, prompt.cache_salt, scope, salt_from=prompt.salt_from).payloads
    assert [s for s in encoded.scopes if s] == alone
    assert len({len(column) for column in encoded}) == 1


def test_a_prompt_shorter_than_a_block_has_its_scope_and_items_encoded_all_the_same() -> None:
    encoded = encode_extras(10, 16, "s", [Media(4, 6, A)])
    assert encoded.block_indices == [0]
    assert encoded.first_offsets == [4]
    assert encoded.scopes == [b"\x01\x01\0\0\0s"]
    assert encoded.payloads[0].startswith(b"\x01\x01\0\0\0s\x03\x24\0\0\0\x04\0\0\0")
    assert encode_extras(0, 16, "s").block_indices == [0]
