"""What a block's KV depends on besides its tokens: salt, adapter, media, embeddings, the user's own.

An entry is ``tag u8 ‖ u32le(len) ‖ payload``; the extras of a block are its entries by ascending tag, equal
tags by payload, and nothing at all when there are none.

=======  ===========  ==================================================================  ===============
tag      what         payload                                                             enters
=======  ===========  ==================================================================  ===============
1        cache_salt   1 to 128 bytes; text as UTF-8, not normalised                       that of `salt_from`
2        adapter      u32le(len(id)) ‖ id ‖ revision                                      the first block
3        media        i32le(start of the item − start of the block) ‖ 32-byte digest      what it touches
4        embeddings   u16le(count) ‖ positions in the block, u16le each ‖ 32-byte digest  what it touches
128–255  the user's   bytes                                                               the first block
=======  ===========  ==================================================================  ===============

A salt normally enters the first block and so separates all of the prompt. With `salt_from`, a position that
is rounded down to the start of its block, it enters there: what precedes is shared by all tenants. The
adapter and the user's own extras stay in the first block, since they change the KV from the first token on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from pagedkv.checks import check_bytes, check_int, check_iterable, show
from pagedkv.errors import UsageError


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA or other adapter that the whole request runs with.

    Parameters
    ----------
    id : str or bytes
        Its name; text counts as its UTF-8 bytes.
    revision : bytes
        1 to 64 bytes that change with its weights, such as a digest of them: by a name alone, KV of the old
        weights would be found after a reload.
    """

    id: str | bytes
    revision: bytes

    def __post_init__(self) -> None:
        check_bytes("Adapter.id", self.id, 1, 2**32 - 1, text=True)
        check_bytes("Adapter.revision", self.revision, 1, 64)


@dataclass(frozen=True, slots=True)
class Media:
    """An image, sound or video behind the placeholder tokens ``[start, start + length)``.

    Parameters
    ----------
    start, length : int
        Tokens, in the prompt.
    digest : bytes
        32 bytes that tell the content from any other, as :func:`pagedkv.media_digest` gives.
    """

    start: int
    length: int
    digest: bytes

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", check_int("Media.start", self.start, 0, 2**31 - 1))
        object.__setattr__(self, "length", check_int("Media.length", self.length, 1, 2**31 - 1))
        check_bytes("Media.digest", self.digest, 32, 32)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Embeddings that replace those of the tokens at some positions.

    Parameters
    ----------
    positions : sequence of int
        Positions in the prompt, in any order, none twice; kept as an ascending tuple.
    digest : bytes
        32 bytes that tell the content from any other.
    """

    positions: Sequence[int]
    digest: bytes

    def __post_init__(self) -> None:
        what = "Embeddings.positions"
        positions = sorted(check_int(what, p, 0, 2**31 - 1) for p in check_iterable(what, self.positions))
        if not positions or len(set(positions)) < len(positions):
            raise UsageError(f"{what}: expected at least one and none twice, got {show(positions)}")
        object.__setattr__(self, "positions", tuple(positions))
        check_bytes("Embeddings.digest", self.digest, 32, 32)


@dataclass(frozen=True, slots=True)
class Extra:
    """The user's own reason why equal tokens have unequal KV, for the whole request.

    Parameters
    ----------
    tag : int
        128 to 255.
    payload : bytes
        Any bytes.
    """

    tag: int
    payload: bytes

    def __post_init__(self) -> None:
        object.__setattr__(self, "tag", check_int("Extra.tag", self.tag, 128, 255))
        check_bytes("Extra.payload", self.payload, 0, 2**32 - 1)


AnyExtra: TypeAlias = Adapter | Media | Embeddings | Extra


class BlockExtras(NamedTuple):
    """The encoded extras of a prompt; parallel lists with one element a block that has any, ascending.

    Attributes
    ----------
    block_indices : list of int
    payloads : list of bytes
        All entries of the block: what enters its digest.
    scopes : list of bytes
        The request-wide entries among them (salt, adapter, the user's own); empty in all blocks but the first
        and that of `salt_from`.
    first_offsets : list of int
        Where in the block the first media item or embedding lies; ``block_size`` when there is none.
    """

    block_indices: list[int]
    payloads: list[bytes]
    scopes: list[bytes]
    first_offsets: list[int]


def refuse_extra(extra: Any, index: int) -> None:
    """Refuse what is no extra."""
    kinds = "Adapter, Media, Embeddings or Extra"
    raise UsageError(f"extras: expected {kinds}, got {show(extra)}, at index {index}")


def check_salt(cache_salt: str | bytes) -> bytes:
    """`cache_salt` as bytes."""
    return check_bytes("cache_salt", cache_salt, 1, 128, text=True)


def check_salt_from(salt_from: int | None, cache_salt: str | bytes | None) -> int:
    """`salt_from` as a position; without a salt there is nothing that could enter later.

    It may lie behind the prompt's end, so that a prompt and its continuation can be described alike.
    """
    position = 0 if salt_from is None else check_int("salt_from", salt_from, 0, 2**31 - 1)
    if position and cache_salt is None:
        raise UsageError(f"salt_from: expected a cache_salt with it, got {position} and no salt")
    return position


def check_end(what: str, end: int, num_tokens: int) -> None:
    """Refuse an item that reaches beyond the prompt."""
    if end > num_tokens:
        raise UsageError(f"{what}: expected to end within the {num_tokens} tokens, got an end of {end}")
