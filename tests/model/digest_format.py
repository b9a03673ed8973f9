"""The published digest format 1 once more, over identities of the oracle: an encoder of the tests' own."""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import Any

from pagedkv.testing.identity import Identity


class DigestFormat:
    """Digests of identities, for one block size and namespace."""

    def __init__(self, block_size: int, namespace: bytes) -> None:
        self.block_size = block_size
        head = struct.pack("<II", block_size, len(namespace))
        self.root = sha256(b"pagedkv.block.v1" + head + namespace).digest()
        self._digests: dict[Identity, bytes] = {}

    def digest(self, identity: Identity) -> bytes:
        """The digest of the last block, or the root."""
        if len(identity) == 1:
            return self.root
        if identity[1:] not in self._digests:  # a digest knows nothing of generations
            block = identity[-self.block_size :]
            tokens = struct.pack(f"<{self.block_size}I", *(token for token, _, _ in block))
            parent = self.digest(identity[: -self.block_size])
            self._digests[identity[1:]] = sha256(parent + tokens + self.extras(identity)).digest()
        return self._digests[identity[1:]]

    def extras(self, identity: Identity) -> bytes:
        """What the last block depends on besides its tokens."""
        entries = [x for _, scope, items in identity[-self.block_size :] for x in (*scope, *items)]
        encoded = sorted(map(_tag_and_payload, entries))
        return b"".join(struct.pack("<BI", tag, len(payload)) + payload for tag, payload in encoded)


def _tag_and_payload(entry: tuple[Any, ...]) -> tuple[int, bytes]:
    tag, *content = entry
    if tag == 2:
        return tag, struct.pack("<I", len(content[0])) + content[0] + content[1]
    if tag == 3:
        return tag, struct.pack("<i", content[0]) + content[1]
    if tag == 4:
        return tag, struct.pack(f"<{1 + len(content[0])}H", len(content[0]), *content[0]) + content[1]
    return tag, content[0]
