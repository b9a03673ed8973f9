"""The native core of pagedkv. Private: import pagedkv instead."""

from collections.abc import Sequence as _Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

class BlockHash(bytes):
    """
    The 32 bytes (16 in the schemes of XXH3) that name a block and, through its parent, all before it.
    """

    def __repr__(self, /):
        """Return repr(self)."""

def encode_extras(
    num_tokens: int,
    block_size: int,
    cache_salt: object | None,
    salt_from: object | None,
    extras: object | None,
) -> tuple[list[int], list[bytes], list[bytes], list[int]]:
    """The four lists of pagedkv.extras.BlockExtras."""

def hash_blocks(
    token_ids: object | None,
    block_size: int,
    namespace: bytes,
    cache_salt: object | None,
    salt_from: object | None,
    extras: object | None,
) -> list[BlockHash]:
    """Digests of the whole blocks of one prompt."""

def hash_blocks_batch(
    prompts: list,
    block_size: int,
    namespace: bytes,
    cache_salt: object | None,
    salt_from: object | None,
    extras: object | None,
) -> list[list[BlockHash]]:
    """The same for many prompts in one call."""

def hash_blocks_xxh3(
    token_ids: object | None,
    block_size: int,
    namespace: bytes,
    cache_salt: object | None,
    salt_from: object | None,
    extras: object | None,
) -> list[BlockHash]:
    """Digests of the whole blocks of one prompt."""

def hash_blocks_batch_xxh3(
    prompts: list,
    block_size: int,
    namespace: bytes,
    cache_salt: object | None,
    salt_from: object | None,
    extras: object | None,
) -> list[list[BlockHash]]:
    """The same for many prompts in one call."""

def xxh3_128(data: bytes) -> bytes:
    """XXH3 of 128 bits, seed 0, in canonical order."""

def is_plain_array(object: object | None) -> bool:
    """
    Whether the core reads token ids from it as it is, without `as_tokens`.
    """

def leading_tokens(token_ids: list) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
    """
    The leading elements of a list that are token ids; fewer than all when one is none.
    """

def sha256(data: bytes, isa: str, chunk_size: int = 0) -> bytes:
    """
    SHA-256 by the path `isa`, given in chunks of `chunk_size` bytes (0: at once).
    """

def sha256_chain(parent: bytes, token_ids: object, isa: str, num_prompts: int = 1) -> bytes:
    """
    A chain of blocks of 16 tokens by the path `isa`, computed for equal prompts in one batch.
    """

def sha256_isas() -> dict[str, str]:
    """Every path of SHA-256 and why it can't run here, "" when it can."""

def sha256_isa() -> str:
    """The path in use."""

def cpu_isas() -> dict[str, str]:
    """
    Every instruction set of the CPU kernels and why it can't run, "" when it can.
    """

def cpu_find_isa(name: str, what: str) -> int:
    """
    The number of the instruction set of this name, or of the fastest for "".
    """

def cpu_isa_name(isa: int) -> str:
    """The name of an instruction set."""

def cpu_write_kv(
    arg0: int,
    arg1: int,
    arg2: int,
    arg3: tuple,
    arg4: int,
    arg5: tuple,
    arg6: int,
    arg7: int,
    arg8: tuple,
    arg9: int,
    arg10: tuple,
    arg11: tuple,
    arg12: int,
    arg13: int,
    arg14: int,
    arg15: int,
    arg16: tuple,
    arg17: int,
    arg18: tuple,
    /,
) -> None: ...
def cpu_paged_attention(
    arg0: int,
    arg1: int,
    arg2: int,
    arg3: tuple,
    arg4: tuple,
    arg5: int,
    arg6: int,
    arg7: tuple,
    arg8: int,
    arg9: tuple,
    arg10: tuple,
    arg11: int,
    arg12: int,
    arg13: tuple,
    arg14: int,
    arg15: int,
    arg16: int,
    arg17: int,
    arg18: tuple,
    arg19: int,
    arg20: tuple,
    arg21: float,
    arg22: bool,
    arg23: int,
    arg24: float,
    arg25: int,
    arg26: int,
    arg27: int,
    arg28: bool,
    arg29: int,
    arg30: int,
    arg31: int,
    arg32: tuple,
    arg33: int,
    arg34: tuple,
    arg35: int,
    arg36: int,
    arg37: int,
    arg38: int,
    /,
) -> None: ...
def cpu_copy_blocks(
    arg0: int, arg1: int, arg2: int, arg3: tuple, arg4: tuple, arg5: int, arg6: int, arg7: int, arg8: int, /
) -> None: ...
def cpu_gather_blocks(
    arg0: int,
    arg1: int,
    arg2: int,
    arg3: tuple,
    arg4: tuple,
    arg5: int,
    arg6: int,
    arg7: tuple,
    arg8: int,
    arg9: int,
    /,
) -> None: ...
def cpu_scatter_blocks(
    arg0: int,
    arg1: int,
    arg2: int,
    arg3: tuple,
    arg4: tuple,
    arg5: int,
    arg6: int,
    arg7: tuple,
    arg8: int,
    arg9: int,
    /,
) -> None: ...
def cpu_merge_attention_states(
    arg0: int,
    arg1: int,
    arg2: int,
    arg3: tuple,
    arg4: tuple,
    arg5: int,
    arg6: int,
    arg7: tuple,
    arg8: int,
    arg9: tuple,
    arg10: int,
    arg11: tuple,
    /,
) -> None: ...

