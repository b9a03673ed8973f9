"""A run's outcome: as a table, as JSON, as a picture."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.bounds import Verdict, exit_code
from benchmarks.child import ROOT
from benchmarks.harness import summary
from benchmarks.running import Outcome

WIDTH = 168
"""Of the table, where the terminal does not say."""


def make_parser(name: str, description: str, rows: Sequence[str], num_rounds: int) -> argparse.ArgumentParser:
    """Make a benchmark's command line: what all of them take."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="rows: " + ", ".join(rows),
    )
    parser.add_argument(
        "--rows", nargs="+", choices=rows, default=list(rows), metavar="ROW", help="measure these (all)"
    )
    parser.add_argument(
        "--rounds", type=int, default=num_rounds, help=f"turns that each harness takes ({num_rounds})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture")
    parser.add_argument(
        "--peers",
        type=Path,
        default=ROOT / ".venv-peers",
        metavar="FOLDER",
        help="the environments that 'make bench-peers' made (.venv-peers)",
    )
    return parser


def finish(
    outcomes: Sequence[Outcome],
    title: str,
    options: argparse.Namespace,
    draw: Callable[[Iterable[Outcome], Path], None],
) -> int:
    """Print a run's report, write and draw what its options ask for, and return the exit status."""
    print_report(outcomes, title)
    code = exit_code(
        (verdict for outcome in outcomes for verdict in outcome.verdicts),
        all_measured=not any(outcome.reasons for outcome in outcomes),
    )
    if options.json:
        options.json.write_text(json.dumps(as_json(outcomes, code), indent=1, ensure_ascii=False) + "\n")
    if options.plot:
        draw(outcomes, options.plot)
    return code


def number(value: float) -> str:
    """Three digits that count, or all before the point: 0.0712, 4.31, 61.4, 1,298."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def one_line(outcome: Outcome) -> str:
    """Say in a line how a row went."""
    ours = outcome.medians.get("pagedkv")
    figure = "" if ours is None else f" {number(ours)} {outcome.row.quantity}"
    words = {True: "holds", False: "MISSED", None: "not measured"}
    verdicts = ", ".join(words[verdict.holds] for verdict in outcome.verdicts) or "no bound here"
    return f"{outcome.row.name}:{figure}; {verdicts}"


def series_lines(outcome: Outcome) -> list[tuple[str, str, str, str]]:
    """Name, median, best, and how many times as much as ours, of each series."""
    medians = outcome.medians
    ours = medians.get("pagedkv")
    lines = []
    for series, samples in outcome.samples.items():
        ratio = "" if ours is None or series == "pagedkv" else f"{number(medians[series] / ours)} ×"
        lines.append((series, number(medians[series]), number(min(samples)), ratio))
    return lines


def bound_line(verdict: Verdict, quantity: str) -> str:
    """Give the verdict, the figure and its limit, and the bound in words."""
    text = escape(verdict.bound.text(quantity))
    if verdict.holds is None or verdict.limit is None or verdict.value is None:
        return f"[yellow]not measured[/]: {text}"
    if verdict.holds:
        return f"[green]holds[/], {number(verdict.value)} ≤ {number(verdict.limit)}: {text}"
    return f"[red]MISSED[/], {number(verdict.value)} > {number(verdict.limit)}: {text}"


def limit_line(outcome: Outcome) -> str:
    """Give what is reached of the row's limit, and which that is."""
    return "" if outcome.of_limit is None else f"{outcome.of_limit:.0%}\n{outcome.row.limit}"


def make_table(outcomes: Iterable[Outcome], title: str) -> Table:
    """All rows with all their series and bounds."""
    table = Table(title=title, show_lines=True)
    table.add_column("work", max_width=36)
    for heading in ("series", "median", "best", "× pagedkv"):
        table.add_column(heading, justify="left" if heading == "series" else "right", no_wrap=True)
    outcomes = list(outcomes)
    has_limits = any(outcome.row.limit for outcome in outcomes)
    if has_limits:
        table.add_column("of the limit", justify="right")
    table.add_column("bounds")
    for outcome in outcomes:
        row = outcome.row
        work = f"[bold]{row.name}[/]: {escape(row.work)}, {row.quantity} a {row.unit}"
        if outcome.num_tries > 1:
            work += " [yellow](second try)[/]"
        series = ["\n".join(column) for column in zip(*series_lines(outcome), strict=True)] or [""] * 4
        bounds = "\n".join(bound_line(verdict, row.quantity) for verdict in outcome.verdicts)
        table.add_row(work, *series, *([limit_line(outcome)] if has_limits else []), bounds)
    return table


