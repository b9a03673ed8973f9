"""Work that grows faster than what is asked for, and calls that stop everybody else: counted, not timed."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from pool_driving import compute

from pagedkv import BlockPool, Fence, Sequence, Step, hash_blocks, hash_blocks_batch, hashing
from pagedkv.schemes import vllm

# ---------------------------------------------------------------------- hashing


@pytest.mark.parametrize("scheme", ["reference", "sha256-vllm", "sha256-cbor-vllm"])
def test_twice_the_tokens_are_twice_the_bytes_to_hash(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block's name was made from the whole prefix again, at the square of the cost (aibrix)."""
    hashed: list[int] = []

    def counting(data: bytes) -> Any:
        hashed.append(len(data))
        return hashlib.sha256(data)

    monkeypatch.setattr(hashing, "sha256", counting)
    monkeypatch.setattr(vllm, "sha256", counting)
    work = {}
    for num_tokens in (16_384, 32_768):
        hashed.clear()
        if scheme == "reference":
            names = hashing.reference_hash_blocks(range(num_tokens))
        else:
            names = hash_blocks(range(num_tokens), scheme=scheme)
        assert len(names) == num_tokens // 16
        assert len(names) <= len(hashed) <= len(names) + 2  # and what the chain begins with
        work[num_tokens] = sum(hashed)
    assert work[32_768] <= 2.1 * work[16_384]


