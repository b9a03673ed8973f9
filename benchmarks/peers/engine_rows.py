"""The rows that other engines are measured in, by what an engine must be able to do for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from benchmarks import harness
from benchmarks.harness import Source, quiesce
from benchmarks.requests_table import BATCHES, NUM_COLD, NUM_NEW, NUM_SHARED, NUM_WARM_UPS, Draw


class PeerEngine(Protocol):
    """An engine with a model."""

    def remember(self, prefix: list[int]) -> None:
        """Compute a prefix and keep its K and V."""

    def first_token(self, prompt: list[int]) -> float:
        """Milliseconds from a prompt to its first token; uses what is remembered."""

    def step(self, prompts: list[list[int]]) -> float:
        """Milliseconds of one decode step of all `prompts` together, the mean of some."""


Make = Callable[[], PeerEngine]


def warm(series: str, make: Make) -> Source:
    """Time the first token behind a prefix that is remembered."""
    engine, draw = make(), Draw("warm")
    prefix = draw(NUM_SHARED)
    engine.remember(prefix)
    for _ in range(NUM_WARM_UPS):
        engine.first_token(prefix + draw(NUM_NEW))
    quiesce()
    while True:
        yield {series: [engine.first_token(prefix + draw(NUM_NEW)) for _ in range(3)]}


def cold(series: str, make: Make) -> Source:
    """Time a whole prompt."""
    engine, draw = make(), Draw("cold")
    for _ in range(NUM_WARM_UPS):
        engine.first_token(draw(NUM_NEW))
    quiesce()
    while True:
        yield {series: [engine.first_token(draw(NUM_COLD))]}


def decode(num_seqs: int, engines: dict[str, Make]) -> Source:
    """Time a step of so many sequences."""
    made, draw = {series: make() for series, make in engines.items()}, Draw("decode")
    for engine in made.values():
        engine.step([draw(NUM_NEW) for _ in range(num_seqs)])
    quiesce()
    while True:
        prompts = [draw(NUM_NEW) for _ in range(num_seqs)]
        yield {series: [engine.step(prompts)] for series, engine in made.items()}


def rows(
    series: str, make: Make, *, batches: Sequence[int] = BATCHES, others: dict[str, Make] | None = None
) -> harness.Rows:
    """Make all rows of an engine; `others` are further series of decoding one sequence."""
    found: harness.Rows = {"warm": partial(warm, series, make), "cold": partial(cold, series, make)}
    for num_seqs in batches:
        engines = {series: make} | ((others or {}) if num_seqs == 1 else {})
        found[f"decode_{num_seqs}"] = partial(decode, num_seqs, engines)
    return found
