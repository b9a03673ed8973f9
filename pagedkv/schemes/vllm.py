"""The block digests of vLLM.

::

    NONE_HASH = H(S(seed))
    digestᵢ   = H(S((digestᵢ₋₁ or NONE_HASH, (token, …), extra keys or None)))

H is SHA-256 or XXH3-128, S is pickle or canonical CBOR; the scheme's name says which. The extra keys of a
block are a tuple, in this order; the columns are the recipes:

===========  =============================  =====================  ===============  ===================
what         0.31                           0.20                   0.12             in
===========  =============================  =====================  ===============  ===================
Adapter      ("lora", name, path)           name                   name             every block
Media        ("mm", hash, start − block's)  (hash, start − block)  hash             blocks it touches
cache_salt   ("cache_salt", salt)           salt                   salt             the first block
===========  =============================  =====================  ===============  ===================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal, TypeAlias

from pagedkv import _core
from pagedkv.checks import check_bytes, check_int, check_iterable, show
from pagedkv.errors import UsageError
from pagedkv.extras import Adapter, AnyExtra, Media, check_end, check_salt
from pagedkv.schemes import cbor, pickled

VLLMName: TypeAlias = Literal["sha256-vllm", "sha256-cbor-vllm", "xxhash-vllm", "xxhash-cbor-vllm"]
VLLMRecipe: TypeAlias = Literal["0.31", "0.20", "0.12"]
Key: TypeAlias = "str | tuple[str | int, ...]"

# vLLM's when PYTHONHASHSEED is not set, since 0.29 and for SHA-256 only.
DEFAULT_SEED = "vllm-none-hash"


def _sha256(data: bytes) -> bytes:
    return sha256(data).digest()


LORA, MM, CACHE_SALT = map(pickled.Constant, ("lora", "mm", "cache_salt"))
# name -> digest size, H, S
_PARTS: dict[VLLMName, tuple[int, Callable[[bytes], bytes], Callable[[Any], bytes]]] = {
    "sha256-vllm": (32, _sha256, pickled.dumps),
    "sha256-cbor-vllm": (32, _sha256, cbor.dumps),
    "xxhash-vllm": (16, _core.xxh3_128, pickled.dumps),
    "xxhash-cbor-vllm": (16, _core.xxh3_128, cbor.dumps),
}
VLLM_SCHEMES = tuple(_PARTS)
_RECIPES = ("0.31", "0.20", "0.12")


@dataclass(frozen=True, slots=True)
class VLLMScheme:
    """The digests of a vLLM deployment, as it was started.

    Parameters
    ----------
    name : str
        "sha256-vllm", "sha256-cbor-vllm", "xxhash-vllm" or "xxhash-cbor-vllm": vLLM's
        ``--prefix-caching-hash-algo`` sha256, sha256_cbor, xxhash and xxhash_cbor.
    seed : str, optional
        The value of PYTHONHASHSEED that vLLM runs with. By default vLLM's own for SHA-256 from 0.29 on; an
        older one, and one with xxhash, draws a seed at random unless it is given one.
    none_hash : bytes, optional
        NONE_HASH itself, 32 bytes (16 for xxhash), in the place of a seed.
    recipe : str
        "0.31" for that version and later ones, "0.20" for it to 0.30, "0.12" for older ones that hash media
        without their offset. They differ for prompts with an adapter, media or a salt only.
    lora_modules : mapping of str to str
        Name to path, as in ``--lora-modules``. vLLM hashes the path too, from 0.31 on.

    Raises
    ------
    UsageError
        For a bad parameter, or neither seed nor none_hash where vLLM would draw one at random.
    """

    name: VLLMName = "sha256-vllm"
    seed: str | None = None
    none_hash: bytes | None = None
    recipe: VLLMRecipe = "0.31"
    lora_modules: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.name not in VLLM_SCHEMES:
            expected = ", ".join(VLLM_SCHEMES)
            raise UsageError(f"VLLMScheme.name: expected one of {expected}, got {show(self.name)}")
        if self.recipe not in _RECIPES:
            expected = ", ".join(_RECIPES)
            raise UsageError(f"VLLMScheme.recipe: expected one of {expected}, got {show(self.recipe)}")
        if not isinstance(self.lora_modules, Mapping):
            raise UsageError(f"VLLMScheme.lora_modules: expected a mapping, got {show(self.lora_modules)}")
        size = _PARTS[self.name][0]
        if self.none_hash is not None:
            if self.seed is not None:
                raise UsageError("VLLMScheme: expected a seed or a none_hash, got both")
            check_bytes("VLLMScheme.none_hash", self.none_hash, size, size)
        elif not isinstance(self.seed, str) and (self.seed is not None or size < 32):
            raise UsageError(f"VLLMScheme.seed: expected the text of PYTHONHASHSEED, got {show(self.seed)}")
        else:
            check_bytes("VLLMScheme.seed", self.seed or "", 0, 2**15, text=True)

    @property
    def root(self) -> bytes:
        """NONE_HASH, what stands before the first block."""
        if self.none_hash is not None:
            return self.none_hash
        _, hash_bytes, serialize = _PARTS[self.name]
        return hash_bytes(serialize(DEFAULT_SEED if self.seed is None else self.seed))

    def hash_blocks(
        self,
        token_ids: list[int],
        block_size: int,
        *,
        cache_salt: str | bytes | None,
        extras: Iterable[AnyExtra] | None,
    ) -> list[bytes]:
        """Compute the digests of the whole blocks; :func:`pagedkv.hash_blocks` checks and calls this."""
        _, hash_bytes, serialize = _PARTS[self.name]
        keys = self._block_keys(len(token_ids), block_size, cache_salt, extras)
        digests, parent = [], self.root
        for block, start in enumerate(range(0, len(token_ids) - block_size + 1, block_size)):
            token_tuple = tuple(token_ids[start : start + block_size])
            parent = hash_bytes(serialize((parent, token_tuple, keys[block] or None)))
            digests.append(parent)
        return digests

    def _block_keys(
        self,
        num_tokens: int,
        block_size: int,
        cache_salt: str | bytes | None,
        extras: Iterable[AnyExtra] | None,
    ) -> list[tuple[Key, ...]]:
        """List the extra keys of each whole block."""
        adapters: list[Key] = []
        media: list[Media] = []
        for i, extra in enumerate(check_iterable("extras", () if extras is None else extras)):
            if isinstance(extra, Adapter) and not adapters:
                adapters.append(self._adapter_key(extra))
            elif isinstance(extra, Media):
                check_end(f"extras[{i}]", extra.start + extra.length, num_tokens)
                media.append(extra)
            else:
                what = f"at most one Adapter, and Media, for the scheme '{self.name}'"
                raise UsageError(f"extras: expected {what}, got {show(extra)}, at index {i}")
        salt = [] if cache_salt is None else [self._salt_key(cache_salt)]

        media.sort(key=lambda item: item.start)
        keys: list[tuple[Key, ...]] = []
        for start in range(0, num_tokens - block_size + 1, block_size):
            # vLLM walks through the items in order, which loses some of those that overlap; so do we.
            while media and media[0].start + media[0].length <= start:
                del media[0]
            items: list[Key] = []
            for item in media if media and media[-1].start + media[-1].length > start else ():
                if item.start >= start + block_size:
                    break
                if item.start + item.length > start:
                    items.append(self._media_key(item, item.start - start))
                if item.start + item.length > start + block_size:
                    break
            keys.append((*adapters, *items, *(salt if start == 0 else ())))
        return keys

    def _adapter_key(self, adapter: Adapter) -> Key:
        name = _as_text("Adapter.id", adapter.id)
        if self.recipe != "0.31":
            return name
        if name not in self.lora_modules:
            raise UsageError(f"VLLMScheme.lora_modules: expected the path of {name!r}, got none")
        return (LORA, name, self.lora_modules[name])

    def _media_key(self, item: Media, offset: int) -> Key:
        identifier = item.digest.hex()
        if self.recipe == "0.12":
            return identifier
        return (identifier, offset) if self.recipe == "0.20" else (MM, identifier, offset)

    def _salt_key(self, cache_salt: str | bytes) -> Key:
        salt = _as_text("cache_salt", check_salt(cache_salt))
        return (CACHE_SALT, salt) if self.recipe == "0.31" else salt


def event_hash(digest: bytes) -> int:
    """Give the unsigned 64-bit number that stands for a block in vLLM's KV events: the last 8 bytes.

    Equal numbers are no proof of equal blocks; with ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`` vLLM sends
    the digest itself.
    """
    return int.from_bytes(check_bytes("digest", digest, 8, 2**16)[-8:], "big")


def pool_key(digest: bytes, *, group_id: int = 0) -> bytes:
    """Give the key of a block in vLLM's block pool: the digest, then the group in four bytes, big-endian."""
    group = check_int("group_id", group_id, 0, 2**32 - 1)
    return check_bytes("digest", digest, 1, 2**16) + group.to_bytes(4, "big")


def _as_text(what: str, value: str | bytes) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{what}: expected text for a scheme of vLLM, got {show(value)}") from None
