"""`pagedkv inspect`: a snapshot of a pool, drawn as a map of its pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pagedkv import PoolSnapshot
from pagedkv.checks import check_int
from pagedkv.cli.outputs import check_output
from pagedkv.cli.page_facts import collect_facts
from pagedkv.cli.page_map import print_snapshot


def inspect(
    snapshot: Annotated[
        Path, typer.Argument(help="A file of `BlockPool.snapshot().save`, or `pagedkv run --snapshot`.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the totals as JSON.")] = False,
    width: Annotated[
        int | None, typer.Option(help="Characters of a line; by default the terminal's.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the map into this file, a PNG.")] = None,
    show_salts: Annotated[
        bool, typer.Option("--show-salts", help="Show the tenants' salts, which may be secret.")
    ] = False,
) -> None:
    """Show what the pages of a pool held, who held them, and which were to go next."""
    if width is not None:
        check_int("--width", width, 40, 1000)
    check_output("--plot", plot)
    loaded = PoolSnapshot.load(snapshot)
    facts = collect_facts(loaded, show_salts=show_salts)
    if plot is not None:
        from pagedkv.cli.page_plot import save_page_plot

        save_page_plot(loaded, plot, title=snapshot.name)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print_snapshot(Console(width=width), snapshot.name, loaded, facts)
