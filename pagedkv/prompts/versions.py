"""Versions of a prompt, pinned by digest, and warmed before traffic is switched to them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.checks import show
from pagedkv.errors import StateError, UsageError
from pagedkv.extras import AnyExtra
from pagedkv.hashing import hash_blocks
from pagedkv.pool import BlockPool
from pagedkv.retention import RETAINED_PRIORITY
from pagedkv.tokens import as_tokens


class PromptVersion(NamedTuple):
    """One version of a prompt's beginning that many requests share.

    Attributes
    ----------
    name : str
        Of the prompt, such as "support-agent".
    digest : str
        64 hexadecimal digits: SHA-256 over the digests of its whole blocks (digest format 1, so over the
        pool's namespace, salt and extras too) and the tokens behind them. Equal in every process.
    token_ids : ndarray [num_tokens] uint32
        Not to be written to.
    """

    name: str
    digest: str
    token_ids: npt.NDArray[np.uint32]

    @property
    def short(self) -> str:
        """The digest's first twelve digits, for logs."""
        return self.digest[:12]


class PromptVersions:
    """The versions of prompts on one pool: which there are, which is in use.

    ::

        prompts = PromptVersions(pool)
        new = prompts.pin("support-agent", tokens, digest="9f2c…")   # the text is what was reviewed
        prompts.warm(new, compute=lambda ids: engine.prefill(ids))   # its KV is there, and retained
        prompts.switch(new)                                          # from now on `current` gives it

    Parameters
    ----------
    pool : BlockPool
    cache_salt, extras
        Of the requests that will share the prompts; they enter the digest.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        cache_salt: str | bytes | None = None,
        extras: Iterable[AnyExtra] = (),
    ) -> None:
        self.pool = pool
        self._cache_salt = cache_salt
        self._extras = tuple(extras)
        self._pinned: dict[str, dict[str, PromptVersion]] = {}
        self._current: dict[str, PromptVersion] = {}

    def pin(self, name: str, token_ids: Any, *, digest: str | None = None) -> PromptVersion:
        """Name a version of a prompt; the same tokens give the same version again.

        Parameters
        ----------
        name : str
        token_ids : array or iterable of int
            At least one block of them: less is never shared.
        digest : str, optional
            The version that is expected, or its first 8 digits or more: a prompt that was changed by
            accident is refused here, not found out by a cold cache.

        Raises
        ------
        UsageError
        """
        if not isinstance(name, str) or not name:
            raise UsageError(f"name: expected a text, got {show(name)}")
        tokens = np.array(as_tokens(token_ids))
        if len(tokens) < self.pool.block_size:
            need = f"at least the {self.pool.block_size} tokens of a block"
            raise UsageError(f"token_ids: expected {need}, got {len(tokens)}")
        found = self._digest(tokens)
        if digest is not None and (len(digest) < 8 or not found.startswith(digest.lower())):
            raise UsageError(f"{name}: expected the version {show(digest)}, got tokens of {found[:12]}…")
        own = tokens.astype(np.uint32)
        own.flags.writeable = False
        return self._pinned.setdefault(name, {}).setdefault(found, PromptVersion(name, found, own))

    def num_cached_tokens(self, version: PromptVersion) -> int:
        """Tokens of the version's whole blocks whose KV the pool has now."""
        found = self.pool.match(version.token_ids, cache_salt=self._cache_salt, extras=self._extras)
        return found.num_block_tokens

    def is_warm(self, version: PromptVersion) -> bool:
        """Whether the pool has the KV of all its whole blocks."""
        return self.num_cached_tokens(version) == self._whole(version)

    def warm(
        self,
        version: PromptVersion,
        compute: Callable[[npt.NDArray[np.uint32]], object],
        *,
        priority: int = RETAINED_PRIORITY,
        ttl_s: float | None = None,
    ) -> int:
        """See to it that the version's KV is in the pool, and keep it there.

        Parameters
        ----------
        version : PromptVersion
        compute : callable
            Runs a request of these tokens through the engine that writes into the pool, to no answer; it is
            called only if some of the KV is missing.
        priority, ttl_s
            As for `Retention`: how long to keep it.

        Returns
        -------
        int
            Tokens that had to be computed; 0 for what was warm.

        Raises
        ------
        StateError
            Afterwards the pool still has not all of it: it is too small, or the engine uses another salt.
        """
        self._check(version)
        missing = self._whole(version) - self.num_cached_tokens(version)
        if missing:
            compute(version.token_ids)
        kept = self.pool.retain(
            version.token_ids,
            priority=priority,
            ttl_s=ttl_s,
            cache_salt=self._cache_salt,
            extras=self._extras,
        )
        if kept < self._whole(version):
            what = f"{self._whole(version)} cached tokens of {version.name} {version.short}"
            raise StateError(f"warm: expected {what}, got {kept}")
        return missing

    def switch(self, version: PromptVersion) -> PromptVersion | None:
        """Make a warm version the current one, and return the one before; that one's KV is left to eviction.

        Raises
        ------
        StateError
            It is not warm: its first requests would pay for that.
        """
        self._check(version)
        if not self.is_warm(version):
            have, need = self.num_cached_tokens(version), self._whole(version)
            raise StateError(
                f"switch: expected {version.name} {version.short} warm, got {have} of {need} tokens"
            )
        before = self._current.get(version.name)
        self._current[version.name] = version
        return before

    def current(self, name: str) -> PromptVersion:
        """Return the version that is in use.

        Raises
        ------
        UsageError
            None was switched to.
        """
        if name not in self._current:
            raise UsageError(f"name: expected a prompt that is in use, got {show(name)}")
        return self._current[name]

    def versions(self, name: str) -> list[PromptVersion]:
        """Return a prompt's versions in the order of pinning."""
        return list(self._pinned.get(name, {}).values())

    def _whole(self, version: PromptVersion) -> int:
        return len(version.token_ids) // self.pool.block_size * self.pool.block_size

    def _digest(self, tokens: npt.NDArray[Any]) -> str:
        pool = self.pool
        chain = hash_blocks(
            tokens,
            block_size=pool.block_size,
            namespace=pool.namespace,
            cache_salt=self._cache_salt,
            extras=self._extras,
        )
        rest = tokens[len(chain) * pool.block_size :].astype("<u4").tobytes()
        return hashlib.sha256(b"".join(chain) + rest).hexdigest()

    def _check(self, version: PromptVersion) -> None:
        if self._pinned.get(version.name, {}).get(version.digest) is not version:
            raise UsageError(
                f"version: expected one that was pinned here, got {version.name} {version.short}"
            )
