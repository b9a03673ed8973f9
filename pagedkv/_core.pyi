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

def cpu_copy_blocks(
    isa: int, num_threads: int, blocks: object, sources: object, destinations: object
) -> None: ...
def cpu_gather_blocks(
    isa: int, num_threads: int, blocks: object, block_ids: object, buffer: object
) -> None: ...
def cpu_scatter_blocks(
    isa: int, num_threads: int, blocks: object, block_ids: object, buffer: object
) -> None: ...
def cpu_multiply(
    arg0: int,
    arg1: int,
    arg2: int,
    arg3: int,
    arg4: int,
    arg5: int,
    arg6: int,
    arg7: int,
    arg8: int,
    arg9: int,
    arg10: int,
    arg11: int,
    arg12: int,
    arg13: int,
    /,
) -> None: ...
def cpu_has_pairs(arg: int, /) -> bool: ...
def cpu_pack_pairs(arg0: int, arg1: int, arg2: int, arg3: int, /) -> None: ...
def cpu_multiply_pairs(
    arg0: int,
    arg1: int,
    arg2: int,
    arg3: int,
    arg4: int,
    arg5: int,
    arg6: int,
    arg7: int,
    arg8: int,
    arg9: int,
    /,
) -> None: ...
def cpu_normalise(
    arg0: int,
    arg1: int,
    arg2: int,
    arg3: int,
    arg4: int,
    arg5: int,
    arg6: int,
    arg7: int,
    arg8: float,
    arg9: int,
    /,
) -> None: ...
def cpu_rotate(
    arg0: int,
    arg1: int,
    arg2: int,
    arg3: int,
    arg4: int,
    arg5: int,
    arg6: int,
    arg7: int,
    arg8: int,
    arg9: int,
    arg10: int,
    /,
) -> None: ...
def cpu_gate(
    arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, arg6: int, arg7: int, /
) -> None: ...
def environment(name: str) -> str:
    """The value of an environment variable now, "" when it is unset."""

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

def attention_fits(
    query: object | None,
    key_pages: object | None,
    value_pages: object | None,
    block_table: object | None,
    seq_lens: object | None,
    query_start_loc: object | None,
    out: object | None,
) -> bool:
    """
    Whether paged_attention may be called with these tensors; the last may be None.
    """

def write_kv_fits(
    key: object | None,
    value: object | None,
    key_pages: object | None,
    value_pages: object | None,
    slot_mapping: object | None,
) -> bool:
    """Whether write_kv may be called with these tensors."""

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
    isa: int,
    num_threads: int,
    key: object,
    value: object,
    key_pages: object,
    value_pages: object,
    slot_mapping: object,
    key_scales: object | None,
    value_scales: object | None,
) -> None: ...
def cpu_paged_attention(
    isa: int,
    num_threads: int,
    query: object,
    key_pages: object,
    value_pages: object,
    block_table: object,
    seq_lens: object,
    query_start_loc: object,
    out: object,
    lse: object | None,
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
    alibi_slopes: object | None,
    sinks: object | None,
    mask: object | None,
    key_scales: object | None,
    value_scales: object | None,
    prefix_groups: object | None,
    prefix_rows: object | None,
) -> None: ...
def cpu_merge_attention_states(
    isa: int, num_threads: int, outs: object, lses: object, out: object, lse: object | None
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
    def block_ids(self, group: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...
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
    def copies(self, group: int) -> list[tuple[int, int, int]]: ...

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
        num_blocks: _Sequence[int],
        windows: _Sequence[int],
        block_size: int,
        digest_namespace: bytes,
        prefix_caching: bool,
        token_granular: bool,
        events: bool,
        manual_clock: bool,
        broken_digests: bool,
        seed: int,
        policy: str,
        equal_cost_tokens: int | None = None,
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
        reuse: bool,
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
    def waiting(
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
    def expect_reuse(self, sequence: Sequence, within_ns: int) -> None: ...
    def last_turn(self, sequence: Sequence) -> None: ...
    def preempt(self, sequence: Sequence) -> None: ...
    def close(self, sequences: _Sequence[Sequence]) -> None: ...
    def close_one(self, sequence: Sequence) -> None: ...
    def reserve_one(self, sequence: Sequence, num_new_tokens: object | None) -> Step: ...
    def reserve(self, sequences: object | None, num_new_tokens: object | None) -> Step: ...
    def prepare(self, step: Step, prefix_tokens: int) -> tuple: ...
    def commit(self, step: Step, num_accepted: _Sequence[int] | None) -> None: ...
    def abandon(self, step: Step) -> None: ...
    def allocate(
        self, num_blocks: int, group: int
    ) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...
    def free(self, block_ids: _Sequence[int], group: int) -> None: ...
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
    def snapshot(self, group: int) -> dict: ...
    def lookup(self, digests: _Sequence[bytes]) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...
    def take_events(self) -> list: ...
    def stats(self) -> dict: ...
    def work(self) -> tuple[int, int]: ...
    def digest_of(self, block_id: int, group: int) -> BlockHash | None: ...
    def check_integrity(self) -> None: ...
