"""Two different inputs never share a digest: the encoding can be read back, near misses are told apart."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

from hashed_prompts import A, B, Prompt, meaning, prompts
from hypothesis import assume, event, given
from hypothesis import strategies as st

from pagedkv.extras import Adapter, AnyExtra, Embeddings, Extra, Media
from pagedkv.hashing import encode_extras

few_prompts = prompts(st.integers(0, 1), max_blocks=3, few=True)


def assert_digests_tell_meanings_apart(given_prompts: list[Prompt]) -> None:
    """Over every block of every prompt: as many digests as meanings, and one for each."""
    digest_of: dict[str, bytes] = {}
    meaning_of: dict[bytes, str] = {}
    for prompt in given_prompts:
        size, namespace, blocks = meaning(prompt)
        for k, digest in enumerate(prompt.hashes()):
            meant = repr((size, namespace, blocks[: k + 1]))
            assert digest_of.setdefault(meant, digest) == digest, "equal inputs, unequal digests"
            assert meaning_of.setdefault(digest, meant) == meant, "unequal inputs, equal digests"


@given(st.lists(few_prompts, min_size=2, max_size=25))
def test_among_many_prompts_two_blocks_have_equal_digests_exactly_when_they_mean_the_same(
    many: list[Prompt],
) -> None:
    assert_digests_tell_meanings_apart(many)


# ---------------------------------------------------------------------- near misses


def entry(tag: int, payload: bytes) -> bytes:
    """An entry of the extras as the digest format defines it, written down once more."""
    return struct.pack("<BI", tag, len(payload)) + payload


def one_byte_moves_between_id_and_revision(draw: st.DrawFn, extra: AnyExtra) -> list[AnyExtra]:
    assume(isinstance(extra, Adapter) and len(extra.id) > 1)
    assert isinstance(extra, Adapter)
    name = extra.id.encode() if isinstance(extra.id, str) else extra.id
    return [Adapter(name[:-1], name[-1:] + extra.revision)]


def an_item_moves_or_is_resized(draw: st.DrawFn, extra: AnyExtra) -> list[AnyExtra]:
    assume(isinstance(extra, Media))
    assert isinstance(extra, Media)
    start, length = extra.start + draw(st.sampled_from([-1, 0, 1])), extra.length + draw(st.integers(-1, 1))
    assume(start >= 0 and length >= 1)
    return [Media(start, length, extra.digest)]


def an_item_falls_into_two(draw: st.DrawFn, extra: AnyExtra) -> list[AnyExtra]:
    assume(isinstance(extra, Media) and extra.length > 1)
    assert isinstance(extra, Media)
    cut = draw(st.integers(1, extra.length - 1))
    return [Media(extra.start, cut, extra.digest), Media(extra.start + cut, extra.length - cut, extra.digest)]


def embeddings_fall_into_two(draw: st.DrawFn, extra: AnyExtra) -> list[AnyExtra]:
    assume(isinstance(extra, Embeddings) and len(extra.positions) > 1)
    assert isinstance(extra, Embeddings)
    cut = draw(st.integers(1, len(extra.positions) - 1))
    return [Embeddings(extra.positions[:cut], extra.digest), Embeddings(extra.positions[cut:], extra.digest)]


def an_embedding_moves(draw: st.DrawFn, extra: AnyExtra) -> list[AnyExtra]:
    assume(isinstance(extra, Embeddings))
    assert isinstance(extra, Embeddings)
    i = draw(st.integers(0, len(extra.positions) - 1))
    position = extra.positions[i] + draw(st.sampled_from([-1, 1]))
    assume(position >= 0 and position not in extra.positions)
    return [Embeddings([*extra.positions[:i], position, *extra.positions[i + 1 :]], extra.digest)]


def it_comes_twice(draw: st.DrawFn, extra: AnyExtra) -> list[AnyExtra]:
    return [extra, extra]


def it_is_left_out(draw: st.DrawFn, extra: AnyExtra) -> list[AnyExtra]:
    return []


def its_content_changes(draw: st.DrawFn, extra: AnyExtra) -> list[AnyExtra]:
    assume(isinstance(extra, Media | Embeddings))
    return [replace(extra, digest=A if extra.digest == B else B)]  # type: ignore[union-attr, call-arg]


def an_own_extra_swallows_another(draw: st.DrawFn, extra: AnyExtra) -> list[AnyExtra]:
    """Its payload ends with what would be the next entry's encoding."""
    assume(isinstance(extra, Extra))
    assert isinstance(extra, Extra)
    swallowed = draw(st.sampled_from([entry(1, b"a"), entry(extra.tag, b"a"), entry(255, b"")]))
    return draw(
        st.sampled_from(
            [
                [Extra(extra.tag, extra.payload + swallowed)],
                [extra, Extra(swallowed[0] if swallowed[0] >= 128 else 128, swallowed[5:])],
            ]
        )
    )


