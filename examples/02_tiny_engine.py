"""A whole engine in a hundred lines: continuous batching, chunked prefill, preemption, prefix reuse.

The model is the reference runner's; any that writes K/V and attends through the cache will do. Run it with
the path of a GGUF file or of a folder with safetensors, or without one for the small model of the demo.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass, field

from pagedkv import OutOfBlocksError, PagedKVCache, Sequence
from pagedkv.runner import Model, Tokenizer, load_model
from pagedkv.runner.bundled import bundled_model_path


@dataclass(eq=False)
class Request:
    """A prompt and what came of it."""

    prompt: list[int]
    max_new_tokens: int = 24
    seq: Sequence | None = None
    answer: list[int] = field(default_factory=list)
    num_cached: int = 0


class TinyEngine:
    """Serves requests together, greedily."""

    def __init__(self, model: Model, *, num_blocks: int, max_step_tokens: int = 256) -> None:
        spec = model.config.kv_spec(str(model.dtype).removeprefix("torch."))
        # The namespace names the weights: KV of other weights must never be found.
        self.cache = PagedKVCache(spec, num_blocks, namespace=model.namespace)
        self.model, self.max_step_tokens = model, max_step_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def run(self) -> None:
        """Serve everybody who waits."""
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """Compute some tokens of every running request, and a new token of those whose prompt is done."""
        plan = self._plan()
        seqs = [request.seq for request, _ in plan]
        try:
            step = self.cache.reserve(seqs, [n for _, n in plan])  # pages for all, or for none
        except OutOfBlocksError:
            if len(self.running) == 1:
                raise  # it will never fit
            victim = self.running.pop()
            self.cache.close(victim.seq)  # what it published stays cached, so little has to be computed again
            victim.seq = None
            self.waiting.appendleft(victim)
            return
        meta = self.cache.prepare(step)
        hidden = self.model.forward(self.cache, meta)  # writes K/V into the pages, and attends to them
        logits = self.model.logits(hidden[meta.last_token_index])
        self.cache.commit(step)  # full blocks can be found from here on
        for (request, _), token in zip(plan, logits.argmax(-1).tolist(), strict=True):
            if request.seq.num_uncached_tokens == 0:  # else there is more of the prompt to come
                request.answer.append(token)
                self.cache.append(request.seq, [token])
                if self._is_done(request, token):
                    self.running.remove(request)
                    self.cache.close(request.seq)

    def _plan(self) -> list[tuple[Request, int]]:
        """Share the step's tokens among those who run, and let new ones in while some are left."""
        plan, budget = [], self.max_step_tokens
        for request in self.running:
            num_tokens = min(request.seq.num_uncached_tokens, budget)
            if num_tokens > 0:
                plan.append((request, num_tokens))
                budget -= num_tokens
        while self.waiting and budget > 0:
            request = self.waiting.popleft()
            request.seq = self.cache.open(request.prompt + request.answer)  # finds what is cached of it
            if not request.answer:
                request.num_cached = request.seq.num_cached_tokens
            self.running.append(request)
            num_tokens = min(request.seq.num_uncached_tokens, budget)
            plan.append((request, num_tokens))
            budget -= num_tokens
        return plan

    def _is_done(self, request: Request, token: int) -> bool:
        is_stop = token in self.model.config.eos_token_ids
        return is_stop or len(request.answer) == request.max_new_tokens


def main(path: str) -> None:
    """Ask three questions about one text, twice: the second time from the cache."""
    model, tokenizer = load_model(path)
    assert tokenizer is not None, "the file has no tokenizer"
    rules = " ".join(f"Guests of room {i} have breakfast at {6 + i % 5} o'clock." for i in range(24))
    engine = TinyEngine(model, num_blocks=512)
    for attempt in ("cold", "warm"):
        requests = [ask(tokenizer, rules, room) for room in (3, 11, 19)]
        engine.waiting.extend(requests)
        start_s = time.perf_counter()
        engine.run()
        print(f"{attempt}: {time.perf_counter() - start_s:.2f} s")
        for request in requests:
            text = tokenizer.decode(request.answer).strip()
            print(f"  {request.num_cached:4} of {len(request.prompt)} tokens cached: {text}")
    engine.cache.check_integrity()


def ask(tokenizer: Tokenizer, rules: str, room: int) -> Request:
    """Make a request about the rules."""
    question = f"{rules}\nWhen do the guests of room {room} have breakfast?"
    return Request(tokenizer.encode_chat([{"role": "user", "content": question}]))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(bundled_model_path()))
