"""Which jobs compute how many tokens in the next step.

The rules, in this order:

1. Answers that go on come first: one token each, so that none stalls behind a long prompt.
2. What is left of the step's tokens goes to prompts, in the order of admission, in chunks.
3. Then waiting jobs are admitted, in the order of the queue. One whose prompt begins like a prompt that is
   just being computed is passed over: its pages can be shared in a moment, computing them again takes longer.
4. Tokens that are left still verify guesses.
5. When pages run out, guesses are given up first; then the job that was admitted last and has pages to give
   gives them up and goes back to the head of the queue. So the one admitted first always gets on, and with it
   everybody in the end; and nobody is admitted until somebody has left.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

from pagedkv.cache import PagedKVCache
from pagedkv.errors import OutOfBlocksError
from pagedkv.runner.job import Job
from pagedkv.runner.prefix_sharing import awaits_prefix
from pagedkv.runner.waiting import WaitingQueue
from pagedkv.sequence import Sequence, Step

NUM_LOOKED_AT = 256
"""How many waiting jobs a step considers at most."""

NUM_TOUCHED = 32
"""How many waiting jobs' cached prefixes are kept from being evicted next."""


@dataclass
class Part:
    """One job's share of a step: its sequences that compute something, and how many tokens each."""

    job: Job
    sequences: list[Sequence]
    num_tokens: list[int]


@dataclass(frozen=True)
class Batch:
    """A reserved step and whose it is."""

    step: Step
    parts: list[Part]


class Scheduler:
    """The queue and the running jobs.

    Attributes
    ----------
    waiting : WaitingQueue
        None holds pages.
    running : list of Job
        In the order of their first admission.
    """

    def __init__(
        self, cache: PagedKVCache, waiting: WaitingQueue, *, max_batch_tokens: int, max_num_seqs: int
    ) -> None:
        self.waiting = waiting
        self.running: list[Job] = []
        self._cache = cache
        self._max_batch_tokens = max_batch_tokens
        self._max_num_seqs = max_num_seqs
        self._num_admitted = 0
        self._pages_ran_out = False

    def add(self, job: Job) -> None:
        """Queue a new job."""
        self.waiting.add(job)

    def adopt(self, job: Job) -> None:
        """Take in a job that was forked from a running one; without room it waits like a preempted one."""
        job.rank = self._next_rank()
        if self._num_free_slots >= job.num_slots:
            job.is_running = True
            self.running.append(job)
        else:
            job.preempt()
            self.waiting.put_back(job)

    def remove(self, job: Job) -> None:
        """Forget a job that is over and release its pages; its published blocks stay cached."""
        if job.is_running:
            self.running.remove(job)
            job.is_running = False
            self._pages_ran_out = False
        else:
            self.waiting.remove(job)
        job.close()

    def preempt(self, job: Job) -> None:
        """Take a running job's pages and put it at the head of the queue."""
        job.preempt()
        self.running.remove(job)
        job.is_running = False
        self.waiting.put_back(job)
        job.request.num_preemptions += job.request.scheduled_s is not None  # else it wasn't let in at all

    def schedule(self) -> Batch | None:
        """Reserve the next step; return it and whose it is, or None when there is nothing to do.

        Raises
        ------
        OutOfBlocksError
            Not even the first job alone fits: somebody else holds pages of the pool.
        """
        plan = self._plan_running()
        self._admit(plan)
        self._keep_prefixes(plan)
        self._add_drafts(plan)
        while plan:
            sequences = [sequence for part in plan for sequence in part.sequences]
            try:
                step = self._cache.reserve(sequences, [n for part in plan for n in part.num_tokens])
            except OutOfBlocksError:
                if _withdraw_drafts(plan):
                    continue
                victim = self._victim()
                self.preempt(victim)
                self._pages_ran_out = True
                if not self.running:
                    raise
                plan = [part for part in plan if part.job is not victim] or self._plan_running()
                continue
            return _batch(step, plan)
        return None

    def _plan_running(self) -> list[Part]:
        """Share out the step's tokens among those that run."""
        budget = self._max_batch_tokens
        plan: list[Part] = []
        # The sort is stable: answers that go on first, and in the order of admission among equals.
        for job in sorted(self.running, key=attrgetter("is_prefilling")):
            budget -= _add_part(plan, job, budget)
        return plan

    def _admit(self, plan: list[Part]) -> None:
        """Add what waits, as far as tokens and slots last."""
        budget = self._max_batch_tokens - sum(sum(part.num_tokens) for part in plan)
        if not budget or not self._num_free_slots or (self._pages_ran_out and self.running):
            return
        for job in self.waiting.candidates(self._cache.pool, NUM_LOOKED_AT):
            if not budget or self._num_free_slots < job.num_slots:
                return
            if awaits_prefix(job, self.running, self._cache.pool):
                continue
            self.waiting.admit(job)
            job.open()
            if job.rank < 0:
                job.rank = self._next_rank()
            job.is_running = True
            insort(self.running, job, key=attrgetter("rank"))
            self._pages_ran_out = False
            budget -= _add_part(plan, job, budget)

    def _keep_prefixes(self, plan: list[Part]) -> None:
        """Count the prefixes of waiting jobs as used now, if this step may evict anything."""
        pool = self._cache.pool
        if not len(self.waiting) or not pool.prefix_caching:
            return
        needed = sum(n // pool.block_size + 1 for part in plan for n in part.num_tokens)
        if all(group.num_free_blocks >= needed for group in pool.stats().groups):
            return
        requests = [job.request for job in self.waiting.upcoming(NUM_TOUCHED)]
        pool.waiting(
            [request.key.token_ids for request in requests],
            cache_salts=[request.cache_salt for request in requests],
            extras=[request.extras for request in requests],
        )

    def _add_drafts(self, plan: list[Part]) -> None:
        budget = self._max_batch_tokens - sum(sum(part.num_tokens) for part in plan)
        for part in plan:
            if budget and (count := part.job.draft(budget)):
                part.num_tokens[-1] += count
                budget -= count

    def _victim(self) -> Job:
        """Return who gives way: the last admitted that gives anything, never the first unless it is alone."""
        giving = (job for job in reversed(self.running[1:]) if job.can_release)
        return next(giving, self.running[-1])

    @property
    def _num_free_slots(self) -> int:
        return self._max_num_seqs - sum(job.num_slots for job in self.running)

    def _next_rank(self) -> int:
        self._num_admitted += 1
        return self._num_admitted


def _add_part(plan: list[Part], job: Job, budget: int) -> int:
    """Add what `job` computes with `budget` tokens; return how many it takes."""
    counts = job.plan(budget)
    pairs = [pair for pair in zip(job.sequences, counts, strict=True) if pair[1]]
    if pairs:
        sequences, num_tokens = zip(*pairs, strict=True)
        plan.append(Part(job, list(sequences), list(num_tokens)))
    return sum(counts)


def _withdraw_drafts(plan: list[Part]) -> int:
    """Give up all guesses; return how many tokens they were."""
    total = 0
    for part in plan:
        count = part.job.withdraw_draft()
        part.num_tokens[-1] -= count
        total += count
    return total


def _batch(step: Step, plan: list[Part]) -> Batch:
    """Note what the step really computes: less, where a preempted sequence matched its pages again."""
    counts = step.num_new_tokens
    ends = list(accumulate(len(part.sequences) for part in plan))
    for part, end in zip(plan, ends, strict=True):
        part.num_tokens = counts[end - len(part.sequences) : end]
    return Batch(step, plan)
