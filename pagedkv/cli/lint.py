"""`pagedkv lint`: why the prompts of a log reuse less of each other than they could."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pagedkv.cli.trace_options import FileTokenizer, StrictOption, TokenizerOption, tell_problems
from pagedkv.errors import UsageError
from pagedkv.policy.text import WordTokenizer
from pagedkv.prompts import LintReport, LoggedPrompt, Tokenizer, lint_prompts, read_log

FILES_HELP = "JSONL: prompts, messages (with system and tools), or token ids; .gz too."


def lint(
    files: Annotated[list[Path], typer.Argument(help=FILES_HELP, show_default=False)],
    tokenizer: TokenizerOption = None,
    top: Annotated[int, typer.Option(help="Findings to show.")] = 10,
    strict: StrictOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find where prompts of a log part from earlier ones, why, and how many tokens that lost.

    Timestamps, ids, numbers, the order of JSON keys, whitespace, reordered text, and dynamic text ahead of
    static text; the most lost tokens first.
    """
    if top < 1:
        raise UsageError(f"--top: expected at least 1, got {top}")
    chosen: Tokenizer = WordTokenizer() if tokenizer is None else FileTokenizer(tokenizer)
    prompts, problems = read_log(files, chosen, strict=strict)
    if tokenizer is None and any(prompt.is_ids for prompt in prompts):
        chosen = _Numbers()
        if not all(prompt.is_ids for prompt in prompts):
            raise UsageError("--tokenizer: expected one for a log of texts and token ids, got none")
    tell_problems(problems)
    report = _run(prompts, chosen)
    report.problems.extend(problems)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2, ensure_ascii=False))
        return
    _print_report(report, top)


class _Numbers:
    """Token ids without a tokenizer are shown as numbers."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(f"{token} " for token in token_ids)


def _run(prompts: list[LoggedPrompt], tokenizer: Tokenizer) -> LintReport:
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("prompts", total=len(prompts))
        return lint_prompts(prompts, tokenizer, progress=lambda done: bar.update(task, advance=done))


def _print_report(report: LintReport, top: int) -> None:
    total = report.num_tokens or 1
    print(
        f"{report.num_prompts:,} prompts, {report.num_tokens:,} tokens: "
        f"{report.reused_tokens:,} ({report.reused_tokens / total:.1%}) found in earlier prompts, "
        f"{report.lost_tokens:,} ({report.lost_tokens / total:.1%}) lost behind a difference"
    )
    if not report.findings:
        print("Nothing that earlier prompts have was lost.")
        return
    console = Console()
    table = Table("lost", "prompts", "why", "where they part", title_justify="left", show_lines=True)
    table.columns[0].justify = table.columns[1].justify = "right"
    for finding in report.findings[:top]:
        before = escape(_line(finding.before))
        tokens = f"«{escape(_line(finding.new_token))}» for «{escape(_line(finding.old_token))}»"
        place = (
            f"…{before}[bold]«{escape(_line(finding.new))}»[/]\n"
            f"before: «{escape(_line(finding.old))}»\n"
            f"[dim]token {finding.position:,}: {tokens}\n"
            f"{escape(finding.where)}, against {escape(finding.against)}[/]"
        )
        why = f"{finding.cause}:\n{finding.advice}"
        table.add_row(f"{finding.lost_tokens:,}", f"{finding.num_prompts:,}", why, place)
    console.print(table)
    if len(report.findings) > top:
        print(f"{len(report.findings) - top} more places; --top shows them")


def _line(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥")
