"""Draws the pictures of docs/concepts: ``python docs/images/concepts.py`` writes them beside itself."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from drawing import Drawing

HERE = Path(__file__).parent


def blocks() -> Drawing:
    """Draw two sequences, their page tables and the pages; below, the states of a page."""
    d = Drawing(760, 470, "Blocks of two sequences, their page tables, the pages, and the states of a page")
    left, block_width = 110, 92
    states = ["committed", "writable", "free", "committed", "committed", "evictable", "writable", "free"]
    place = [left + 41 + page * 72 for page in range(len(states))]
    d.text(left - 12, 150, "pages", anchor="end", bold=True)
    for page, (x, state) in enumerate(zip(place, states, strict=True)):
        d.box(x - 31, 132, 62, 36, state, f"{page}", size=13)

    rows = (
        # name, blocks, page table, y of the sequence and of its table, shift of arrows at shared pages
        ("sequence A", ("system", "prompt", "A asks"), (3, 0, 6), 24, 78, -6),
        ("sequence B", ("system", "prompt", "B asks", "and …"), (3, 0, 4, 1), 254, 208, 6),
    )
    for name, labels, table, y, table_y, shift in rows:
        d.text(left - 12, y + 15, name, anchor="end", bold=True)
        d.text(left - 12, table_y, "block_table", anchor="end", colour="quiet", size=11)
        down = 1 if table_y > y else -1
        for i, (label, page) in enumerate(zip(labels, table, strict=True)):
            x = left + i * block_width
            width = block_width / 2 if i == len(labels) - 1 else block_width
            d.box(x, y, width, 30, "plain", label, size=11)
            d.text(x + 30, table_y, f"{page}", size=13, bold=True)
            d.line((x + 30, y + 15 + down * 16), (x + 30, table_y - down * 10))
            target = place[page] + (shift if page in (3, 0) else 0)
            d.line((x + 30, table_y + down * 10), (target, 150 - down * 20), arrow=True)
        end = left + len(labels) * block_width - block_width / 2
        d.text(end + 10, y + 15, "blocks of 16 tokens", size=11, colour="quiet", anchor="start")

    y, half = 370, 52
    columns = (
        ("free", "holds nothing", 62),
        ("writable", "one owner writes", 270),
        ("committed", "published, in use", 478),
        ("evictable", "published, unused", 686),
    )
    for state, meaning, x in columns:
        d.box(x - half, y - 20, 2 * half, 40, state, state.upper())
        d.text(x, y + 33, meaning, size=11, colour="quiet")
    moves = (("reserve", "close, abandon"), ("commit", ""), ("close", "open: a hit"))
    for (forth, back), (_, _, x), (_, _, next_x) in zip(moves, columns, columns[1:], strict=False):
        middle = (x + next_x) / 2
        d.line((x + half + 2, y - 7), (next_x - half - 2, y - 7), arrow=True)
        d.text(middle, y - 18, forth, size=11)
        if back:
            d.line((next_x - half - 2, y + 7), (x + half + 2, y + 7), arrow=True)
            d.text(middle, y + 19, back, size=11)
    d.line((686, y + 44), (686, y + 64), (62, y + 64), (62, y + 46), arrow=True)
    d.text(374, y + 77, "eviction", size=11)
    return d


def matching() -> Drawing:
    """Draw a prompt on its way down the tree, and the run that it borrows."""
    d = Drawing(760, 396, "A prompt matches two whole blocks of the tree and five tokens of a third")
    d.text(20, 25, "the prompt", anchor="start", bold=True)
    cells = (
        ("0 1 … 15", "committed", 110),
        ("16 17 … 31", "committed", 110),
        ("32 33 34 35 36", "evictable", 110),
        ("9 9 9", "plain", 60),
    )
    x = 120
    for label, fill, width in cells:
        d.box(x, 10, width, 30, fill, label)
        x += width
    d.text(x + 14, 25, "40 tokens", anchor="start", colour="quiet", size=11)

    d.box(346, 60, 68, 28, "plain", "root")
    d.line((380, 90), (250, 120), arrow=True)
    d.line((380, 90), (550, 120), arrow=True)
    d.box(185, 122, 130, 34, "committed", "0 1 … 15")
    d.box(485, 122, 130, 34, "plain", "7 7 … 7")
    d.line((250, 158), (250, 186), arrow=True)
    d.box(185, 188, 130, 34, "committed", "16 17 … 31")
    for x in (110, 310, 500):
        d.line((250, 224), (x, 256), arrow=True)
    d.box(45, 258, 130, 34, "plain", "32 33 5 6 …")
    d.box(225, 258, 86, 34, "evictable", "32 … 36")
    d.box(311, 258, 84, 34, "plain", "37 … 47")
    d.box(435, 258, 130, 34, "plain", "90 91 92 …")
    for y, note in ((139, "tokens 0–15: equal"), (205, "tokens 16–31: equal")):
        d.text(20, y, note, anchor="start", size=11, colour="quiet")
    d.text(590, 275, "children in token order", anchor="start", size=11, colour="quiet")

    d.text(310, 306, "the longest common run: 5 tokens, then 37 is not 9", size=11, colour="loud")
    d.line((268, 316), (268, 346), colour="loud", arrow=True)
    d.text(284, 331, "copied in prepare", size=11, colour="loud", anchor="start")
    d.box(225, 348, 86, 34, "evictable", "32 … 36", dashed=True)
    d.box(311, 348, 84, 34, "writable", "9 9 9", dashed=True)
    own = "the request's own page: 37 tokens reused, 3 to compute"
    d.text(410, 365, own, size=11, anchor="start", colour="quiet")
    return d


def eviction() -> Drawing:
    """Draw the order of eviction, and what the breakpoints of a prompt keep."""
    d = Drawing(760, 366, "The order of eviction, and what the breakpoints of a prompt keep")
    d.text(20, 20, "evicted first", anchor="start", bold=True, colour="loud")
    d.text(740, 20, "evicted last", anchor="end", bold=True)
    d.line((118, 20), (650, 20), arrow=True)
    classes = (
        ("older generation", "gone", ("", ""), 20),
        ("priority 10", "evictable", ("", ""), 152),
        ("priority 35: nobody asked", "evictable", ("B2", "B1", "B0", "A3"), 284),
        ("priority 70", "kept", ("A2", "A1", "A0"), 508),
    )
    for name, fill, pages, x in classes:
        for i, page in enumerate(pages):
            d.box(x + i * 46, 40, 42, 32, fill, page)
        d.text(x, 86, name, size=11, colour="quiet", anchor="start")
    order = "in a class: what was released or touched longest ago; of one prompt, its deepest block first"
    d.text(20, 110, order, size=12, anchor="start")

    call = "open(A, breakpoints=[Breakpoint(32, 3600), Breakpoint(56, 300)])"
    d.text(20, 158, call, anchor="start", bold=True)
    left, y, width = 20, 202, 104
    for i, fill in enumerate(("kept", "kept", "kept", "evictable")):
        d.box(left + i * width, y, width, 34, fill, f"A{i}")
    d.box(left + 4 * width, y, 39, 34, "free", "A4")
    for position in (0, 16, 32, 48, 64, 70):
        d.text(left + position / 16 * width, y + 46, f"{position}", size=11, colour="quiet")
    for position, label in ((32, "one hour"), (56, "five minutes")):
        x = left + position / 16 * width
        d.line((x, y - 12), (x, y + 36), colour="loud")
        d.text(x, y - 20, label, size=11, colour="loud")
    rows = (
        ("A0, A1", "priority 70 for an hour: the longest time that covers them"),
        ("A2", "priority 70 for five minutes: the last whole block before 56"),
        ("A3", "priority 35: the breakpoint lies inside it"),
        ("A4", "six tokens fill no block: not published"),
    )
    for i, (name, meaning) in enumerate(rows):
        d.text(20, 274 + i * 22, name, anchor="start", bold=True)
        d.text(80, 274 + i * 22, meaning, anchor="start")
    return d


def digests() -> Drawing:
    """Draw the chain of digests."""
    d = Drawing(760, 250, "The chain of digests: each names its block and all before it")
    d.box(20, 100, 110, 44, "plain", "root")
    d.text(75, 36, "namespace, block size", size=11)
    d.line((75, 48), (75, 98), arrow=True)
    for i, (tokens, extras) in enumerate(
        (("tokens 0–15", "salt, adapter, media"), ("tokens 16–31", "media"), ("tokens 32–47", ""))
    ):
        x = 190 + i * 180
        d.line((x - 60, 122), (x - 2, 122), arrow=True)
        d.box(x, 100, 120, 44, "committed", f"digest {i}", size=13)
        d.box(x, 24, 120, 28, "plain", tokens)
        d.line((x + 60, 54), (x + 60, 98), arrow=True)
        d.text(x + 72, 76, "SHA-256", size=11, colour="quiet", anchor="start")
        if extras:
            d.box(x, 192, 120, 28, "evictable", extras, size=11)
            d.line((x + 60, 190), (x + 60, 146), arrow=True)
        else:
            d.text(x + 60, 206, "no extras, no bytes", size=11, colour="quiet")
    d.text(730, 122, "…", size=16)
    d.text(380, 238, "what enters one block is carried on to all that follow", size=11, colour="quiet")
    return d


def layout() -> Drawing:
    """Draw two blocks in both arrangements, and below one page in both layouts."""
    d = Drawing(760, 420, "Blocks and layers in memory, and tokens and heads of one page")
    d.text(20, 22, 'arrangement "block": a block is one extent', anchor="start", bold=True)
    x = 20.0
    for block in range(2):
        start = x
        for layer in range(2):
            for kind, fill in (("K", "committed"), ("V", "evictable")):
                d.box(x, 44, 62, 34, fill, f"{kind} layer {layer}", size=11)
                x += 62
        d.box(x, 44, 62, 34, "kept", "scales", size=11)
        x += 62
        d.line((start, 86), (x - 2, 86))
        d.text((start + x) / 2, 100, f"block {block}", size=11, colour="quiet")
        x += 10
    d.text(x + 4, 61, "…", anchor="start", size=16)

    d.text(20, 138, 'arrangement "layer": K or V of a layer is one extent', anchor="start", bold=True)
    x = 20.0
    for name, fill in (("K layer 0", "committed"), ("V layer 0", "evictable"), ("K layer 1", "committed")):
        start = x
        for label, width in (("block 0", 62), ("block 1", 62), ("…", 50)):
            d.box(x, 160, width, 34, fill, label, size=11)
            x += width
        d.line((start, 202), (x - 2, 202))
        d.text((start + x) / 2, 216, name, size=11, colour="quiet")
        x += 10
    d.text(x + 4, 177, "… and scales by themselves", anchor="start", size=11, colour="quiet")

    d.text(20, 256, "one page of 3 tokens and 2 heads, in the order of memory", anchor="start", bold=True)
    for y, name, cells in (
        (276, "NHD", [(token, head) for token in range(3) for head in range(2)]),
        (336, "HND", [(token, head) for head in range(2) for token in range(3)]),
    ):
        d.text(40, y + 17, name, bold=True)
        for i, (token, head) in enumerate(cells):
            fill = "writable" if head else "free"
            d.box(80 + i * 104, y, 104, 34, fill, f"token {token}, head {head}", size=11)
    d.text(380, 396, "each cell holds head_dim numbers, side by side", size=11, colour="quiet")
    return d


PICTURES = {
    "blocks": blocks,
    "matching": matching,
    "eviction": eviction,
    "digests": digests,
    "layout": layout,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
