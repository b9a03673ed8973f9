"""Snapshots made by hand, for what reads and draws them."""

from __future__ import annotations

import numpy as np

from pagedkv.snapshot import PoolSnapshot


def empty_snapshot(num_blocks: int) -> PoolSnapshot:
    """Every page free."""

    def full(value: float, dtype: type) -> np.ndarray:
        return np.full(num_blocks, value, dtype)

    return PoolSnapshot(
        state=full(0, np.uint8),
        num_refs=full(0, np.int32),
        depth=full(-1, np.int32),
        parent=full(-1, np.int32),
        priority=full(35, np.uint8),
        retained_s=full(0, np.float32),
        idle_s=full(np.nan, np.float32),
        eviction_rank=full(-1, np.int32),
        tenant=full(-1, np.int32),
        salts=[],
        block_size=16,
        now_s=12.5,
    )


def small_snapshot() -> PoolSnapshot:
    """Eight pages: a public block with those of two tenants below it, a request that runs, and two free."""
    snapshot = empty_snapshot(8)._replace(salts=[b"tenant-a", b"\xff\x00"])
    snapshot.state[:] = [2, 3, 3, 3, 2, 1, 0, 0]
    snapshot.num_refs[:6] = [2, 0, 0, 0, 1, 1]
    snapshot.depth[:5] = [0, 1, 1, 2, 1]
    snapshot.parent[1:5] = [0, 0, 2, 0]
    snapshot.priority[0] = 70
    snapshot.priority[3] = 10
    snapshot.retained_s[0] = np.inf
    snapshot.retained_s[3] = 2.5
    snapshot.idle_s[1:4] = [9.0, 0.25, 0.25]
    snapshot.eviction_rank[1:4] = [1, 2, 0]
    snapshot.tenant[1:5] = [0, 1, 1, 0]
    return snapshot
