"""PagedKVCache refuses what it cannot take, by name, and is as it was before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pool_driving import observe
from toy_cache import MODEL, OTHER, PROMPT, checked_cache, make_cache
from toy_model import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, SPEC

import pagedkv
from pagedkv import (
    BackendUnavailableError,
    OutOfBlocksError,
    PagedKVCache,
    ShapeError,
    StateError,
    UsageError,
)


@pytest.fixture
def cache() -> Iterator[PagedKVCache]:
    yield from checked_cache()


def wrong(tensor: torch.Tensor) -> list[Any]:
    return [
        None,
        "tensor",
        tensor.tolist(),
        tensor.numpy(),
        tensor[:-1],
        tensor[0],
        tensor[:, :1],
        tensor[..., :-1],
        tensor.bfloat16(),
        tensor.double(),
        tensor.to("meta"),
    ]


@pytest.mark.parametrize("kind", range(11))
@pytest.mark.parametrize("name", ["key", "value", "query", "out"])
def test_a_wrong_tensor_is_refused_and_the_cache_is_as_before(
    cache: PagedKVCache, name: str, kind: int
) -> None:
    seq = cache.open(PROMPT[:20])
    step = cache.reserve(seq, 20)
    meta = cache.prepare(step)
    tensors = {
        "key": torch.ones(20, NUM_KV_HEADS, HEAD_DIM),
        "value": torch.ones(20, NUM_KV_HEADS, HEAD_DIM),
        "query": torch.ones(20, NUM_HEADS, HEAD_DIM),
        "out": torch.full((20, NUM_HEADS, HEAD_DIM), 7.0),
    }
    if name == "out" and kind == 0:
        kind = 1  # None asks for a new tensor
    given: dict[str, Any] = {**tensors, name: wrong(tensors[name])[kind]}
    before = observe(cache.pool, seq)
    pages = cache.pages.blocks.clone()
    calls: dict[str, Callable[[], Any]] = {
        "write_kv": lambda: cache.write(0, given["key"], given["value"], meta),
        "paged_attention": lambda: cache.attend(0, given["query"], meta, out=given["out"]),
    }
    op = "write_kv" if name in ("key", "value") else "paged_attention"
    with pytest.raises(ShapeError, match=rf"expected .*, got .*, in {op}") as caught:
        calls[op]()
    # Fewer queries are blamed on whatever does not fit them.
    assert caught.value.name in ({name, "out"} if name == "query" else {name})
    assert observe(cache.pool, seq) == before
    assert torch.equal(cache.pages.blocks.view(torch.int32), pages.view(torch.int32))
    assert bool((tensors["out"] == 7).all())
    # ... and the step goes on.
    MODEL.check(MODEL.forward(cache, meta), meta, [seq])
    cache.commit(step)


@pytest.mark.parametrize("layer", [-1, 2, 2**70, True, 1.0, None, "0", [], torch.tensor(0)])
def test_an_unknown_layer_is_refused(cache: PagedKVCache, layer: Any) -> None:
    meta = cache.prepare(cache.reserve(cache.open([1]), 1))
    kv, query = torch.ones(1, NUM_KV_HEADS, HEAD_DIM), torch.ones(1, NUM_HEADS, HEAD_DIM)
    for call in (lambda: cache.write(layer, kv, kv, meta), lambda: cache.attend(layer, query, meta)):
        with pytest.raises(UsageError, match=r"layer: expected one of \[0, 1\], got "):
            call()
    assert bool(cache.pages.blocks.isnan().all())


@pytest.mark.parametrize("meta", [None, "meta", {}, torch.tensor([0])])
def test_metadata_that_is_none_is_refused(cache: PagedKVCache, meta: Any) -> None:
    kv, query = torch.ones(1, NUM_KV_HEADS, HEAD_DIM), torch.ones(1, NUM_HEADS, HEAD_DIM)
    with pytest.raises(UsageError, match="write: expected an AttentionMetadata, got "):
        cache.write(0, kv, kv, meta)
    with pytest.raises(UsageError, match="attend: expected an AttentionMetadata, got "):
        cache.attend(0, query, meta)
    with pytest.raises(UsageError, match=r"write: expected an AttentionMetadata, got .*StepTables"):
        cache.write(0, kv, kv, cache.pool.prepare(cache.reserve(cache.open([1]), 1)))  # type: ignore[arg-type]


def test_attend_returns_out_and_takes_a_scale(cache: PagedKVCache) -> None:
    seq = cache.open(PROMPT[:5])
    meta = cache.prepare(cache.reserve(seq, 5))
    values = torch.arange(5.0)[:, None, None].expand(5, NUM_KV_HEADS, HEAD_DIM)
    cache.write(1, torch.randn(5, NUM_KV_HEADS, HEAD_DIM), values, meta)
    query = torch.randn(5, NUM_HEADS, HEAD_DIM)
    out = torch.full_like(query, float("nan"))
    assert cache.attend(1, query, meta, scale=0.0, out=out) is out
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0]))  # plain means
    assert not torch.allclose(cache.attend(1, query, meta), out)


VERBS: dict[str, Callable[[PagedKVCache, Any], Any]] = {
    "append": lambda cache, seq: cache.append([seq], [1]),
    "reserve": lambda cache, seq: cache.reserve([seq], [1]),
    "truncate": lambda cache, seq: cache.truncate(seq, 0),
    "preempt": lambda cache, seq: cache.preempt(seq),
    "close": lambda cache, seq: cache.close(seq),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_closed_sequence_is_refused_and_the_cache_is_as_before(cache: PagedKVCache, verb: str) -> None:
    seq, other = cache.open(PROMPT[:40]), cache.open(OTHER[:20])
    MODEL.step(cache, [seq, other])
    cache.append(seq, 1)
    cache.close(seq)
    before = observe(cache.pool, seq, other)
    with pytest.raises(StateError, match=f"{verb}: expected an open sequence, got a closed one"):
        VERBS[verb](cache, seq)
    assert observe(cache.pool, seq, other) == before


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_no_sequence_of_this_cache_is_refused(cache: PagedKVCache, verb: str) -> None:
    stranger = make_cache(4).open(PROMPT[:4])
    before = observe(cache.pool)
    none_at_all = [] if verb == "close" else [[]]  # it takes several, and so none
    for seq in (None, "seq", 5, cache, stranger, *none_at_all):
        with pytest.raises(UsageError, match=f"{verb}: expected a [Ss]equence.*, got "):
            VERBS[verb](cache, seq)
    assert observe(cache.pool) == before
    assert stranger.num_tokens == 4


@pytest.mark.parametrize("verb", ["prepare", "commit", "abandon"])
def test_what_is_no_step_of_this_cache_is_refused(cache: PagedKVCache, verb: str) -> None:
    strange_cache = make_cache(4)
    stranger = strange_cache.reserve(strange_cache.open(PROMPT[:4]), 4)
    strange_cache.prepare(stranger)
    for step in (None, "step", [], cache.open([1]), stranger):
        with pytest.raises(UsageError, match=f"{verb}: expected a .*, got "):
            getattr(cache, verb)(step)
    assert stranger.state == "prepared"


@pytest.mark.parametrize(
    "token_ids", [[], None, "text", 5, [-1], [2**32], [1.0], [True], [[1]], np.zeros((2, 2), int)]
)
def test_a_prompt_that_is_none_is_refused(cache: PagedKVCache, token_ids: Any) -> None:
    before = observe(cache.pool)
    with pytest.raises(UsageError, match="expected"):
        cache.open(token_ids)
    assert observe(cache.pool) == before


@pytest.mark.parametrize("salt", ["", b"", "s" * 129, 5, [], "\ud800"])
def test_a_salt_that_is_none_is_refused(cache: PagedKVCache, salt: Any) -> None:
    before = observe(cache.pool)
    for verb in (cache.open, cache.match):
        with pytest.raises(UsageError, match="cache_salt: expected"):
            verb(PROMPT, cache_salt=salt)
    assert observe(cache.pool) == before


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31, True, 4.0, "4", None])
def test_a_cache_of_no_blocks_is_refused(num_blocks: Any) -> None:
    with pytest.raises(UsageError, match=r"num_blocks: expected an integer.*, got "):
        PagedKVCache(SPEC, num_blocks)


@pytest.mark.parametrize("spec", [None, "spec", SPEC.groups[0], pagedkv.KVCacheSpec])
def test_a_cache_without_a_spec_is_refused(spec: Any) -> None:
    with pytest.raises(UsageError, match="spec: expected a KVCacheSpec, got "):
        PagedKVCache(spec, 4)


@pytest.mark.parametrize("options", [{"device": "nowhere"}, {"arrangement": "page"}, {"namespace": "text"}])
def test_a_cache_with_a_wrong_option_is_refused_by_its_name(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(UsageError, match=f"{name}: expected .*, got "):
        PagedKVCache(SPEC, 4, **options)


def test_a_missing_backend_is_known_when_the_cache_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailableError, match=r"backend: expected one .*, got 'cuda'"):
        PagedKVCache(SPEC, 4, backend="cuda")
    monkeypatch.setenv("PAGEDKV_BACKEND", "cuda")
    with pytest.raises(BackendUnavailableError):
        PagedKVCache(SPEC, 4)
    assert PagedKVCache(SPEC, 4, backend="reference").backend == "reference"


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    cache = make_cache(2)
    seq = cache.open(PROMPT[:33])
    before = observe(cache.pool, seq)
    with pytest.raises(OutOfBlocksError) as caught:
        cache.reserve(seq, 33)
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (3, 2, 0)
    assert observe(cache.pool, seq) == before
    MODEL.step(cache, seq, [32])  # what fits, goes


def test_metadata_is_compared_by_identity(cache: PagedKVCache) -> None:
    step = cache.reserve(cache.open(PROMPT[:20]), 20)
    first, second = cache.prepare(step), cache.prepare(step)
    assert first == first
    assert first != second
