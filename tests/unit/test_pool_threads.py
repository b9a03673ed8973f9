"""Every verb from many threads at once: nothing is lost, nothing is wrong, and refusals stay refusals."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from pool_driving import run

from pagedkv import (
    BlockPool,
    Breakpoint,
    Fence,
    OutOfBlocksError,
    Retention,
    Sequence,
    StateError,
    hash_blocks,
)

NUM_THREADS = 6
SALTS = ("red", "blue")


def work(pool: BlockPool, seed: int, all_started: threading.Barrier) -> int:
    rng = random.Random(seed)
    fences: list[Fence] = []
    num_computed = 0
    all_started.wait()
    for _ in range(200):
        tokens = [rng.randrange(2)] * rng.randrange(1, 9) + [rng.randrange(3)] * rng.randrange(1, 6)
        salt = rng.choice([None, *SALTS])
        match rng.randrange(12):
            case 0:
                pool.retain(
                    tokens, cache_salt=salt, priority=rng.randrange(101), ttl_s=rng.choice([None, 0.5])
                )
            case 1:
                pool.set_quota(rng.choice(SALTS), rng.choice([None, 0, 3, 20]))
            case 2:
                pool.explain(tokens, cache_salt=salt, across_tenants=True)
            case 3:
                pages = pool.snapshot()
                ranks = pages.eviction_rank[pages.eviction_rank >= 0]
                assert sorted(ranks.tolist()) == list(range(len(ranks)))
            case 4:
                assert (
                    len(pool.lookup(hash_blocks(tokens, block_size=4, cache_salt=salt))) <= len(tokens) // 4
                )
            case 5:
                pool.advance(rng.random())
            case 6 if rng.randrange(5) == 0:
                pool.bump_generation()
            case 7 if fences:
                fences.pop(rng.randrange(len(fences))).release()
            case _:
                with contextlib.suppress(OutOfBlocksError):
                    num_computed += request(pool, rng, tokens, salt, fences)
        if len(fences) > 2:
            del fences[0]  # the garbage collector releases it
    for fence in fences:
        fence.release()
    return num_computed


def request(
    pool: BlockPool, rng: random.Random, tokens: list[int], salt: str | None, fences: list[Fence]
) -> int:
    options = rng.choice(
        [
            {},
            {"retention": [Retention(0, None, rng.randrange(101), 1.0)]},
            {"breakpoints": [Breakpoint(len(tokens) // 2, 2.0), Breakpoint(len(tokens), 1.0)]},
            {"no_cache": [(len(tokens) // 2, len(tokens))]},
        ]
    )
    with pool.open(tokens, cache_salt=salt, **options) as seq:
        run(pool, seq)
        assert seq.usage.num_tokens == len(tokens)
        if rng.randrange(3) == 0:
            fences.append(pool.fence(seq))
        if rng.randrange(3) == 0:
            seq.preempt()
        seq.append(rng.randrange(3))
        run(pool, seq)
        return seq.num_computed_tokens


def test_threads_use_every_verb_of_one_pool() -> None:
    pool = BlockPool(48, block_size=4, clock="manual", events=True)
    all_started = threading.Barrier(NUM_THREADS)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        results = [threads.submit(work, pool, seed, all_started) for seed in range(NUM_THREADS)]
        while wait(results, timeout=0.001).not_done:
            pool.check_integrity()
            pool.take_events()
            stats = pool.stats()
            by_state = stats.num_free_blocks + stats.num_writable_blocks
            assert by_state + stats.num_committed_blocks + stats.num_evictable_blocks == 48
            assert stats.num_cached_tokens <= stats.num_prompt_tokens
    assert min(result.result() for result in results) > 0
    pool.check_integrity()
    stats = pool.stats()
    assert stats.num_fenced_blocks == 0
    assert stats.num_free_blocks + stats.num_evictable_blocks == 48
    for salt in SALTS:
        pool.set_quota(salt, None)
    assert pool.reset()
    assert pool.tenants() == {}
    pool.check_integrity()


def test_of_many_threads_that_end_one_thing_exactly_one_does() -> None:
    """A release that two threads made at once was made twice, and another's reference went with it."""
    pool = BlockPool(4, block_size=4)
    for _ in range(50):
        seq = pool.open(range(6))
        run(pool, seq)
        fence = pool.fence(seq)
        all_started = threading.Barrier(NUM_THREADS)

        def end(
            verb: str, seq: Sequence = seq, fence: Fence = fence, go: threading.Barrier = all_started
        ) -> bool:
            go.wait()
            try:
                fence.release() if verb == "release" else seq.close()
            except StateError:
                return False
            return True

        with ThreadPoolExecutor(NUM_THREADS) as threads:
            verbs = ["release", "close"] * (NUM_THREADS // 2)
            ended = list(threads.map(end, verbs))
        assert sum(ended[0::2]) == sum(ended[1::2]) == 1
        pool.check_integrity()
        assert pool.stats().num_free_blocks + pool.stats().num_evictable_blocks == 4


SERVER_THAT_FORKS = """
import os, threading
import numpy as np
from pagedkv import BlockPool

pool, tokens = BlockPool(256), np.arange(160)
held = pool.open(tokens)
pool.commit(pool.reserve(held, 160))
is_over = False

def serve(first):
    while not is_over:
        with pool.open(np.arange(first, first + 320)) as seq:
            if seq.num_uncached_tokens:
                pool.commit(pool.reserve(seq, seq.num_uncached_tokens))
        pool.set_quota("tenant", first), pool.snapshot()

threads = [threading.Thread(target=serve, args=(1000 * i,)) for i in range(3)]
for thread in threads:
    thread.start()
for _ in range(60):
    child = os.fork()
    if child == 0:
        pool.check_integrity()
        assert pool.match(tokens).num_block_tokens == held.num_tokens
        held.close()
        with pool.open(np.arange(5000, 5400)) as seq:
            pool.commit(pool.reserve(seq, seq.num_uncached_tokens))
        assert (pool.snapshot().state > 0).any()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
is_over = True
for thread in threads:
    thread.join()
pool.check_integrity()
assert not held.is_closed
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_the_child_of_a_fork_has_a_whole_pool_of_its_own_whatever_threads_were_in_it() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", SERVER_THAT_FORKS], check=True, timeout=60)


SERVER_THAT_ENDS = """
import threading, time
import numpy as np
from pagedkv import BlockPool

pool, tokens = BlockPool(64), np.arange(40)
held = pool.open(tokens)
step = pool.reserve(held, 40)
fence = pool.fence(held)

def serve():
    while True:
        with pool.open(tokens) as seq:
            pool.commit(pool.reserve(seq, seq.num_uncached_tokens))

for _ in range(3):
    threading.Thread(target=serve, daemon=True).start()
time.sleep(0.1)
"""


def test_a_process_ends_in_order_while_daemon_threads_are_inside_the_pool() -> None:
    for _ in range(5):
        ended = subprocess.run(
            [sys.executable, "-c", SERVER_THAT_ENDS], capture_output=True, text=True, timeout=60
        )
        assert (ended.returncode, ended.stderr) == (0, "")
