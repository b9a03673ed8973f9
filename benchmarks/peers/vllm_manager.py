"""vLLM's KV-cache manager, without a model.

    python -m benchmarks.peers.vllm_manager > vllm.json

What its scheduler asks of it for a request: hash the prompt, look for cached blocks, allocate the rest, free.
The pool holds pages of 16 tokens and nothing else; the hash is SHA-256 of pickled tokens, its default.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
import vllm
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from benchmarks import harness, prompts
from benchmarks.harness import Source, quiesce, repeated, timed
from benchmarks.prompts import BLOCK_SIZE, Prompts

Hasher = Callable[[Request], list[bytes]]

MAX_MODEL_LEN = 65_536
SAMPLING = SamplingParams(max_tokens=4096)


def make_hasher() -> Hasher:
    """Hash whole blocks as its engine does by default."""
    function = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(function)
    return kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, function)


class Manager:
    """One pool, and requests to it."""

    def __init__(self, num_blocks: int, *, caching: bool = True, events: bool = False) -> None:
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        config = KVCacheConfig(
            num_blocks=num_blocks + 1,  # one is its null block
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            enable_caching=caching,
            log_stats=True,
            enable_kv_cache_events=events,
        )
        self.hasher = make_hasher() if caching else None
        self.num_requests = 0

    def request(self, tokens: list[int], hasher: Hasher | None) -> Request:
        """Make a request; with a hasher, its blocks are hashed here and whenever one fills up."""
        self.num_requests += 1
        return Request(
            request_id=str(self.num_requests),
            prompt_token_ids=tokens,
            sampling_params=SAMPLING,
            pooling_params=None,
            block_hasher=hasher,
        )

    def admit(self, request: Request) -> int:
        """Look for cached blocks and allocate the others; how many tokens were cached."""
        blocks, num_cached, _ = self.manager.get_computed_blocks(request)
        num_new = request.num_tokens - num_cached
        if self.manager.allocate_slots(request, num_new, num_cached, blocks) is None:
            raise RuntimeError("the pool is full")
        request.num_computed_tokens = request.num_tokens
        return num_cached

    def hash_and_admit(self, request: Request) -> None:
        """Do the same for a request whose blocks have no hashes yet."""
        request.block_hashes.extend(self.hasher(request))
        self.admit(request)


def digest() -> Source:
    """Hash a prompt."""
    manager = Manager(16)
    request = manager.request(Prompts("digest").draw(prompts.NUM_TOKENS), None)
    quiesce()
    while True:
        yield {"vLLM": repeated(partial(manager.hasher, request), 5)}


def warm(series: str = "open") -> Source:
    """Hash, find and allocate a prompt that is cached, or free it."""
    manager = Manager(4 * 626)
    tokens = Prompts("warm").draw(prompts.NUM_TOKENS)
    first = manager.request(tokens, manager.hasher)
    manager.admit(first)
    manager.manager.free(first)
    quiesce()
    while True:
        times: harness.Round = {"open": [], "close": []}
        for _ in range(6):
            request = manager.request(tokens, None)
            times["open"].append(timed(partial(manager.hash_and_admit, request)))
            times["close"].append(timed(partial(manager.manager.free, request)))
        yield {"vLLM": times[series][1:]}


def cold() -> Source:
    """Hash and allocate a prompt in an empty pool."""
    rows = Prompts("cold")
    while True:
        times = []
        for _ in range(6):
            manager = Manager(4 * 626)
            request = manager.request(rows.draw(prompts.NUM_TOKENS), None)
            quiesce()
            times.append(timed(partial(manager.hash_and_admit, request)))
        yield {"vLLM": times[1:]}


def decode() -> Source:
    """Give each running request a slot, and its token: one step, the mean over 16 of them."""
    manager, rows = Manager(prompts.DECODING_BLOCKS), Prompts("decode")
    running = [
        manager.request(rows.draw(prompts.NUM_SERVED_TOKENS), manager.hasher)
        for _ in range(prompts.NUM_DECODING)
    ]
    for request in running:
        manager.admit(request)
        request.status = RequestStatus.RUNNING
        request.append_output_token_ids(7)
    quiesce()

    def step(tokens: list[int]) -> None:
        for request in running:
            if manager.manager.allocate_slots(request, 1) is None:
                raise RuntimeError("the pool is full")
        for request, token in zip(running, tokens, strict=True):
            request.num_computed_tokens += 1
            request.append_output_token_ids(token)

    while True:
        times = []
        for _ in range(2):
            steps = [rows.draw(len(running)) for _ in range(prompts.STEPS_PER_SAMPLE)]
            total = sum(timed(partial(step, tokens)) for tokens in steps)
            times.append(total / len(steps) / len(running))
        yield {"vLLM": times}


class Serving:
    """A full pool that serves prompts of 2,000 tokens, 32 at a time."""

    def __init__(self, name: str, *, num_heads: int, caching: bool = True, events: bool = False) -> None:
        self.manager = Manager(prompts.SERVING_BLOCKS, caching=caching, events=events)
        self.prompts = Prompts(name)
        self.heads = self.prompts.heads(num_heads)
        self.running: deque[Request] = deque()
        num_own_blocks = (prompts.NUM_SERVED_TOKENS - bool(num_heads) * prompts.NUM_HEAD_TOKENS) // BLOCK_SIZE
        self.batch(2 * prompts.SERVING_BLOCKS // num_own_blocks)
        quiesce()

    def serve(self, tokens: list[int]) -> None:
        """Admit a request and end the oldest."""
        request = self.manager.request(tokens, self.manager.hasher)
        self.manager.admit(request)
        self.running.append(request)
        if len(self.running) > prompts.NUM_RUNNING:
            self.manager.manager.free(self.running.popleft())

    def samples(self) -> list[float]:
        """Take the samples of one round."""
        return [self.batch(prompts.NUM_SERVED_TOGETHER) for _ in range(prompts.BATCHES_A_ROUND)]

    def batch(self, num_prompts: int) -> float:
        """Mean time of a request, with taking the events."""
        batch = self.prompts.served(self.heads, num_prompts)
        start_ns = time.perf_counter_ns()
        for tokens in batch:
            self.serve(tokens)
            self.manager.manager.take_events()
        return (time.perf_counter_ns() - start_ns) / 1000 / num_prompts


def churn(events: bool = False) -> Source:
    """Serve prompts whose first half is shared."""
    serving = Serving("churn", num_heads=prompts.NUM_HEADS, events=events)
    while True:
        yield {"vLLM": serving.samples()}


def no_overlap() -> Source:
    """Serve prompts that share nothing, with caching and without."""
    caching = Serving("no overlap", num_heads=0)
    without = Serving("no overlap", num_heads=0, caching=False)
    while True:
        yield {"vLLM": caching.samples(), "vLLM, caching off": without.samples()}


ROWS: harness.Rows = {
    "digest": digest,
    "warm": warm,
    "cold": cold,
    "close": partial(warm, "close"),
    "decode": decode,
    "churn": churn,
    "churn_events": partial(churn, events=True),
    "no_overlap": no_overlap,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    register_all_kvcache_specs(VllmConfig())
    harness.main({"peer": "vLLM", "version": vllm.__version__}, ROWS)
