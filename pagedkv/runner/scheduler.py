"""Which requests compute how many tokens in the next step.

The rules, in this order:

1. Requests that decode come first: one token each, so that nobody's answer stalls behind a long prompt.
2. What is left of the step's tokens goes to prompts, oldest first, in chunks.
3. Then waiting requests are admitted, oldest first. One whose prompt begins like a prompt that is just
   being computed waits for it: its pages can be shared in a moment, computing them again takes longer.
4. When pages run out, the youngest running request gives up its own and goes back to the head of the
   queue. So the oldest always gets on; and nobody is admitted until somebody has left.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from pagedkv.cache import PagedKVCache
from pagedkv.errors import OutOfBlocksError
from pagedkv.runner.request import Request, RequestState
from pagedkv.sequence import Sequence, Step


class Scheduler:
    """The queue and the running requests.

    Attributes
    ----------
    waiting : collections.deque of Request
        Oldest first. None holds pages.
    running : list of Request
        Oldest first; each older than every waiting one.
    """

    def __init__(self, cache: PagedKVCache, *, max_batch_tokens: int, max_num_seqs: int) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._cache = cache
        self._max_batch_tokens = max_batch_tokens
        self._max_num_seqs = max_num_seqs
        self._pages_ran_out = False

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request that is over and release its pages; its published blocks stay cached."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self._pages_ran_out = False
        else:
            self.waiting.remove(request)
        if request.sequence is not None:
            self._cache.close(request.sequence)
        request.state = RequestState.FINISHED

    def schedule(self) -> tuple[Step, list[Request]] | None:
        """Reserve the next step; return it and its requests, or None when there is nothing to do.

        Raises
        ------
        OutOfBlocksError
            Not even the oldest request alone fits: somebody else holds pages of the pool.
        """
        plan = self._plan()
        while plan:
            sequences = [_sequence(request) for request, _ in plan]
            try:
                step = self._cache.reserve(sequences, [num_tokens for _, num_tokens in plan])
            except OutOfBlocksError:
                victim = self.running[-1]
                self._preempt(victim)
                plan = [entry for entry in plan if entry[0] is not victim]
                if not self.running:
                    raise
                continue
            return step, [request for request, _ in plan]
        return None

    def _plan(self) -> list[tuple[Request, int]]:
        """Share out the step's tokens; admits waiting requests."""
        budget = self._max_batch_tokens
        plan: list[tuple[Request, int]] = []
        # The sort is stable: decoding requests first, and oldest first among equals.
        for request in sorted(self.running, key=_is_prefilling):
            if num_tokens := min(_sequence(request).num_uncached_tokens, budget):
                plan.append((request, num_tokens))
                budget -= num_tokens
        while budget and self._can_admit():
            request = self._admit()
            num_tokens = min(_sequence(request).num_uncached_tokens, budget)
            plan.append((request, num_tokens))
            budget -= num_tokens
        return plan

    def _can_admit(self) -> bool:
        if not self.waiting or len(self.running) == self._max_num_seqs:
            return False
        if self._pages_ran_out and self.running:
            return False
        return not self._is_prefix_being_computed(self.waiting[0])

    def _admit(self) -> Request:
        request = self.waiting.popleft()
        if request.sequence is None:  # a preempted one has its sequence still
            request.sequence = self._cache.open(
                request.prompt_ids, cache_salt=request.cache_salt, extras=request.extras
            )
        request.state = RequestState.RUNNING
        self.running.append(request)
        self._pages_ran_out = False
        return request

    def _preempt(self, request: Request) -> None:
        self._cache.preempt(_sequence(request))
        self.running.remove(request)
        self.waiting.appendleft(request)
        request.state = RequestState.WAITING
        request.num_preemptions += request.scheduled_s is not None  # else it wasn't let in at all
        self._pages_ran_out = True

    def _is_prefix_being_computed(self, request: Request) -> bool:
        """Whether a running prefill will publish more of this prompt than the cache holds now."""
        if not self._cache.pool.prefix_caching:
            return False
        salt, extras = request.cache_salt, request.extras
        shared = max(
            (
                _common_prefix(request.prompt_ids, other.prompt_ids)
                for other in self.running
                if _is_prefilling(other) and other.cache_salt == salt and other.extras == extras
            ),
            default=0,
        )
        block_size = self._cache.spec.block_size
        shared = shared // block_size * block_size
        if shared == 0:
            return False
        return shared > self._cache.match(request.prompt_ids, cache_salt=salt, extras=extras).num_tokens


def _sequence(request: Request) -> Sequence:
    assert request.sequence is not None, "a running request has a sequence"
    return request.sequence


def _is_prefilling(request: Request) -> bool:
    return _sequence(request).num_uncached_tokens > 1


def _common_prefix(left: list[int], right: list[int]) -> int:
    """Return how many tokens both lists begin with."""
    size = min(len(left), len(right))
    differs = np.asarray(left[:size]) != np.asarray(right[:size])
    return int(differs.argmax()) if differs.any() else size
