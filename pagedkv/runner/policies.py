"""In which order waiting requests are admitted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right, insort_right
from collections.abc import Iterable, Sequence
from heapq import nsmallest
from weakref import WeakKeyDictionary

from pagedkv.checks import show
from pagedkv.errors import UsageError
from pagedkv.pool import BlockPool
from pagedkv.runner.job import Job


class QueuePolicy(ABC):
    """Orders the waiting jobs; the queue sees to it that nobody starves."""

    @abstractmethod
    def order(self, jobs: Sequence[Job], pool: BlockPool) -> Iterable[Job]:
        """Return `jobs`, which come oldest first, in the order of admission."""

    def admitted(self, job: Job) -> None:  # noqa: B027 (most needn't know)
        """Learn that `job` was admitted."""


class FirstComeFirstServed(QueuePolicy):
    """The oldest first."""

    def order(self, jobs: Sequence[Job], pool: BlockPool) -> Iterable[Job]:
        """Return them as they are."""
        return jobs


class LongestPrefix(QueuePolicy):
    """The one with the most cached tokens first, the oldest among equals.

    What is cached changes with every step. All jobs are looked up anew each time as long as they are
    `window` or fewer, in one call of the pool; of a longer queue those that were looked up longest ago, the
    new ones before all. So a step pays for `window` look-ups at most, and no job's figure is older than the
    queue is long over that.
    """

    def __init__(self, window: int = 128) -> None:
        self._window = window
        self._num_calls = 0
        # Of each job: when it was looked up, and how many of its tokens were cached.
        self._known: WeakKeyDictionary[Job, tuple[int, int]] = WeakKeyDictionary()

    def order(self, jobs: Sequence[Job], pool: BlockPool) -> Iterable[Job]:
        """Look up what is due and sort."""
        self._num_calls += 1
        due = jobs
        if len(jobs) > self._window:
            due = nsmallest(self._window, jobs, key=lambda job: self._known.get(job, (0, 0))[0])
        requests = [job.request for job in due]
        lengths = pool.match_lengths(
            [request.key.token_ids for request in requests],
            cache_salts=[request.cache_salt for request in requests],
            extras=[request.extras for request in requests],
        )
        for job, num_tokens in zip(due, lengths.tolist(), strict=True):
            self._known[job] = (self._num_calls, num_tokens if job.reads_cache else 0)
        return sorted(jobs, key=lambda job: -self._known.get(job, (0, 0))[1])


class DepthFirst(QueuePolicy):
    """Along the tree of prompts, so that those that share a prefix run together and one after the other.

    Sorted by their tokens, prompts stand in the order of a depth-first walk over the tree of their blocks.
    The walk goes on where it is, behind the last one admitted, and starts over at the end. So a prefix is
    visited once a round, when it is cached or just being computed, and then all that share it.
    """

    def __init__(self) -> None:
        self._ordered: list[Job] = []  # those of the last call: to sort a long queue takes longer than a step
        self._position: tuple[tuple[bytes, str], bytes] | None = None

    def order(self, jobs: Sequence[Job], pool: BlockPool) -> Iterable[Job]:
        """Put the new ones into their places, and turn to where the walk is."""
        present = dict.fromkeys(jobs)
        self._ordered = ordered = [job for job in self._ordered if job in present]
        known = set(ordered)
        for job in jobs:
            if job not in known:
                insort_right(ordered, job, key=_place)
        # Equal prompts belong together, so one like the last admitted comes next and not a round later.
        start = 0 if self._position is None else bisect_right(ordered, self._position, key=_place)
        while start and _place(ordered[start - 1]) == self._position:
            start -= 1
        return ordered[start:] + ordered[:start]

    def admitted(self, job: Job) -> None:
        """Walk on from here."""
        self._position = _place(job)


def _place(job: Job) -> tuple[tuple[bytes, str], bytes]:
    return job.request.key.scope, job.request.key.ordered


POLICIES: dict[str, type[QueuePolicy]] = {
    "fcfs": FirstComeFirstServed,
    "longest-prefix": LongestPrefix,
    "depth-first": DepthFirst,
}


def make_policy(schedule: str | QueuePolicy) -> QueuePolicy:
    """Return the policy of a name; one that is made already is returned as it is.

    Raises
    ------
    UsageError
    """
    if isinstance(schedule, QueuePolicy):
        return schedule
    if not isinstance(schedule, str) or schedule not in POLICIES:
        expected = ", ".join(map(repr, POLICIES))
        raise UsageError(f"schedule: expected one of {expected}, or a QueuePolicy, got {show(schedule)}")
    return POLICIES[schedule]()
