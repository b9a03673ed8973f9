"""Tables of figures, of which none may be cut off."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

WIDEST = 400


def print_table(table: Table) -> None:
    """Print a table; into a file or a pipe as wide as it needs, whatever the terminal's width."""
    console = Console()
    if not console.is_terminal:
        needed = console.measure(table, options=console.options.update(width=WIDEST)).maximum
        console = Console(width=max(console.width, needed))
    console.print(table)
