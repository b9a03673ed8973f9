"""The pool alone: no torch, no model, no tensors. For routers, schedulers and simulators.

A pool decides which pages a request uses and what is cached; who fills the pages is not its business.
"""

from __future__ import annotations

import numpy as np

from pagedkv import AllBlocksCleared, BlockPool, BlockRemoved, BlockStored, KVEvent


def serve(pool: BlockPool, prompt: list[int]) -> int:
    """Do what an engine does for a prompt, but for the computing; return how many tokens were cached."""
    with pool.open(prompt) as seq:  # finds the longest cached prefix and references its pages
        num_cached = seq.num_cached_tokens
        step = pool.reserve(seq, seq.num_uncached_tokens)  # takes pages for the rest, evicting if need be
        tables = pool.prepare(step)  # what a kernel would read and write
        assert len(tables.slot_mapping) == len(prompt) - num_cached
        pool.commit(step)  # from here on others find its full blocks
    return num_cached  # closed: the pages stay cached until somebody needs the room


def follow(index: set[bytes], events: list[KVEvent]) -> None:
    """Keep a copy of the index, as a router does from the events of an engine elsewhere."""
    for event in events:
        match event:
            case BlockStored(block_hashes=hashes):
                index |= set(hashes)
            case BlockRemoved(block_hashes=hashes):
                index -= set(hashes)
            case AllBlocksCleared():
                index.clear()


def main() -> None:
    """Serve four prompts from a small pool, and ask it why one of them missed."""
    pool = BlockPool(num_blocks=64, namespace=b"some-model/bfloat16", events=True)
    tokens = np.random.default_rng(0).integers(0, 50_000, 1_000).tolist()

    print(f"cold:                {serve(pool, tokens):5} of 1,000 tokens cached")
    print(f"again:               {serve(pool, tokens):5} (62 whole blocks: no other is published)")
    other = [*tokens[:700], 1, *tokens[701:]]
    print(f"differs at 700:      {serve(pool, other):5} (43 whole blocks and 12 tokens of the next)")

    router: set[bytes] = set()
    follow(router, pool.take_events())
    print(f"a router knows of    {len(router):5} blocks, the pool has {pool.stats().num_nodes}")

    serve(pool, list(range(800)))  # needs 50 of the 64 pages
    follow(router, pool.take_events())
    print(f"after another prompt {len(router):5} blocks")
    print(f"why the first one is no longer cached as a whole: {pool.explain(tokens)}")
    pool.check_integrity()


if __name__ == "__main__":
    main()
