"""A snapshot drawn in the terminal: a character a page, and tables below it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedkv import PoolSnapshot
from pagedkv.snapshot import COMMITTED, EVICTABLE, FREE, STATES, WRITABLE

MAX_ROWS = 32
NEXT = len(STATES)
"""No state of its own: evictable, and among the pages that go next."""
# Whoever sees no colours, or prints the map, has to tell them apart as well.
CHARACTERS = {WRITABLE: "▒", COMMITTED: "█", EVICTABLE: "░", NEXT: "×", FREE: "·"}
ASCII_CHARACTERS = {WRITABLE: "w", COMMITTED: "#", EVICTABLE: "o", NEXT: "x", FREE: "."}
STYLES = {WRITABLE: "yellow", COMMITTED: "green", EVICTABLE: "blue", NEXT: "bold red", FREE: "dim"}
MEANINGS = {
    WRITABLE: "held, and not published",
    COMMITTED: "held and published: others find it",
    EVICTABLE: "published and held by nobody",
    NEXT: "of these, those that are evicted first",
    FREE: "empty",
}
BAR_WIDTH = 32


class Cells(NamedTuple):
    """The characters of a map.

    Attributes
    ----------
    states : ndarray [num_cells]
        What each shows: a state or `NEXT`.
    num_pages : int
        Pages that each stands for, the last perhaps for fewer.
    num_columns : int
        Of a line.
    """

    states: npt.NDArray[Any]
    num_pages: int
    num_columns: int


def print_snapshot(console: Console, name: str, snapshot: PoolSnapshot, facts: dict[str, Any]) -> None:
    """Print the map of `snapshot`, and its `facts` as tables."""
    characters = ASCII_CHARACTERS if console.options.ascii_only else CHARACTERS
    size = f"{snapshot.num_blocks:,} pages of {snapshot.block_size} tokens"
    title = f"{name}: {size}, {snapshot.now_s:,.1f} s after the pool was made"
    console.print(Text(_printable(title, console), style="bold"), soft_wrap=True)
    console.print()
    cells = make_cells(snapshot, [row["page"] for row in facts["next"]], console.width)
    for line in _lines(cells, characters):
        console.print(line, soft_wrap=True)
    each = "a page" if cells.num_pages == 1 else f"{cells.num_pages:,} pages, drawn as most of them are"
    console.print(Text(f"each character is {each}", style="dim"))
    console.print(_legend(facts, cells, characters))
    console.print(Text(f"held more than once: {facts['num_shared']:,}"))
    tables = [_priorities(facts), _tenants(facts, console), _depths(facts, characters), _next(facts)]
    for table in tables:
        if table.row_count:
            console.print()
            console.print(table)


def make_cells(snapshot: PoolSnapshot, next_pages: list[int], width: int) -> Cells:
    """Fit the map into lines of `width` characters, and no more than 32 of them."""
    num_blocks = snapshot.num_blocks
    num_columns = 8
    while num_columns < num_blocks and 2 * num_columns <= width - len(f"{num_blocks:,}  "):
        num_columns *= 2
    num_pages = 1
    while num_blocks > MAX_ROWS * num_columns * num_pages:
        num_pages *= 2
    if num_pages == 1:
        states = snapshot.state.copy()
        states[next_pages] = NEXT
        return Cells(states, 1, num_columns)
    counts = np.zeros((len(STATES), -(-num_blocks // num_pages)), np.int64)
    np.add.at(counts, (snapshot.state, np.arange(num_blocks) // num_pages), 1)
    return Cells(counts.argmax(axis=0), num_pages, num_columns)


def _lines(cells: Cells, characters: dict[int, str]) -> list[Text]:
    """Lines that begin with the block id of their first page."""
    starts = range(0, len(cells.states), cells.num_columns)
    width = len(f"{starts[-1] * cells.num_pages:,}")
    return [
        Text.assemble(
            (f"{start * cells.num_pages:>{width},}  ", "dim"),
            *((characters[c], STYLES[c]) for c in cells.states[start : start + cells.num_columns].tolist()),
        )
        for start in starts
    ]


def _legend(facts: dict[str, Any], cells: Cells, characters: dict[int, str]) -> Table:
    table = _table("", "state", "pages", "share", "")
    for state, character in characters.items():
        if state == NEXT:
            if NEXT in cells.states:
                table.add_row(
                    Text(character, STYLES[NEXT]), "next", str(len(facts["next"])), "", MEANINGS[NEXT]
                )
            continue
        num_pages = facts["states"][STATES[state]]
        share = f"{num_pages / facts['num_blocks']:.1%}"
        table.add_row(Text(character, STYLES[state]), STATES[state], f"{num_pages:,}", share, MEANINGS[state])
    return table


def _priorities(facts: dict[str, Any]) -> Table:
    title = "Priorities, the last to go first"
    table = _table(
        "priority", "pages", "held", "evictable", "for good", "with an end", "next end", title=title
    )
    for row in facts["priorities"]:
        kept = (f"{row['num_for_good']:,}", f"{row['num_with_end']:,}", _time(row["next_end_s"]))
        table.add_row(str(row["priority"]), *_totals(row), *kept)
    return table


def _tenants(facts: dict[str, Any], console: Console) -> Table:
    table = _table("tenant", "pages", "held", "evictable", "salt", title="Tenants", left=("tenant", "salt"))
    for row in facts["tenants"]:
        salt = "" if row["tenant"] is None else _printable(row.get("salt", "hidden"), console)
        table.add_row(_tenant(row), *_totals(row), Text(salt))
    return table


def _depths(facts: dict[str, Any], characters: dict[int, str]) -> Table:
    title = "Depth: where in their prompts the blocks stand"
    table = _table("blocks", "pages", "held", "evictable", "", title=title, left=("blocks", ""))
    most = max((row["num_pages"] for row in facts["depths"]), default=1)
    for row in facts["depths"]:
        num_held = -(-row["num_held"] * BAR_WIDTH // most)
        num_evictable = -(-row["num_pages"] * BAR_WIDTH // most) - num_held
        bar = Text.assemble(
            (characters[COMMITTED] * num_held, STYLES[COMMITTED]),
            (characters[EVICTABLE] * num_evictable, STYLES[EVICTABLE]),
        )
        first, last = row["first"], row["last"]
        table.add_row(f"{first}" if first == last else f"{first:,} to {last:,}", *_totals(row), bar)
    return table


def _next(facts: dict[str, Any]) -> Table:
    title = "Evicted next, in this order"
    table = _table(
        "page", "tokens", "priority", "ends in", "idle", "tenant", title=title, left=("tokens", "tenant")
    )
    for row in facts["next"]:
        end = "never" if row["retained"] and row["ends_in_s"] is None else _time(row["ends_in_s"])
        tokens = "[{:,}, {:,})".format(*row["tokens"])
        idle = _time(row["idle_s"])
        table.add_row(f"{row['page']:,}", Text(tokens), str(row["priority"]), end, idle, _tenant(row))
    return table


def _table(*headings: str, title: str | None = None, left: tuple[str, ...] = ("", "state")) -> Table:
    """Make a table whose columns are numbers, but for those named in `left`."""
    table = Table(*headings, title=title, box=None, header_style="dim", pad_edge=False)
    table.title_justify, table.title_style = "left", "bold"
    for column, heading in zip(table.columns, headings, strict=True):
        column.justify = "left" if heading in left else "right"
    return table


def _totals(row: dict[str, Any]) -> tuple[str, str, str]:
    return f"{row['num_pages']:,}", f"{row['num_held']:,}", f"{row['num_evictable']:,}"


def _tenant(row: dict[str, Any]) -> str:
    return "nobody" if row["tenant"] is None else str(row["tenant"])


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:,.1f} s"


def _printable(text: str, console: Console) -> str:
    return text.encode("ascii", "backslashreplace").decode() if console.options.ascii_only else text