def print_report(outcomes: Sequence[Outcome], title: str) -> None:
    """Print the table, and below it what could not be measured."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(make_table(outcomes, title))
    reasons: dict[str, list[str]] = {}
    for outcome in outcomes:
        for reason in outcome.reasons:
            reasons.setdefault(reason, []).append(outcome.row.name)
    for reason, rows in reasons.items():
        console.print(f"not measured in {', '.join(rows)}: {reason}", markup=False, highlight=False)
    missed = [outcome.row.name for outcome in outcomes if outcome.is_missed]
    if missed:
        console.print(f"missed: {', '.join(missed)}", markup=False, highlight=False)


def as_json(outcomes: Iterable[Outcome], status: int) -> dict[str, Any]:
    """Everything that a later reader could ask for."""
    rows = [
        {
            "name": outcome.row.name,
            "work": outcome.row.work,
            "unit": outcome.row.unit,
            "quantity": outcome.row.quantity,
            "num_tries": outcome.num_tries,
            "not_measured": outcome.reasons,
            "limit": outcome.row.limit,
            "of_limit": outcome.of_limit,
            "num_operations": outcome.row.num_operations,
            "num_bytes": outcome.row.num_bytes,
            "series": {series: summary(samples) for series, samples in outcome.samples.items()},
            "bounds": [
                {
                    "bound": verdict.bound.text(outcome.row.quantity),
                    "limit": verdict.limit,
                    "value": verdict.value,
                    "holds": verdict.holds,
                }
                for verdict in outcome.verdicts
            ],
        }
        for outcome in outcomes
    ]
    machine = {"processor": processor(), "python": platform.python_version(), "load": os.getloadavg()}
    return {"machine": machine, "exit_code": status, "rows": rows}


def processor() -> str:
    """Its name, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def shown_series(outcome: Outcome, library: str) -> str | None:
    """Name a library's series that a bound compares with, or else its first."""
    compared = [series for bound in outcome.row.bounds for _, series in bound.terms]
    own = (series for series in [*compared, *outcome.samples] if series.split(",")[0] == library)
    return next((series for series in own if series in outcome.samples), None)


def draw(outcomes: Iterable[Outcome], file: Path) -> None:
    """Draw our medians beside the peers', for the rows that have some."""
    from matplotlib import pyplot

    greys = ("#8c8c8c", "#c9c9c9", "#5f6b7a")
    outcomes = list(outcomes)
    peers = dict.fromkeys(peer.split(",")[0] for outcome in outcomes for peer in outcome.row.peers)
    colours = {"pagedkv": "#1b7f5c", **dict(zip(peers, greys, strict=False))}
    shown = [o for o in outcomes if any(shown_series(o, peer.split(",")[0]) for peer in o.row.peers)]
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.75 * len(shown)), layout="constrained")
    height = 0.8 / len(colours)
    for place, (library, colour) in enumerate(colours.items()):
        label: str | None = library
        for index, outcome in enumerate(shown):
            series = shown_series(outcome, library)
            if series is None:
                continue
            median = outcome.medians[series]
            bar = axes.barh(index + (place - 1) * height, median, height, label=label, color=colour)
            label = None  # in the legend once
            axes.bar_label(bar, [f" {number(median)}{series.removeprefix(library)}"], fontsize=8)
    axes.set_yticks(
        range(len(shown)), [f"{o.row.name}\n{o.row.quantity} a {o.row.unit}" for o in shown], fontsize=8
    )
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(left=0.01)
    axes.set_xlabel("median (logarithmic; shorter is faster)")
    if shown:
        axes.legend()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
