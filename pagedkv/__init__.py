"""The KV cache that an inference engine imports.

Pages, identities, reuse and eviction, and the attention that reads the pages; the engine keeps its model, its
scheduler and its sampler. What needs torch is imported when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pagedkv import _built  # noqa: F401  (first, to say what is wrong where it is)
from pagedkv._version import __version__
from pagedkv.errors import (
    BackendUnavailableError,
    CapacityError,
    CorruptBlockError,
    IntegrityError,
    OutOfBlocksError,
    PagedKVError,
    RankError,
    ShapeError,
    SpecError,
    StateError,
    TierError,
    TierFullError,
    UsageError,
)
from pagedkv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from pagedkv.explanation import Explanation
from pagedkv.hashing import (
    DIGEST_FORMAT,
    Adapter,
    BlockHash,
    Embeddings,
    Extra,
    Media,
    VLLMScheme,
    hash_blocks,
    hash_blocks_batch,
)
from pagedkv.media import media_digest
from pagedkv.pool import BlockPool, Match
from pagedkv.retention import Breakpoint, Retention
from pagedkv.sequence import Fence, GroupTables, Sequence, Step, StepTables
from pagedkv.snapshot import PoolSnapshot
from pagedkv.spec import KVCacheSpec, KVGroup, KVLayout
from pagedkv.stats import CacheStats, GroupStats, TenantUsage
from pagedkv.usage import Usage

if TYPE_CHECKING:
    from pagedkv.batch import AttentionMetadata, BatchShape, SharedPrefixes
    from pagedkv.cache import PagedKVCache
    from pagedkv.pages import KVPages

__all__ = [
    "DIGEST_FORMAT",
    "Adapter",
    "AllBlocksCleared",
    "AttentionMetadata",
    "BackendUnavailableError",
    "BatchShape",
    "BlockHash",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "Breakpoint",
    "CacheStats",
    "CapacityError",
    "CorruptBlockError",
    "Embeddings",
    "Explanation",
    "Extra",
    "Fence",
    "GroupStats",
    "GroupTables",
    "IntegrityError",
    "KVCacheSpec",
    "KVEvent",
    "KVGroup",
    "KVLayout",
    "KVPages",
    "Match",
    "Media",
    "OutOfBlocksError",
    "PagedKVCache",
    "PagedKVError",
    "PoolSnapshot",
    "RankError",
    "Retention",
    "Sequence",
    "ShapeError",
    "SharedPrefixes",
    "SpecError",
    "StateError",
    "Step",
    "StepTables",
    "TenantUsage",
    "TierError",
    "TierFullError",
    "Usage",
    "UsageError",
    "VLLMScheme",
    "__version__",
    "hash_blocks",
    "hash_blocks_batch",
    "media_digest",
]

_NEEDS_TORCH = {
    "AttentionMetadata": "batch",
    "BatchShape": "batch",
    "KVPages": "pages",
    "PagedKVCache": "cache",
    "SharedPrefixes": "batch",
}
if find_spec("torch") is None:  # so that `from pagedkv import *` gives what there is
    __all__ = [name for name in __all__ if name not in _NEEDS_TORCH]


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'pagedkv' has no attribute {name!r}")
    try:
        module = import_module(f"pagedkv.{_NEEDS_TORCH[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = f"pagedkv.{name}: expected torch, got none installed; pip install 'pagedkv[torch]'"
        raise BackendUnavailableError(message) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
