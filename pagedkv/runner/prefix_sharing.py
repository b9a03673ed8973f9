"""Whether a request had better wait until another one has computed what both begin with."""

from __future__ import annotations

from collections.abc import Iterable

from pagedkv.pool import BlockPool
from pagedkv.runner.job import Job


def awaits_prefix(job: Job, running: Iterable[Job], pool: BlockPool) -> bool:
    """Return whether a running prompt will publish the first block that the cache lacks of `job`'s prompt."""
    if not job.reads_cache:
        return False
    key, block_size = job.request.key, pool.block_size
    # Without a first block in common there is nothing to look up.
    alike = [
        other.request.key
        for other in running
        if other.is_prefilling and key.begins_like(other.request.key, block_size)
    ]
    if not alike:
        return False
    request = job.request
    match = pool.match(key.token_ids, cache_salt=request.cache_salt, extras=request.extras)
    needed = match.num_block_tokens + block_size
    return any(key.begins_like(other, needed) for other in alike)