# ---------------------------------------------------------------------- other threads


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """Threads take turns only where one of them lets go of the interpreter's lock by itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


class Ticker:
    """A thread that counts its turns, one every 0.2 ms; a context manager that ends it."""

    def __init__(self) -> None:
        self.num_ticks = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._tick)

    def _tick(self) -> None:
        while not self._is_over.is_set():
            self.num_ticks += 1
            time.sleep(0.0002)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def has_turns_inside(self, call: Callable[[], object]) -> bool:
        before = self.num_ticks
        result = call()  # kept: to drop it may well let others run
        after = self.num_ticks
        del result
        return after > before


TOKENS = np.arange(2_000_000, dtype=np.uint32)


@pytest.mark.usefixtures("no_forced_switches")
@pytest.mark.parametrize("scheme", ["sha256", "xxh3-128"])
def test_hashing_a_long_prompt_lets_other_threads_run(scheme: str) -> None:
    """The event loop stood still while a long prompt was hashed (vLLM)."""
    calls: list[Callable[[], object]] = [
        lambda: hash_blocks(TOKENS, scheme=scheme),
        lambda: hash_blocks_batch([TOKENS] * 2, scheme=scheme),
    ]
    with Ticker() as ticker:
        for call in calls:
            assert any(ticker.has_turns_inside(call) for _ in range(50))


def _pool(pool: BlockPool) -> BlockPool:
    return pool


def _opened(pool: BlockPool) -> Sequence:
    return pool.open(range(500, 540))


def _reserved(pool: BlockPool) -> Step:
    seq = _opened(pool)
    return pool.reserve(seq, seq.num_uncached_tokens)


def _computed(pool: BlockPool) -> Sequence:
    return compute(pool, range(33))


def _fenced(pool: BlockPool) -> Fence:
    return pool.fence(_computed(pool))


# Each: what it needs, made before, and the call.
SHORT_CALLS: dict[str, tuple[Callable[[BlockPool], Any], Callable[[Any], object]]] = {
    "match": (_pool, lambda pool: pool.match(range(40))),
    "match_lengths": (_pool, lambda pool: pool.match_lengths([range(40)])),
    "touch": (_pool, lambda pool: pool.touch(range(40))),
    "retain": (_pool, lambda pool: pool.retain(range(40))),
    "open": (_pool, lambda pool: pool.open(range(40))),
    "append": (_computed, lambda seq: seq.append(1)),
    "truncate": (_computed, lambda seq: seq.truncate(3)),
    "fork": (_computed, lambda seq: seq.fork()),
    "no_cache": (_computed, lambda seq: seq.no_cache(35)),
    "preempt": (_computed, lambda seq: seq.preempt()),
    "close": (_computed, lambda seq: seq.close()),
    "fence": (_computed, lambda seq: seq.pool.fence(seq)),
    "release": (_fenced, lambda fence: fence.release()),
    "reserve": (_opened, lambda seq: seq.pool.reserve(seq, 1)),
    "prepare": (_reserved, lambda step: step.pool.prepare(step)),
    "commit": (_reserved, lambda step: step.pool.commit(step)),
    "abandon": (_reserved, lambda step: step.pool.abandon(step)),
    "allocate": (_pool, lambda pool: pool.allocate(1)),
    "free": (lambda pool: (pool, pool.allocate(1)), lambda taken: taken[0].free(taken[1])),
    "evict": (_pool, lambda pool: pool.evict(1)),
    "reset": (_pool, lambda pool: pool.reset()),
    "bump_generation": (_pool, lambda pool: pool.bump_generation()),
    "set_quota": (_pool, lambda pool: pool.set_quota("red", 3)),
    "tenant_usage": (_pool, lambda pool: pool.tenant_usage("red")),
    "tenants": (_pool, lambda pool: pool.tenants()),
    "explain": (_pool, lambda pool: pool.explain(range(40))),
    "lookup": (_pool, lambda pool: pool.lookup([bytes(32)])),
    "snapshot": (_pool, lambda pool: pool.snapshot()),
    "stats": (_pool, lambda pool: pool.stats()),
    "take_events": (_pool, lambda pool: pool.take_events()),
    "digest_of": (_pool, lambda pool: pool.digest_of(0)),
    "check_integrity": (_pool, lambda pool: pool.check_integrity()),
    "now_s": (_pool, lambda pool: pool.now_s),
    "block_hashes": (_computed, lambda seq: seq.block_hashes),
    "num_tokens": (_computed, lambda seq: seq.num_tokens),
    "num_cached_tokens": (_computed, lambda seq: seq.num_cached_tokens),
    "num_committed_tokens": (_computed, lambda seq: seq.num_committed_tokens),
    "num_releasable_blocks": (_computed, lambda seq: seq.num_releasable_blocks),
    "token_ids": (_computed, lambda seq: seq.token_ids),
    "block_ids": (_computed, lambda seq: seq.block_ids),
    "usage": (_computed, lambda seq: seq.usage),
    "is_closed": (_computed, lambda seq: seq.is_closed),
    "state": (_reserved, lambda step: step.state),
    "is_released": (_fenced, lambda fence: fence.is_released),
}


@pytest.fixture(scope="module")
def large_pool() -> BlockPool:
    return BlockPool(100_000, events=True)


@pytest.mark.usefixtures("no_forced_switches")
@pytest.mark.parametrize("verb", SHORT_CALLS)
def test_a_call_that_waits_for_the_pool_lets_other_threads_run(large_pool: BlockPool, verb: str) -> None:
    """Who waited for a store to end held the interpreter's lock, so nobody could decode (LMCache)."""
    make, call = SHORT_CALLS[verb]
    with Ticker() as ticker:
        for _ in range(20):
            argument = make(large_pool)
            in_the_way = threading.Thread(target=large_pool.check_integrity)  # some 50 ms
            in_the_way.start()
            time.sleep(0.002)
            was_let = ticker.has_turns_inside(lambda: call(argument))  # noqa: B023
            in_the_way.join()
            if was_let:
                return
    raise AssertionError(f"{verb} holds the interpreter's lock while it waits for the pool's")


@pytest.mark.usefixtures("no_forced_switches")
def test_a_call_that_keeps_the_interpreter_for_itself_would_be_seen() -> None:
    with Ticker() as ticker:
        for _ in range(20):
            time.sleep(0.001)
            assert not ticker.has_turns_inside(lambda: sum(range(100_000)))
