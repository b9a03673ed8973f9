"""Time the pool as an engine calls it, beside other engines and beside what the machine needs at least.

    python benchmarks/pool.py [--rows ROW ...] [--json FILE] [--plot FILE]

All run on one core and take turns, so that a ratio of medians means something. A row with a missed bound is
measured once more. Exit status: 0, all bounds hold; 1, one is missed; 3, some row or its peer could not be
measured. docs/design/benchmarks.md says what each row and bound means.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

if not __package__:  # run as a script: the package is the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.bounds import exit_code
from benchmarks.child import COMMANDS, ROOT, make_child
from benchmarks.harness import pin_to_one_core
from benchmarks.report import as_json, draw, one_line, print_report
from benchmarks.running import run
from benchmarks.table import ROWS

NAMES = [row.name for row in ROWS]

MAX_ROUNDS = 20
"""With more, the sequences of `decode` would outgrow their pool."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pool",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="rows: " + ", ".join(NAMES),
    )
    parser.add_argument(
        "--rows", nargs="+", choices=NAMES, default=NAMES, metavar="ROW", help="measure these (all)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns that each harness takes (7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture of the rows with peers")
    parser.add_argument(
        "--peers",
        type=Path,
        default=ROOT / ".venv-peers",
        metavar="FOLDER",
        help="the environments that 'make bench-peers' made (.venv-peers)",
    )
    options = parser.parse_args(arguments)
    if not 1 <= options.rounds <= MAX_ROUNDS:
        parser.error(f"--rounds: expected 1 to {MAX_ROUNDS}, got {options.rounds}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, report, and say whether all bounds hold."""
    options = parse(arguments)
    core = pin_to_one_core()
    console, outcomes = Console(stderr=True), []
    with ExitStack() as stack:
        status = stack.enter_context(console.status("starting"))
        children = {name: stack.enter_context(make_child(name, options.peers)) for name in COMMANDS}
        for row in ROWS:
            if row.name in options.rows:
                outcomes.append(run(row, children, options.rounds, status.update))
                console.print(one_line(outcomes[-1]), markup=False, highlight=False)
    print_report(outcomes, f"the pool on core {core}: medians of {options.rounds} rounds")
    code = exit_code(
        (verdict for outcome in outcomes for verdict in outcome.verdicts),
        all_measured=not any(outcome.reasons for outcome in outcomes),
    )
    if options.json:
        options.json.write_text(json.dumps(as_json(outcomes, code), indent=1, ensure_ascii=False) + "\n")
    if options.plot:
        draw(outcomes, options.plot)
    return code


if __name__ == "__main__":
    sys.exit(main())
