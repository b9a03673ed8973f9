"""Made-up workloads by name, the same for the same seed: what caches are praised for, and what they are not.

Text comes in pieces of 16 tokens that are new or were there before, so nothing but its reuse is made up.
Requests belong to sessions; sessions begin at random (a Poisson process), and each says when its next request
comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from pagedkv.checks import check_int, show
from pagedkv.errors import UsageError
from pagedkv.policy.trace import BlockNames, Request, Tokens, Trace

PIECE = 16
Turn = tuple[float, Tokens, int]
"""Seconds after the session's request before, the prompt, and tokens of the answer."""


class World:
    """What the sessions of a workload draw from: chance, new text, and texts that all of them share."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self._names = BlockNames()
        self._shared: dict[str, list[Tokens]] = {}

    def text(self, low: int, high: int) -> Tokens:
        """Return new text of `low` to `high` tokens, evenly by the logarithm."""
        tokens = float(np.exp(self.random.uniform(np.log(low), np.log(high))))
        count = max(1, round(tokens / PIECE))
        return np.array([self._names.fresh(PIECE) for _ in range(count)], np.uint32)

    def shared(self, kind: str, count: int, low: int, high: int, skew: float = 1.0) -> Tokens:
        """Return one of `count` texts of a kind; the n-th is drawn as n to the power of −`skew`."""
        if kind not in self._shared:
            self._shared[kind] = [self.text(low, high) for _ in range(count)]
        weights = np.arange(1, count + 1) ** -skew
        drawn = np.searchsorted(np.cumsum(weights), self.random.random() * weights.sum())
        return self._shared[kind][int(drawn)]

    def seconds(self, median: float, sigma: float = 1.0) -> float:
        """Return a time to think or to compute, log-normal."""
        return float(median * np.exp(self.random.normal(0.0, sigma)))

    def count(self, mean: float) -> int:
        """Return a number of turns or steps of at least 1, geometric."""
        return int(self.random.geometric(1 / mean))


def _shared_prompt(world: World) -> Iterator[Turn]:
    system = world.shared("system", 20, 800, 4000)
    yield 0.0, np.concatenate((system, world.text(30, 600))), 200


def _multi_turn(world: World) -> Iterator[Turn]:
    prompt = world.shared("system", 3, 200, 600)
    for turn in range(world.count(5)):
        prompt = np.concatenate((prompt, world.text(30, 800)))
        yield (world.seconds(40) if turn else 0.0), prompt, 250
        prompt = np.concatenate((prompt, world.text(60, 600)))


def _rag(world: World) -> Iterator[Turn]:
    documents = [
        world.shared("document", 60, 500, 3000, 0.9) for _ in range(int(world.random.integers(1, 4)))
    ]
    parts = [world.shared("system", 1, 300, 300), *documents, world.text(20, 120)]
    yield 0.0, np.concatenate(parts), 150


def _tree_of_thoughts(world: World) -> Iterator[Turn]:
    level = [np.concatenate((world.shared("system", 1, 600, 600), world.text(200, 900)))]
    gap_s = 0.0
    for _ in range(4):
        for thought in level:
            yield gap_s, thought, 120
            gap_s = 0.05
        # Three thoughts from each, of which a judge keeps the best three in all.
        grown = [np.concatenate((thought, world.text(80, 200))) for thought in level for _ in range(3)]
        kept = world.random.permutation(len(grown))[:3]
        level = [grown[int(which)] for which in kept]
        gap_s = world.seconds(4, 0.5)


def _agents(world: World) -> Iterator[Turn]:
    prompt = np.concatenate((world.shared("tools", 4, 3000, 9000), world.text(100, 800)))
    for step in range(world.count(12)):
        # A step waits for a tool; now and then for a person.
        waits_s = world.seconds(4) if world.random.random() < 0.93 else world.seconds(180)
        yield (waits_s if step else 0.0), prompt, 150
        prompt = np.concatenate((prompt, world.text(50, 250), world.text(40, 1500)))


def _random(world: World) -> Iterator[Turn]:
    yield 0.0, world.text(200, 6000), 200


class Workload(NamedTuple):
    """A kind of session, how many begin in a second, and what it stands for."""

    session: Callable[[World], Iterator[Turn]]
    sessions_per_s: float
    about: str


WORKLOADS = {
    "shared-prompt": Workload(_shared_prompt, 4.0, "20 system prompts, each before a question of its own"),
    "multi-turn": Workload(_multi_turn, 1.0, "chats of 5 turns in the mean; each prompt holds all before it"),
    "rag": Workload(_rag, 4.0, "1 to 3 of 60 documents in any order, then a question"),
    "tree-of-thoughts": Workload(_tree_of_thoughts, 0.5, "branches of a thought, level by level, three kept"),
    "agents": Workload(_agents, 0.4, "4 sets of tools; 12 steps in the mean, each adds a tool's result"),
    "random": Workload(_random, 4.0, "prompts that share nothing"),
}
"""The workloads by name."""


def make_workload(name: str, *, num_requests: int = 10_000, seed: int = 0) -> Trace:
    """Return the first requests of a workload, in the order of their arrival.

    Parameters
    ----------
    name : str
        One of `WORKLOADS`.
    num_requests, seed : int

    Raises
    ------
    UsageError
    """
    if name not in WORKLOADS:
        raise UsageError(f"workload: expected one of {', '.join(WORKLOADS)}, got {show(name)}")
    num_requests = check_int("requests", num_requests, 1, 10**8)
    workload = WORKLOADS[name]
    world = World(check_int("seed", seed, 0, 2**63 - 1))
    requests: list[Request] = []
    next_begin_s, number = 0.0, 0
    waiting: list[tuple[float, int, Turn, Iterator[Turn]]] = []  # by time; the number settles ties
    while len(requests) < num_requests:
        while not waiting or next_begin_s <= waiting[0][0]:
            session = workload.session(world)
            number += 1
            heappush(waiting, (next_begin_s, number, next(session), session))
            next_begin_s += float(world.random.exponential(1 / workload.sessions_per_s))
        time_s, own, (_, prompt, num_output), session = heappop(waiting)
        requests.append(Request(time_s, len(prompt) * PIECE, num_output, None, prompt, PIECE))
        turn = next(session, None)
        if turn is not None:
            heappush(waiting, (time_s + turn[0], own, turn, session))
    return Trace(f"{name}, seed {seed}", requests)
