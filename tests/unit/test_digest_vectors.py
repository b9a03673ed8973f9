"""The published digests, against which any implementation may test itself. The file says how it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedkv.hashing import (
    DIGEST_FORMAT,
    Adapter,
    Embeddings,
    Extra,
    Media,
    hash_blocks,
    reference_hash_blocks,
)

VECTORS = json.loads(Path(__file__).with_name("digest_vectors.json").read_text(encoding="utf-8"))
CASES = {case["name"]: case for case in VECTORS["cases"]}


def read_bytes(value: dict[str, str] | None) -> str | bytes | None:
    """{"text": …} or {"hex": …}."""
    return None if value is None else value["text"] if "text" in value else bytes.fromhex(value["hex"])


def read_extra(value: dict[str, Any]) -> Adapter | Media | Embeddings | Extra:
    match value:
        case {"kind": "adapter"}:
            return Adapter(read_bytes(value["id"]) or "", bytes.fromhex(value["revision"]))
        case {"kind": "media"}:
            return Media(value["start"], value["length"], bytes.fromhex(value["digest"]))
        case {"kind": "embeddings"}:
            return Embeddings(value["positions"], bytes.fromhex(value["digest"]))
        case {"kind": "extra"}:
            return Extra(value["tag"], bytes.fromhex(value["payload"]))
    raise AssertionError(value)


@pytest.mark.parametrize("hash_function", [hash_blocks, reference_hash_blocks])
@pytest.mark.parametrize("name", CASES)
def test_the_published_digests_stand(name: str, hash_function: Any) -> None:
    case = CASES[name]
    digests = hash_function(
        case["token_ids"],
        block_size=case["block_size"],
        namespace=bytes.fromhex(case["namespace"]),
        cache_salt=read_bytes(case["cache_salt"]),
        salt_from=case.get("salt_from"),
        extras=[read_extra(extra) for extra in case["extras"]],
    )
    assert [digest.hex() for digest in digests] == case["digests"]


def test_the_vectors_are_of_this_format_and_no_two_share_a_last_digest() -> None:
    assert VECTORS["format"] == DIGEST_FORMAT
    lasts = [case["digests"][-1] for case in CASES.values() if case["digests"]]
    assert len(set(lasts)) == len(lasts) >= 15
