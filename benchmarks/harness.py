"""The side that measures: rows of one library, each a source of rounds. Needs nothing but Python.

A harness runs in an environment that may hold nothing else of this project, and in one of two ways: alone it
prints a JSON of its rows; with ``--serve`` it gives one round whenever its standard input asks for one, so
that several harnesses can take turns in one run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import TextIO

Round = dict[str, list[float]]
"""Some samples for each series: microseconds of one unit of work, or whatever the row is measured in."""

Source = Iterator[Round]
"""Sets a row up before its first round, and gives rounds without end."""

Rows = dict[str, Callable[[], Source]]

REPLY = "round "
"""Begins a line that answers. Whatever else a library prints is no answer."""


def timed(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    start_ns = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start_ns) / 1000


def repeated(call: Callable[[], object], num_samples: int, num_calls: int = 1) -> list[float]:
    """Microseconds of a call: some samples, each the mean of `num_calls`. The first call warms up."""
    call()

    def calls() -> None:
        for _ in range(num_calls):
            call()

    return [timed(calls) / num_calls for _ in range(num_samples)]


def quiesce() -> None:
    """Keep the garbage collector from walking what was set up while something is timed."""
    gc.collect()
    gc.freeze()


def pin_to_one_core() -> int:
    """Stay on one core, as do the child processes; the last one, since others prefer the first."""
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def summary(samples: list[float]) -> dict[str, float]:
    """Sum up a series as a report does."""
    return {"median": median(samples), "best": min(samples), "num_samples": len(samples)}


def serve(rows: Rows, requests: TextIO, replies: TextIO) -> None:
    """Answer ``begin ROW``, silently, and ``round``, with a round of the row begun last."""
    source: Source = iter(())
    for request in requests:
        verb, *names = request.split()
        if verb == "begin":
            source = iter(())  # lets go of the last row's before the next one's memory is taken
            gc.unfreeze()
            gc.collect()
            source = rows[names[0]]()
        else:
            print(REPLY + json.dumps(next(source)), file=replies, flush=True)


def measure(source: Source, num_rounds: int) -> Round:
    """All samples of some rounds."""
    samples: Round = {}
    for _ in range(num_rounds):
        for series, new in next(source).items():
            samples.setdefault(series, []).extend(new)
    return samples


def main(about: dict[str, str], rows: Rows) -> None:
    """Run a harness as its command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true", help="give rounds as standard input asks for them")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each row (7)")
    parser.add_argument("--rows", nargs="+", choices=rows, default=list(rows), metavar="ROW", help="(all)")
    args = parser.parse_args()
    if args.serve:
        serve(rows, sys.stdin, sys.stdout)
        return
    core = pin_to_one_core()
    summaries: dict[str, dict[str, dict[str, float]]] = {}
    for name in args.rows:
        print(name, file=sys.stderr, flush=True)
        samples = measure(rows[name](), args.rounds)
        summaries[name] = {series: summary(us) for series, us in samples.items()}
    machine = {"python": platform.python_version(), "core": core}
    print(json.dumps({**about, **machine, "rows": summaries}, indent=1))
