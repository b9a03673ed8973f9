"""Time the pool as an engine calls it, beside other engines and beside what the machine needs at least.

    python benchmarks/pool.py [--rows ROW ...] [--json FILE] [--plot FILE]

All run on one core and take turns, so that a ratio of medians means something. A row with a missed bound is
measured once more. Exit status: 0, all bounds hold; 1, one is missed; 3, some row or its peer could not be
measured. docs/design/benchmarks.md says what each row and bound means.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a script: the package is the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.child import COMMANDS
from benchmarks.harness import pin_to_one_core
from benchmarks.report import draw, finish, make_parser
from benchmarks.table import ROWS
from benchmarks.turns import run_all

NAMES = [row.name for row in ROWS]

MAX_ROUNDS = 20
"""With more, the sequences of `decode` would outgrow their pool."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser("pool", str(__doc__), NAMES, 7)
    options = parser.parse_args(arguments)
    if not 1 <= options.rounds <= MAX_ROUNDS:
        parser.error(f"--rounds: expected 1 to {MAX_ROUNDS}, got {options.rounds}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, report, and say whether all bounds hold."""
    options = parse(arguments)
    core = pin_to_one_core()
    rows = [row for row in ROWS if row.name in options.rows]
    outcomes = run_all(rows, COMMANDS, options)
    title = f"the pool on core {core}: medians of {options.rounds} rounds"
    return finish(outcomes, title, options, draw)


if __name__ == "__main__":
    sys.exit(main())
