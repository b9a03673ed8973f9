"""The waiting jobs, and which of them is admitted next."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import chain, islice
from operator import attrgetter

from pagedkv.pool import BlockPool
from pagedkv.runner.job import Job
from pagedkv.runner.policies import QueuePolicy


class WaitingQueue:
    """Jobs that hold no pages.

    First come those that were preempted, in the order in which they were first admitted, so that each finds
    its own pages again as soon as there is room. Then those that too many younger ones have overtaken, oldest
    first. Then the rest in the policy's order. So nobody starves, however long the queue: at most
    `max_overtakes` younger requests are admitted before any, and from then on only older ones.

    Parameters
    ----------
    policy : QueuePolicy
    max_overtakes : int
    """

    def __init__(self, policy: QueuePolicy, *, max_overtakes: int) -> None:
        self._policy = policy
        self._max_overtakes = max_overtakes
        self._preempted: list[Job] = []
        # Both oldest first; dicts, because any member may leave at any time.
        self._overtaken: dict[Job, None] = {}
        self._fresh: dict[Job, None] = {}
        self._upcoming: list[Job] = []

    def __len__(self) -> int:
        return len(self._preempted) + len(self._overtaken) + len(self._fresh)

    def add(self, job: Job) -> None:
        """Queue a new job."""
        self._fresh[job] = None

    def put_back(self, job: Job) -> None:
        """Queue one that was admitted before."""
        insort(self._preempted, job, key=attrgetter("rank"))

    def remove(self, job: Job) -> None:
        """Take one out, which is over or was admitted."""
        if job in self._fresh:
            del self._fresh[job]
        elif job in self._overtaken:
            del self._overtaken[job]
        else:
            self._preempted.remove(job)

    def admit(self, job: Job) -> None:
        """Take out the one that is admitted now, counting whom it overtakes."""
        if job in self._fresh:
            self._policy.admitted(job)
            for other in list(self._fresh):
                if other is job:
                    break
                other.num_overtakes += 1
                if other.num_overtakes >= self._max_overtakes:
                    del self._fresh[other]
                    self._overtaken[other] = None
        self.remove(job)

    def candidates(self, pool: BlockPool, limit: int) -> list[Job]:
        """Return the first `limit` jobs to admit, in order."""
        self._upcoming = list(islice(self._in_order(pool), limit))
        return self._upcoming[:]

    def upcoming(self, limit: int) -> list[Job]:
        """Return up to `limit` jobs that were next when `candidates` was last asked, and wait still."""
        waits = (job for job in self._upcoming if not job.is_running and not job.is_done)
        return list(islice(chain(self._preempted, (job for job in waits if job.rank < 0)), limit))

    def _in_order(self, pool: BlockPool) -> Iterator[Job]:
        yield from self._preempted
        yield from self._overtaken
        if self._fresh:
            yield from self._policy.order(list(self._fresh), pool)
