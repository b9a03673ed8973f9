"""Time attention and the other operations on pages beside torch's, and beside what the machine gives at most.

    python benchmarks/attention.py [--device cpu|cuda] [--rows ROW ...] [--json FILE] [--plot FILE]

All series of a row take turns in one process, call by call, so that their ratios mean something; bounds hold
or not in the median turn. A row with a missed bound is measured once more. Exit status: 0, all bounds hold;
1, one is missed; 3, some row or its peer could not be measured. docs/design/benchmarks.md says what each row
means.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

if not __package__:  # run as a script: the package is the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.attention_table import rows
from benchmarks.bounds import NOT_MEASURED
from benchmarks.child import ATTENTION_COMMANDS
from benchmarks.report import finish, make_parser
from benchmarks.roofline import draw
from benchmarks.shapes import THREADS, with_threads
from benchmarks.table import Row
from benchmarks.turns import run_all


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    names = dict.fromkeys(row.name.rpartition("_")[0] for row in rows(bounded=True, on_gpu=False))
    parser = make_parser("attention", str(__doc__), list(names), 5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the pages are (cpu)")
    parser.add_argument(
        "--threads", type=int, nargs="+", choices=THREADS, default=THREADS, help="on the CPU (1 2)"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {options.rounds}")
    return options


def chosen(options: argparse.Namespace) -> list[Row]:
    """Make the rows that the command line asks for, with the bounds of this machine."""
    from benchmarks.work.limits import has_amx, has_bf16_products

    on_gpu = options.device == "cuda"
    threads = THREADS[:1] if on_gpu else options.threads
    names = {with_threads(name, number) for name in options.rows for number in threads}
    in_bf16 = on_gpu or has_bf16_products()
    made = rows(bounded=has_amx() and not on_gpu, on_gpu=on_gpu, in_bf16=in_bf16)
    return [row for row in made if row.name in names]


def why_not(device: str) -> str | None:
    """Say why nothing can be measured on a device."""
    if device == "cpu":
        return None
    import torch

    if not torch.cuda.is_available():
        return "--device cuda: expected a GPU that torch can use, got none on this machine"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Measure, report, and say whether all bounds hold."""
    options = parse(arguments)
    reason = why_not(options.device)
    if reason is not None:
        Console(stderr=True).print(reason, markup=False, highlight=False)
        return NOT_MEASURED
    # What the children inherit.
    os.environ.update(OMP_WAIT_POLICY="passive", BENCH_DEVICE=options.device)
    outcomes = run_all(chosen(options), ATTENTION_COMMANDS, options)
    title = f"attention on {options.device}: medians of {options.rounds} rounds"
    return finish(outcomes, title, options, draw)


if __name__ == "__main__":
    sys.exit(main())
