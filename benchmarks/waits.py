"""How long other calls wait for the pool's longest ones, in a pool of a million blocks.

    python -m benchmarks.waits

While one thread makes a long call, another matches a prompt of one block again and again. Stated is the
longest that such a match took. All is done three times, of which the least counts: what is more is the
machine's, which takes a processor away for some milliseconds now and then.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from pagedkv import BlockPool

BLOCK = 16
BLOCKS_A_PROMPT = 64
TOKENS = 1_000_000
SALT = "tenant"

Call = Callable[[], object]
Case = tuple[str, Call]


class Waits(NamedTuple):
    """How long a call took, and the longest match beside it, in microseconds."""

    call: float
    longest: float


def prompt(number: int, num_blocks: int = BLOCKS_A_PROMPT) -> np.ndarray[Any, Any]:
    """Tokens that no other number has."""
    tokens = np.arange(num_blocks * BLOCK, dtype=np.int32)
    tokens[0] = number
    return tokens


def fill(pool: BlockPool, first: int, num_blocks: int) -> None:
    """Publish so many blocks and leave them."""
    for number in range(first, first + num_blocks // BLOCKS_A_PROMPT):
        with pool.open(prompt(number), cache_salt=SALT) as seq:
            pool.commit(pool.reserve(seq, seq.num_uncached_tokens))


def filled(num_blocks: int, *, policy: str = "lru", events: bool = False) -> BlockPool:
    """Make a pool that is full of what can be evicted."""
    pool = BlockPool(num_blocks, policy=policy, events=events)
    fill(pool, 0, num_blocks)
    return pool


def beside(call: Call, pool: BlockPool) -> Waits:
    """Make the call while another thread matches."""
    times: list[float] = []
    is_over, has_begun = threading.Event(), threading.Event()
    tokens = prompt(2**30, 1)

    def match() -> None:
        clock = time.perf_counter
        while not is_over.is_set():
            begin = clock()
            pool.match(tokens)
            times.append(clock() - begin)
            if len(times) == 100:
                has_begun.set()

    thread = threading.Thread(target=match)
    thread.start()
    has_begun.wait()
    first, begin = len(times), time.perf_counter()
    kept = call()  # Python's freeing of what it gives is not the pool's
    took = time.perf_counter() - begin
    is_over.set()
    thread.join()
    del kept
    return Waits(took * 1e6, max(times[first:]) * 1e6)


def of_all(num_blocks: int) -> Iterator[tuple[BlockPool, Case]]:
    """Each long call with its name and its pool."""
    pool = filled(num_blocks)
    cases: list[Case] = [
        ("nothing, for 0.2 s", lambda: time.sleep(0.2)),
        ("`snapshot`", pool.snapshot),
        ("`set_quota`, a tenant's first", lambda: pool.set_quota(SALT, num_blocks)),
        ("`set_quota(…, None)`", lambda: pool.set_quota(SALT, None)),
        ("`lookup`, the first", lambda: pool.lookup([bytes(32)])),
        ("`check_integrity`", pool.check_integrity),
    ]
    for case in cases:
        yield pool, case
    tokens, held = np.arange(TOKENS, dtype=np.int32) + 2**20, list[Any]()
    cases = [
        ("`open` of 1,000,000 tokens", lambda: held.append(pool.open(tokens))),
        ("`reserve` of these, 62,500 evictions", lambda: held.append(pool.reserve(held[0], TOKENS))),
        ("`commit`", lambda: pool.commit(held[1])),
        ("`close`", lambda: pool.close(held[0])),
        ("`open` when they are cached", lambda: held.append(pool.open(tokens))),
        ("`fork`", lambda: held.append(pool.fork(held[2]))),
        ("`close` of both", lambda: pool.close([held[2], held[3]])),
        ("`touch`", lambda: pool.touch(tokens)),
        ("`retain`", lambda: pool.retain(tokens)),
        ("`explain` of what was never there", lambda: pool.explain(prompt(2**29))),
        ("`bump_generation`", pool.bump_generation),
        ("`evict(100_000)`", lambda: pool.evict(100_000)),
        ("`reset`", pool.reset),
    ]
    for case in cases:
        yield pool, case


def of_hazard(num_blocks: int) -> Iterator[tuple[BlockPool, Case]]:
    """Likewise where the policy needs leaves."""
    pool = filled(num_blocks, policy="hazard")
    queue = [prompt(number) for number in range(1024)]
    cases: list[Case] = [
        ("`snapshot`", pool.snapshot),
        ("`set_quota`, a tenant's first", lambda: pool.set_quota(SALT, num_blocks)),
        ("`set_quota(…, None)`", lambda: pool.set_quota(SALT, None)),
        ("`waiting` of 1,024 prompts", lambda: pool.waiting(queue, cache_salts=[SALT] * 1024)),
        ("`waiting` of none", lambda: pool.waiting([])),
        ("`bump_generation`", pool.bump_generation),
    ]
    for name, call in cases:
        yield pool, (f"hazard: {name}", call)


def of_events(num_blocks: int) -> Iterator[tuple[BlockPool, Case]]:
    """Likewise with events, taken in time and too late."""
    pool = filled(num_blocks, events=True)
    yield pool, ("`take_events`, all blocks", pool.take_events)
    fill(pool, 10**6, 3 * num_blocks)
    yield pool, ("`take_events`, told anew", pool.take_events)
    fill(pool, 10**7, num_blocks - num_blocks // 8)
    more = num_blocks // 4
    yield pool, ("publishing beyond what is kept of events", lambda: fill(pool, 2 * 10**7, more))


def of_tenants(num_blocks: int) -> Iterator[tuple[BlockPool, Case]]:
    """Likewise where each block has a tenant of its own."""
    pool = BlockPool(num_blocks)

    def serve() -> None:
        for i in range(num_blocks):
            with pool.open(prompt(i, 1), cache_salt=f"tenant {i}") as seq:
                pool.commit(pool.reserve(seq, BLOCK))

    yield pool, ("publishing for a million tenants", serve)
    yield pool, ("`tenants`, a million", pool.tenants)
    yield pool, ("`snapshot` of a million tenants", pool.snapshot)


CASES = (of_all, of_hazard, of_events, of_tenants)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=2**20)
    parser.add_argument("--only", default="", help="of the groups of calls, such as of_hazard")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    sys.setswitchinterval(50e-6)  # else it is Python's lock that is waited for, up to 5 ms
    found: dict[str, list[Waits]] = {}
    for each in CASES:
        for _ in range(args.rounds if each is not of_tenants else 1):
            if args.only not in each.__name__:
                continue
            for pool, (name, call) in each(args.blocks):
                gc.disable()
                found.setdefault(name, []).append(beside(call, pool))
                gc.enable()
                print(name, found[name][-1], file=sys.stderr, flush=True)
            del pool, call
            gc.collect()
    print("| call | takes, ms | longest wait of a match, µs |\n|---|---|---|")
    for name, waits in found.items():
        call, longest = (min(values) for values in zip(*waits, strict=True))
        print(f"| {name} | {call / 1000:,.1f} | {longest:,.0f} |")


if __name__ == "__main__":
    main()
