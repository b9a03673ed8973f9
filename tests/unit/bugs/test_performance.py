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

from pagedkv import BlockPool, Sequence, Step, hash_blocks, hash_blocks_batch, hashing
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


def lets_others_run(make: Callable[[], Any], call: Callable[[Any], object], attempts: int = 500) -> bool:
    """Whether a thread that wakes every 0.2 ms ever gets a turn inside the call."""
    num_ticks, is_over = 0, threading.Event()

    def tick() -> None:
        nonlocal num_ticks
        while not is_over.is_set():
            num_ticks += 1
            time.sleep(0.0002)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for _ in range(attempts):
            argument = make()
            time.sleep(0.001)  # the other gets its turn before the call
            before = num_ticks
            result = call(argument)  # kept: to drop it may well let others run
            if num_ticks > before:
                return True
            del argument, result
    finally:
        is_over.set()
        thread.join()
    return False


TOKENS = np.arange(400_000, dtype=np.uint32)


def opened() -> Sequence:
    """A prompt in a pool of 25,000 blocks, which it will fill; and what becomes of it."""
    return BlockPool(25_000).open(TOKENS)


def reserved() -> Step:
    seq = opened()
    return seq.pool.reserve(seq, len(TOKENS))


def computed() -> Sequence:
    [seq] = (step := reserved()).sequences
    seq.pool.commit(step)
    return seq


def released() -> BlockPool:
    (seq := computed()).close()
    return seq.pool


LONG_CALLS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "match": (released, lambda pool: pool.match(TOKENS)),
    "match_lengths": (released, lambda pool: pool.match_lengths([TOKENS] * 4)),
    "touch": (released, lambda pool: pool.touch(TOKENS)),
    "open": (released, lambda pool: pool.open(TOKENS)),
    "reserve": (opened, lambda seq: seq.pool.reserve(seq, len(TOKENS))),
    "prepare": (reserved, lambda step: step.pool.prepare(step)),
    "commit": (reserved, lambda step: step.pool.commit(step)),
    "abandon": (reserved, lambda step: step.pool.abandon(step)),
    "block_hashes": (computed, lambda seq: seq._core.block_hashes()),
    "fork": (computed, lambda seq: seq.fork()),
    "truncate": (computed, lambda seq: seq.truncate(0)),
    "preempt": (computed, lambda seq: seq.preempt()),
    "close": (computed, lambda seq: seq.close()),
    "evict": (released, lambda pool: pool.evict(25_000)),
    "reset": (released, lambda pool: pool.reset()),
    "allocate": (released, lambda pool: pool.allocate(25_000)),
    "check_integrity": (released, lambda pool: pool.check_integrity()),
}


@pytest.mark.usefixtures("no_forced_switches")
@pytest.mark.parametrize("verb", LONG_CALLS)
def test_a_long_call_of_the_pool_lets_other_threads_run(verb: str) -> None:
    """Hashing and storing held the interpreter's lock, and the event loop stood still meanwhile (vLLM)."""
    make, call = LONG_CALLS[verb]
    assert lets_others_run(make, call)


@pytest.mark.usefixtures("no_forced_switches")
@pytest.mark.parametrize("scheme", ["sha256", "xxh3-128"])
def test_hashing_a_long_prompt_lets_other_threads_run(scheme: str) -> None:
    assert lets_others_run(lambda: None, lambda _: hash_blocks(TOKENS, scheme=scheme))
    assert lets_others_run(lambda: None, lambda _: hash_blocks_batch([TOKENS] * 2, scheme=scheme))


@pytest.mark.usefixtures("no_forced_switches")
def test_a_call_that_keeps_the_interpreter_for_itself_would_be_seen() -> None:
    assert not lets_others_run(lambda: None, lambda _: sum(range(100_000)), attempts=20)
