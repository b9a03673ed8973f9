"""What the demo prints: a table for each variant, the ratio and the verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedkv.cli.demo_checks import Answer, Verdict

NUM_SHOWN_CHARACTERS = 60


def print_report(
    console: Console,
    variants: Mapping[str, Sequence[Answer]],
    verdicts: Sequence[Verdict],
    *,
    ratio: float,
) -> None:
    """Print the tables, the ratio and the verdicts; the broken ones last and loudest.

    Parameters
    ----------
    variants : mapping of str to sequence of Answer
        By what the variant is called: the same questions each.
    ratio : float
        Cold to warm.
    """
    for name, answers in variants.items():
        console.print(answers_table(name, answers))
    console.print(f"[bold]cold : warm = {ratio:.1f} : 1[/]  (time to first token)\n", highlight=False)
    shown: set[str] = set()
    for verdict in sorted(verdicts, key=lambda verdict: not verdict.holds):
        mark = Text("✓", "green") if verdict.holds else Text(" BROKEN ", "bold white on red")
        console.print(Text.assemble(mark, " ", verdict.text))
        for note in verdict.notes:
            if note not in shown:
                console.print(Text(f"  {note}", "dim" if verdict.holds else ""))
        shown.update(verdict.notes)


def answers_table(title: str, answers: Sequence[Answer]) -> Table:
    """Make a table with a row for each user."""
    table = Table(
        title=Text(title, "bold"),
        title_justify="left",
        header_style="dim",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("user", no_wrap=True, min_width=4)
    table.add_column("question", ratio=3, min_width=12)
    for heading in ("prompt", "cached", "uncached", "1st token", "tok/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("the answer begins", ratio=4, min_width=12)
    for answer in answers:
        table.add_row(*_cells(answer))
    return table


def _cells(answer: Answer) -> list[Text]:
    speed, num_cached = answer.decode_tokens_per_s, answer.num_cached_tokens
    text = " ".join(answer.text.split())
    if len(text) > NUM_SHOWN_CHARACTERS:
        text = text[:NUM_SHOWN_CHARACTERS].rsplit(" ", 1)[0] + " …"
    return [
        Text(answer.user),
        Text(answer.question),
        Text(f"{answer.num_prompt_tokens:,}"),
        Text(f"{num_cached:,}", "green" if num_cached else "dim"),
        Text(f"{answer.num_prompt_tokens - num_cached:,}"),
        Text(f"{answer.time_to_first_token_s:.3f} s", "green" if num_cached else ""),
        Text("–" if speed is None else f"{speed:.1f}"),
        Text(text, "italic"),
    ]
