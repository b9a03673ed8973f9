"""Options that the commands over traces share, and what they make of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from pagedkv.checks import show
from pagedkv.errors import UsageError
from pagedkv.policy import WORKLOADS, Trace, make_workload, read_traces
from pagedkv.policy.trace import Problem

TRACE_HELP = (
    "Mooncake or token JSONL, ShareGPT or chats, coding-agent sessions; .gz too; or a folder of them."
)
TraceArgument = Annotated[list[Path] | None, typer.Argument(help=TRACE_HELP, show_default=False)]
WORKLOAD_HELP = f"In place of traces: {', '.join(WORKLOADS)}."
WorkloadOption = Annotated[str | None, typer.Option(help=WORKLOAD_HELP, show_default=False)]
RequestsOption = Annotated[int, typer.Option(help="Requests of the workload.")]
SeedOption = Annotated[int, typer.Option(help="What makes the workload's chance the same again.")]
HashBlockOption = Annotated[
    int | None, typer.Option(help="Tokens that a hash id stands for.", show_default=False)
]
TokenizerOption = Annotated[
    Path | None, typer.Option(help="A tokenizer.json for texts; else words count.", show_default=False)
]
ModelOption = Annotated[str, typer.Option(help="A config.json, a folder with one, or a known name.")]
BlockSizeOption = Annotated[
    int | None, typer.Option(help="Tokens in a block. Default: the trace's, or 16.", show_default=False)
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Refuse bad lines rather than leave them out.")]
MAX_PROBLEMS_SHOWN = 20


def load_workload(
    paths: list[Path] | None, workload: str | None, num_requests: int, seed: int
) -> Trace | None:
    """Make the workload that is named in place of traces; None if traces are given."""
    if bool(paths) == (workload is not None):
        raise UsageError(f"TRACE, --workload: expected one of them, got {'both' if paths else 'neither'}")
    return None if workload is None else make_workload(workload, num_requests=num_requests, seed=seed)


def load_trace(
    paths: list[Path], *, strict: bool, tokenizer: Path | None = None, hash_block_size: int | None = None
) -> Trace:
    """Read traces, and say on stderr what was left out."""
    if hash_block_size is not None and hash_block_size < 1:
        raise UsageError(f"--hash-block-size: expected at least 1, got {hash_block_size}")
    encode = None if tokenizer is None else FileTokenizer(tokenizer).encode
    trace = read_traces(paths, strict=strict, encode=encode, hash_block_size=hash_block_size)
    tell_problems(trace.problems)
    return trace


def tell_problems(problems: list[Problem]) -> None:
    """Name on stderr every part of a file that was left out, the first twenty in full."""
    for problem in problems[:MAX_PROBLEMS_SHOWN]:
        print(f"pagedkv: left out: {problem}", file=sys.stderr)
    if len(problems) > MAX_PROBLEMS_SHOWN:
        print(f"pagedkv: left out: {len(problems) - MAX_PROBLEMS_SHOWN} more", file=sys.stderr)


class FileTokenizer:
    """The tokenizer of a ``tokenizer.json``."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        if not path.is_file():
            raise UsageError(f"--tokenizer: expected a tokenizer.json, got {show(str(path))}")
        try:
            self._own = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more special
            raise UsageError(f"--tokenizer: expected a tokenizer.json, got {error}, in {path}") from error

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, none added."""
        ids: list[int] = self._own.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ids, special ones too."""
        text: str = self._own.decode(token_ids, skip_special_tokens=False)
        return text


def words(option: str, text: str) -> list[str]:
    """Return what stands between the commas, each once."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise UsageError(f"{option}: expected at least one, got {show(text)}")
    return found


def numbers(option: str, text: str) -> list[int]:
    """Return the positive integers between the commas; none for an empty text."""
    values: Iterable[str] = dict.fromkeys(word.strip() for word in text.split(",") if word.strip())
    found = []
    for word in values:
        try:
            number = int(word)
        except ValueError:
            raise UsageError(f"{option}: expected integers between commas, got {show(word)}") from None
        if number < 1:
            raise UsageError(f"{option}: expected integers of at least 1, got {number}")
        found.append(number)
    return found
