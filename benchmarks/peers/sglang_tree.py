"""SGLang's prefix tree and its allocator, without a model.

    python -m benchmarks.peers.sglang_tree > sglang.json

The tree is its default, the native one, with pages of one token (its default) and of 16. It hashes nothing
unless events are on. Its slots are CPU tensors without pages behind them.
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from functools import partial
from pathlib import Path

from benchmarks.peers.placeholders import stand_in

stand_in("torchvision")  # its builds need CUDA, and nothing here looks at a picture

# ruff: noqa: E402
import sglang
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_hash_str

from benchmarks import harness, prompts
from benchmarks.harness import Source, quiesce, repeated, timed
from benchmarks.prompts import BLOCK_SIZE, Prompts

Tokens = array

SERIES = {1: "SGLang", BLOCK_SIZE: "SGLang, pages of 16"}
"""By tokens in a page."""


class Tree:
    """One pool of slots and the tree over it."""

    def __init__(self, page_size: int, num_tokens: int, *, events: bool = False) -> None:
        if page_size == 1:
            self.slots = TokenToKVPoolAllocator(num_tokens, torch.float16, "cpu", None, False)
        else:
            self.slots = PagedTokenToKVPoolAllocator(num_tokens, page_size, torch.float16, "cpu", None, False)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.slots,
                page_size=page_size,
                enable_kv_cache_events=events,
                tree_components=(ComponentType.FULL,),
            )
        )

    def match(self, tokens: Tokens) -> MatchResult:
        """Find the longest cached prefix."""
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))

    def match_with_slots(self, tokens: Tokens) -> torch.Tensor:
        """Find it, and where its KV lies."""
        return self.tree.path_device_indices(self.match(tokens).last_device_node)

    def serve(self, tokens: Tokens) -> int:
        """Match a request, make room, and insert it whole; how many tokens were cached."""
        found = self.match(tokens)
        lock = self.tree.lock(found.last_device_node)
        num_new = len(tokens) - found.device_prefix_len
        if self.slots.available_size() < num_new:
            self.tree.evict(EvictParams(num_tokens=num_new - self.slots.available_size()))
        slots = self.slots.alloc(num_new)
        if slots is None:
            raise RuntimeError("the pool is full")
        if found.device_prefix_len:
            slots = torch.cat([self.tree.path_device_indices(found.last_device_node), slots])
        insert = InsertParams(key=RadixKey(tokens), value=slots, prev_prefix_len=found.device_prefix_len)
        self.tree.insert(insert)
        self.tree.unlock(lock)
        return found.device_prefix_len


def as_tokens(tokens: list[int], page_size: int = BLOCK_SIZE) -> Tokens:
    """Give a prompt as the tree takes it, cut to whole pages as its callers do."""
    return array("q", tokens[: len(tokens) // page_size * page_size])


def digest() -> Source:
    """Hash the pages of a prompt, natively."""
    tokens = as_tokens(Prompts("digest").draw(prompts.NUM_TOKENS))
    while True:
        yield {"SGLang": repeated(partial(get_hash_str, tokens, None, BLOCK_SIZE), 5, 10)}


def matching(trees: dict[int, Tree], tokens: Tokens) -> Source:
    """Match a prompt that is cached whole, with and without asking where its KV lies."""
    for tree in trees.values():
        assert tree.match(tokens).device_prefix_len == len(tokens)
    quiesce()
    while True:
        times: harness.Round = {}
        for page_size, tree in trees.items():
            series = SERIES[page_size]
            times[series] = repeated(partial(tree.match, tokens), 5, 20)
            times[f"{series}, with slots"] = repeated(partial(tree.match_with_slots, tokens), 5, 20)
        yield times


def warm() -> Source:
    """Match a prompt that one request left."""
    tokens = as_tokens(Prompts("warm").draw(prompts.NUM_TOKENS))
    trees = {page_size: Tree(page_size, 4 * 10_016) for page_size in SERIES}
    for tree in trees.values():
        tree.serve(tokens)
    yield from matching(trees, tokens)


def path() -> Source:
    """Match a prompt whose path was built by 100 requests, each of which left it 100 tokens later."""
    rows = Prompts("path")
    whole = rows.draw(prompts.NUM_TOKENS)
    trees = {page_size: Tree(page_size, 1_048_576) for page_size in SERIES}
    for end in range(prompts.SHORT_PATH_TOKENS, prompts.NUM_TOKENS + 1, prompts.SHORT_PATH_TOKENS):
        request = whole[:end] + rows.draw(prompts.SHORT_PATH_TOKENS // 2)
        for page_size, tree in trees.items():
            tree.serve(as_tokens(request, page_size))
    for tree in trees.values():
        tree.serve(as_tokens(whole))
    yield from matching(trees, as_tokens(whole))


def cold() -> Source:
    """Match and insert a prompt in an empty tree; nothing is hashed."""
    rows = Prompts("cold")
    trees = {page_size: Tree(page_size, 4 * 10_016) for page_size in SERIES}
    quiesce()
    while True:
        times: harness.Round = {}
        for page_size, tree in trees.items():
            samples = []
            for _ in range(6):
                samples.append(timed(partial(tree.serve, as_tokens(rows.draw(prompts.NUM_TOKENS)))))
                tree.tree.evict(EvictParams(num_tokens=prompts.NUM_TOKENS))
            times[SERIES[page_size]] = samples[1:]
        yield times


class Serving:
    """A full pool that serves prompts of 2,000 tokens, one at a time."""

    def __init__(self, page_size: int, *, num_heads: int, events: bool = False) -> None:
        self.tree = Tree(page_size, prompts.SERVING_BLOCKS * BLOCK_SIZE, events=events)
        self.prompts = Prompts("churn")
        self.heads = self.prompts.heads(num_heads)
        while self.tree.slots.available_size() >= prompts.NUM_SERVED_TOKENS:
            self.batch(1)
        self.batch(8)

    def samples(self) -> list[float]:
        """Take the samples of one round."""
        return [self.batch(prompts.NUM_SERVED_TOGETHER) for _ in range(prompts.BATCHES_A_ROUND)]

    def batch(self, num_prompts: int) -> float:
        """Mean time of a request, with taking the events."""
        batch = [as_tokens(tokens) for tokens in self.prompts.served(self.heads, num_prompts)]
        start_ns = time.perf_counter_ns()
        for tokens in batch:
            self.tree.serve(tokens)
            self.tree.tree.take_events()
        return (time.perf_counter_ns() - start_ns) / 1000 / num_prompts


def churn(num_heads: int = prompts.NUM_HEADS, events: bool = False) -> Source:
    """Serve prompts whose first half is shared, or that share nothing."""
    servings = {page_size: Serving(page_size, num_heads=num_heads, events=events) for page_size in SERIES}
    quiesce()
    while True:
        yield {SERIES[page_size]: serving.samples() for page_size, serving in servings.items()}


def evict(num_leaves: int = 10_000) -> Source:
    """Evict one page of 16 tokens where each page is a leaf of its own."""
    tree, rows = Tree(BLOCK_SIZE, num_leaves * BLOCK_SIZE), Prompts("evict")
    for _ in range(num_leaves):
        tree.serve(as_tokens(rows.draw(BLOCK_SIZE)))
    quiesce()
    while True:
        times = []
        for _ in range(5):
            times.append(timed(partial(tree.tree.evict, EvictParams(num_tokens=BLOCK_SIZE))))
            tree.serve(as_tokens(rows.draw(BLOCK_SIZE)))
        yield {SERIES[BLOCK_SIZE]: times}


def queue(num_heads: int) -> Source:
    """Match each request of a waiting queue, as ordering it by longest prefix does first."""
    rows = Prompts("queue")
    heads = rows.heads(num_heads)
    waiting = [as_tokens(tokens) for tokens in rows.served(heads, prompts.NUM_WAITING)]
    trees = {page_size: Tree(page_size, 2_000_000) for page_size in SERIES}
    for page_size, tree in trees.items():
        for head in heads:
            tree.serve(as_tokens(head, page_size))

    def lengths(tree: Tree) -> list[int]:
        return [tree.match(tokens).device_prefix_len for tokens in waiting]

    quiesce()
    while True:
        yield {SERIES[page_size]: repeated(partial(lengths, tree), 2) for page_size, tree in trees.items()}


ROWS: harness.Rows = {
    "digest": digest,
    "warm": warm,
    "path": path,
    "cold": cold,
    "churn": churn,
    "churn_events": partial(churn, events=True),
    "no_overlap": partial(churn, num_heads=0),
    "evict_10k": evict,
    "queue_16": partial(queue, 16),
    "queue_1024": partial(queue, 1_024),
}


if __name__ == "__main__":
    # Its native hash is compiled at first use: by this environment's ninja, and into it.
    os.environ["PATH"] = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix) / "torch_extensions")
    torch.set_num_threads(1)
    harness.main({"peer": "SGLang", "version": sglang.__version__}, ROWS)