def an_own_extra_stands_for_something_else(draw: st.DrawFn, extra: AnyExtra) -> list[AnyExtra]:
    """The same bytes under a tag of one's own."""
    if isinstance(extra, Adapter):
        name = extra.id.encode() if isinstance(extra.id, str) else extra.id
        return [Extra(130, struct.pack("<I", len(name)) + name + extra.revision)]
    if isinstance(extra, Media):
        return [Extra(131, struct.pack("<i", extra.start) + extra.digest)]
    if isinstance(extra, Embeddings):
        positions = struct.pack(f"<{1 + len(extra.positions)}H", len(extra.positions), *extra.positions)
        return [Extra(132, positions + extra.digest)]
    return [Extra(128 + (extra.tag - 127) % 128, extra.payload)]


EDITS: list[Callable[[st.DrawFn, AnyExtra], list[AnyExtra]]] = [
    one_byte_moves_between_id_and_revision,
    an_item_moves_or_is_resized,
    an_item_falls_into_two,
    embeddings_fall_into_two,
    an_embedding_moves,
    it_comes_twice,
    it_is_left_out,
    its_content_changes,
    an_own_extra_swallows_another,
    an_own_extra_stands_for_something_else,
]


@st.composite
def near_misses(draw: st.DrawFn) -> list[Prompt]:
    """A prompt, and some that part from it by one edit of its extras, its salt or its tokens."""
    prompt = draw(few_prompts)
    family = [prompt]
    for _ in range(draw(st.integers(1, 5))):
        changed = draw(st.sampled_from(family))
        kind = draw(st.sampled_from(["extra", "extra", "extra", "salt", "salt_from", "tokens", "block_size"]))
        if kind == "extra":
            assume(changed.extras)
            i = draw(st.integers(0, len(changed.extras) - 1))
            edit = draw(st.sampled_from(EDITS))
            event(edit.__name__)
            extras = (*changed.extras[:i], *edit(draw, changed.extras[i]), *changed.extras[i + 1 :])
            changed = replace(changed, extras=extras)
            assume(all(end <= len(changed.token_ids) for end in map(end_of, extras)))
        elif kind == "salt":  # becomes an extra of one's own, or an entry inside one
            salt = changed.cache_salt or b"a"
            own = Extra(draw(st.sampled_from([128, 129])), draw(st.sampled_from([salt, entry(1, salt)])))
            changed = replace(changed, cache_salt=None, salt_from=None, extras=(*changed.extras, own))
        elif kind == "salt_from":
            salt = changed.cache_salt or b"a"
            changed = replace(
                changed, cache_salt=salt, salt_from=draw(st.integers(0, len(changed.token_ids)))
            )
        elif kind == "tokens":
            i = draw(st.integers(0, len(changed.token_ids) - 1))
            token = draw(st.sampled_from([0, 1, 2**32 - 1]))
            tokens = (*changed.token_ids[:i], token, *changed.token_ids[i + 1 :])
            changed = replace(changed, token_ids=tokens)
        else:
            changed = replace(changed, block_size=draw(st.integers(1, len(changed.token_ids))))
        family.append(changed)
    return family


def end_of(extra: AnyExtra) -> int:
    if isinstance(extra, Media):
        return extra.start + extra.length
    return extra.positions[-1] + 1 if isinstance(extra, Embeddings) else 0


@given(near_misses())
def test_prompts_that_part_by_one_edit_are_told_apart_exactly_when_they_mean_something_else(
    family: list[Prompt],
) -> None:
    assert_digests_tell_meanings_apart(family)


# ---------------------------------------------------------------------- reading back


def read_back(payload: bytes) -> list[tuple[int, bytes]]:
    """Take a block's extras apart by their lengths alone."""
    entries: list[tuple[int, bytes]] = []
    while payload:
        tag, length = struct.unpack_from("<BI", payload)
        assert len(payload) >= 5 + length, "an entry reaches beyond the extras"
        entries.append((tag, payload[5 : 5 + length]))
        payload = payload[5 + length :]
    return entries


def fact(tag: int, payload: bytes, block_start: int) -> tuple[object, ...]:
    """What one entry says, as `meaning` puts it."""
    if tag == 1:
        return "salt", payload
    if tag == 2:
        (length,) = struct.unpack_from("<I", payload)
        return "adapter", payload[4 : 4 + length], payload[4 + length :]
    if tag == 3:
        (offset,) = struct.unpack_from("<i", payload)
        return "media", block_start + offset, payload[4:]
    if tag == 4:
        (count,) = struct.unpack_from("<H", payload)
        positions = struct.unpack_from(f"<{count}H", payload, 2)
        return "embeddings", tuple(block_start + p for p in positions), payload[2 + 2 * count :]
    return "own", tag, payload


@given(prompts(st.integers(0, 2**32 - 1)) | few_prompts)
def test_the_extras_of_every_block_can_be_read_back(prompt: Prompt) -> None:
    size = prompt.block_size
    encoded = encode_extras(
        len(prompt.token_ids), size, prompt.cache_salt, prompt.extras, salt_from=prompt.salt_from
    )
    payloads = dict(zip(encoded.block_indices, encoded.payloads, strict=True))
    for index, (_, facts) in enumerate(meaning(prompt)[2]):
        entries = read_back(payloads.get(index, b""))
        assert entries == sorted(entries), "ascending tags, equal tags by payload"
        assert sorted((fact(*e, index * size) for e in entries), key=repr) == facts