class Sequence:
    """One request. Made by BlockPool.open."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_uncached_tokens(self) -> int: ...
    @property
    def num_committed_tokens(self) -> int: ...
    @property
    def num_reserved_tokens(self) -> int: ...
    @property
    def num_releasable_blocks(self) -> int: ...
    def prompt_counts(self) -> tuple[int, int, int, int]: ...
    def close(self) -> None: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def is_preempted(self) -> bool: ...
    def token_ids(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...
    def block_ids(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...
    def block_hashes(self) -> list[BlockHash]: ...

class Step:
    """One step's plan. Made by BlockPool.reserve."""

    @property
    def state(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def max_blocks(self) -> int: ...
    def num_new_tokens(self) -> list[int]: ...
    def copies(self) -> list[tuple[int, int, int]]: ...

class Fence:
    """References for a copy in flight. Made by BlockPool.fence."""

    @property
    def is_released(self) -> bool: ...
    @property
    def num_blocks(self) -> int: ...

SPLIT_TOKENS: int = 512

POLICIES: tuple = ...

class BlockPool:
    """See pagedkv.BlockPool."""

    @staticmethod
    def make(
        num_blocks: int,
        block_size: int,
        digest_namespace: bytes,
        prefix_caching: bool,
        token_granular: bool,
        events: bool,
        manual_clock: bool,
        broken_digests: bool,
        seed: int,
        policy: str,
    ) -> BlockPool: ...
    def match(
        self,
        token_ids: object | None,
        cache_salt: object | None,
        salt_from: object | None,
        extras: object | None,
    ) -> tuple[int, int, Annotated[NDArray[numpy.int32], dict(shape=(None,))], int]: ...
    def open(
        self,
        token_ids: object | None,
        cache_salt: object | None,
        salt_from: object | None,
        extras: object | None,
        retention: _Sequence[tuple[int, int, int, float, bool]] | None,
        publish_end: int | None,
    ) -> Sequence: ...
    def retain(
        self,
        token_ids: object | None,
        cache_salt: object | None,
        salt_from: object | None,
        extras: object | None,
        retention: tuple[int, int, int, float, bool],
    ) -> int: ...
    def match_lengths(
        self, prompts: list, cache_salts: list | None, salt_from: object | None, extras: list | None
    ) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...
    def touch(
        self,
        token_ids: object | None,
        cache_salt: object | None,
        salt_from: object | None,
        extras: object | None,
    ) -> int: ...
    def append(self, sequences: _Sequence[Sequence], token_ids: list) -> None: ...
    def append_each(self, sequences: object | None, token_ids: object | None) -> bool: ...
    def truncate(self, sequence: Sequence, num_tokens: int) -> None: ...
    def fork(self, sequence: Sequence) -> Sequence: ...
    def stop_publishing(self, sequence: Sequence, position: int) -> None: ...
    def preempt(self, sequence: Sequence) -> None: ...
    def close(self, sequences: _Sequence[Sequence]) -> None: ...
    def close_one(self, sequence: Sequence) -> None: ...
    def reserve_one(self, sequence: Sequence, num_new_tokens: object | None) -> Step: ...
    def reserve(self, sequences: object | None, num_new_tokens: object | None) -> Step: ...
    def prepare(self, step: Step, prefix_tokens: int) -> tuple: ...
    def commit(self, step: Step, num_accepted: _Sequence[int] | None) -> None: ...
    def abandon(self, step: Step) -> None: ...
    def allocate(self, num_blocks: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...
    def free(self, block_ids: _Sequence[int]) -> None: ...
    def fence(self, sequences: _Sequence[Sequence]) -> Fence: ...
    def release(self, fence: Fence) -> None: ...
    def evict(self, num_blocks: int) -> int: ...
    def reset(self) -> bool: ...
    def bump_generation(self) -> None: ...
    def set_quota(self, cache_salt: bytes, num_blocks: int | None) -> None: ...
    def tenant_usage(self, cache_salt: bytes) -> tuple[bytes, int, int | None]: ...
    def tenants(self) -> list[tuple[bytes, int, int | None]]: ...
    def advance(self, seconds: float) -> None: ...
    @property
    def now_s(self) -> float: ...
    def explain(
        self,
        token_ids: object | None,
        cache_salt: object | None,
        salt_from: object | None,
        extras: object | None,
        across_tenants: bool,
    ) -> dict: ...
    def snapshot(self) -> dict: ...
    def lookup(self, digests: _Sequence[bytes]) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...
    def take_events(self) -> list: ...
    def stats(self) -> dict: ...
    def work(self) -> tuple[int, int]: ...
    def digest_of(self, block_id: int) -> BlockHash | None: ...
    def check_integrity(self) -> None: ...
