"""All rows of a benchmark, one after the other; in each its harnesses take turns."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import ExitStack

from rich.console import Console

from benchmarks.child import make_child
from benchmarks.report import one_line
from benchmarks.running import Outcome, run
from benchmarks.table import Row


def run_all(rows: Iterable[Row], harnesses: Iterable[str], options: argparse.Namespace) -> list[Outcome]:
    """Measure rows as a command line asks for, and tell of each when it is done.

    Parameters
    ----------
    rows : iterable of Row
    harnesses : iterable of str
        Names from `benchmarks.child`.
    options : argparse.Namespace
        What `make_parser` has read.
    """
    console, outcomes = Console(stderr=True), []
    with ExitStack() as stack:
        status = stack.enter_context(console.status("starting"))
        children = {name: stack.enter_context(make_child(name, options.peers)) for name in harnesses}
        for row in rows:
            outcomes.append(run(row, children, options.rounds, status.update))
            console.print(one_line(outcomes[-1]), markup=False, highlight=False)
    return outcomes
