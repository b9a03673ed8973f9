"""Time whole requests of a real model, beside other engines and beside what the machine needs at least.

    python benchmarks/e2e.py [--rows ROW ...] [--json FILE] [--plot FILE]

All engines have the model of the demo, as many threads, and take turns, so that a ratio of medians means
something. A row with a missed bound is measured once more. Exit status: 0, all bounds hold; 1, one is missed;
3, some row or its peer could not be measured. docs/design/benchmarks.md says what each row means.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if not __package__:  # run as a script: the package is the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.child import ENGINE_COMMANDS, ROOT
from benchmarks.engine_table import ROWS
from benchmarks.report import draw, finish, make_parser
from benchmarks.turns import run_all

FOLDER = ROOT / "build" / "e2e" / "smollm2-bfloat16"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser("e2e", str(__doc__), [row.name for row in ROWS], 3)
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine (one a core)"
    )
    options = parser.parse_args(arguments)
    for name in ("rounds", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(options, name)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, report, and say whether all bounds hold."""
    options = parse(arguments)
    from benchmarks.work.model_folder import write_folder
    from pagedkv.runner.bundled import bundled_model_path

    # What the children inherit.
    os.environ.update(
        OMP_WAIT_POLICY="passive",
        BENCH_THREADS=str(options.threads),
        BENCH_FOLDER=str(write_folder(FOLDER)),
        BENCH_GGUF=str(bundled_model_path()),
    )
    rows = [row for row in ROWS if row.name in options.rows]
    outcomes = run_all(rows, ENGINE_COMMANDS, options)
    title = f"requests on {options.threads} threads: medians of {options.rounds} rounds"
    return finish(outcomes, title, options, draw)


if __name__ == "__main__":
    sys.exit(main())
