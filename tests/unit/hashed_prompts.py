"""Prompts to be hashed, and all that their digests stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from pagedkv.extras import Adapter, AnyExtra, Embeddings, Extra, Media
from pagedkv.hashing import BlockHash, hash_blocks

A, B = bytes(32), bytes(31) + b"\x01"


@dataclass(frozen=True)
class Prompt:
    token_ids: tuple[int, ...]
    block_size: int
    namespace: bytes
    cache_salt: bytes | None
    salt_from: int | None
    extras: tuple[AnyExtra, ...]

    @property
    def options(self) -> dict[str, Any]:
        names = ("block_size", "namespace", "cache_salt", "salt_from", "extras")
        return {name: getattr(self, name) for name in names}

    def hashes(self) -> list[BlockHash]:
        return hash_blocks(self.token_ids, **self.options)


@st.composite
def prompts(draw: st.DrawFn, token: st.SearchStrategy[int], max_blocks: int = 4, few: bool = False) -> Prompt:
    """Prompts with every kind of extra; `few` values to choose from make (nearly) equal ones likely."""
    block_size = draw(st.integers(1, 3) if few else st.sampled_from([1, 3, 16, 32]))
    token_ids = draw(st.lists(token, min_size=block_size, max_size=block_size * max_blocks + 2))
    n = len(token_ids)
    word = st.binary(min_size=1, max_size=2) if not few else st.sampled_from([b"a", b"b", b"ab", b"ba"])
    digest = st.sampled_from([A, B]) if few else st.binary(min_size=32, max_size=32)
    start = st.integers(0, n - 1)
    media = start.flatmap(lambda s: st.builds(Media, st.just(s), st.integers(1, n - s), digest))
    positions = st.lists(start, min_size=1, max_size=4, unique=True)
    extra = st.one_of(
        media,
        st.builds(Embeddings, positions, digest),
        st.builds(Adapter, word, word),
        st.builds(Extra, st.integers(128, 130), word | st.just(b"")),
    )
    salt = draw(st.none() | word)
    return Prompt(
        tuple(token_ids),
        block_size,
        draw(st.just(b"") | word),
        salt,
        None if salt is None else draw(st.none() | st.integers(0, n + 1)),
        tuple(draw(st.lists(extra, max_size=3))),
    )


def meaning(prompt: Prompt) -> tuple[int, bytes, list[Any]]:
    """All that the digests of a prompt stand for, as plain values."""
    size = prompt.block_size
    blocks: list[object] = []
    for start in range(0, len(prompt.token_ids) - size + 1, size):
        end, facts = start + size, []
        if prompt.cache_salt is not None and start <= (prompt.salt_from or 0) < end:
            facts.append(("salt", prompt.cache_salt))
        for e in prompt.extras:
            if isinstance(e, Media) and e.start < end and e.start + e.length > start:
                facts.append(("media", e.start, e.digest))
            elif isinstance(e, Embeddings) and (inside := [p for p in e.positions if start <= p < end]):
                facts.append(("embeddings", tuple(inside), e.digest))
            elif isinstance(e, Adapter) and start == 0:
                facts.append(("adapter", e.id, e.revision))
            elif isinstance(e, Extra) and start == 0:
                facts.append(("own", e.tag, e.payload))
        blocks.append((prompt.token_ids[start:end], sorted(facts, key=repr)))
    return size, prompt.namespace, blocks
