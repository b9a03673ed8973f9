"""How the public names are typed, for an engine's author who runs a type checker. Checked, never run."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import assert_type

import pagedkv
from pagedkv import ops
from pagedkv.config import Backend

# The shape of a model
spec = pagedkv.KVCacheSpec.uniform(32, 8, 128, "bfloat16")
assert_type(spec, pagedkv.KVCacheSpec)
assert_type(spec.groups, tuple[pagedkv.KVGroup, ...])
assert_type(spec.bytes_per_block, int)
assert_type(spec.blocks_in("2GiB"), int)
assert_type(spec.blocks_in(2**31), int)
pagedkv.KVCacheSpec((pagedkv.KVGroup(layers=(0, 1), num_kv_heads=2, head_dim=64),), layout="HND")
pagedkv.KVCacheSpec((), layout="NDH")  # type: ignore[arg-type]

# Digests
assert_type(pagedkv.hash_blocks(range(48), cache_salt="tenant"), list[pagedkv.BlockHash])
assert_type(pagedkv.hash_blocks_batch([[1, 2], [3]]), list[list[pagedkv.BlockHash]])

# One request through a cache
cache = pagedkv.PagedKVCache(spec, 100, device="cpu", arrangement="layer", backend="reference")
pagedkv.PagedKVCache(spec, 100, arrangement="page")  # type: ignore[arg-type]
pagedkv.PagedKVCache(spec, 100, backend="cublas")  # type: ignore[arg-type]
pagedkv.PagedKVCache(spec, 100, "cpu")  # type: ignore[call-arg]
assert_type(cache.pool, pagedkv.BlockPool)
assert_type(cache.pages, pagedkv.KVPages)
assert_type(cache.pages[0], tuple[torch.Tensor, torch.Tensor])
assert_type(cache.device, torch.device)

with cache.open([1, 2, 3], cache_salt=b"tenant", extras=[pagedkv.Extra(200, b"own")]) as seq:
    assert_type(seq, pagedkv.Sequence)
    assert_type(seq.num_cached_tokens, int)
    assert_type(seq.token_ids, npt.NDArray[np.uint32])
    assert_type(seq.block_ids, npt.NDArray[np.int32])
    assert_type(seq.block_hashes, list[pagedkv.BlockHash])
    assert_type(seq.is_closed, bool)

    step = cache.reserve([seq], [seq.num_uncached_tokens])
    assert_type(step, pagedkv.Step)
    assert_type(cache.reserve(seq, 1), pagedkv.Step)
    assert_type(step.sequences, tuple[pagedkv.Sequence, ...])
    assert_type(step.copies, list[tuple[int, int, int]])
    cache.reserve([seq], num_tokens=[1])  # type: ignore[call-arg]

    meta = cache.prepare(step)
    assert_type(meta, pagedkv.AttentionMetadata)
    assert_type(meta.slot_mapping, torch.Tensor)
    assert_type(meta.max_query_len, int)
    assert_type(meta.last_token_index, torch.Tensor)
    assert_type(meta.csr(), tuple[torch.Tensor, torch.Tensor, torch.Tensor])
    meta.num_seqs = 2  # type: ignore[misc]

    q = k = v = torch.zeros(3, 8, 128)
    cache.write(0, k, v, meta)
    assert_type(cache.attend(0, q, meta, scale=0.5, out=q), torch.Tensor)
    cache.write(0, k, v)  # type: ignore[call-arg]
    cache.attend(0, q, meta, 0.5)  # type: ignore[call-arg]

    cache.commit(step)
    cache.commit(step, num_accepted=[2])
    cache.append([seq], [[4, 5]])
    cache.append(seq, 6)
    cache.truncate(seq, 2)
    cache.preempt(seq)

# The pool alone
pool = pagedkv.BlockPool(8, namespace=b"model")
match = pool.match(np.arange(48))
assert_type(match, pagedkv.Match)
assert_type(match.num_tokens, int)
assert_type(match.block_ids, npt.NDArray[np.int32])
assert_type(pool.prepare(pool.reserve(pool.open([1]), 1)), pagedkv.StepTables)
assert_type(pool.allocate(2), npt.NDArray[np.int32])
assert_type(pool.evict(1), int)
assert_type(pool.reset(), bool)
assert_type(pool.digest_of(0), pagedkv.BlockHash | None)
stats = cache.stats()
assert_type(stats, pagedkv.CacheStats)
assert_type(stats.num_evictable_blocks, int)
assert_type(stats.hit_rate, float)

# The operations
assert_type(ops.resolve_backend(None, torch.device("cpu")), Backend)
pages, table, lens = cache.pages[0], meta.block_table, meta.seq_lens
assert_type(ops.paged_attention(q, *pages, table, lens, meta.query_start_loc), torch.Tensor)
ops.write_kv(k, v, *pages, meta.slot_mapping, "reference")  # type: ignore[arg-type, call-arg]


# Errors
def retry(seqs: list[pagedkv.Sequence], counts: Iterable[int]) -> int:
    try:
        cache.reserve(seqs, counts)
    except pagedkv.OutOfBlocksError as error:
        assert_type(error.needed, int)
        return error.needed - error.free - error.evictable
    except pagedkv.ShapeError as error:
        assert_type(error.name, str)
    return 0
