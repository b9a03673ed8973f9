"""Files of prompts for `pagedkv run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagedkv.checks import show
from pagedkv.errors import UsageError


def read_prompts(path: Path) -> list[str]:
    """Return a file's prompts: one a line, or with the suffix .jsonl one JSON text or object with a "prompt".

    Raises
    ------
    UsageError
        It can't be read, holds no prompt, or a line is something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts: expected a text file, got {error}, in {path}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if path.suffix == ".jsonl":
        prompts = [_from_json(line, f"{path}, line {number}") for number, line in numbered]
    else:
        prompts = [line for _, line in numbered]
    if not prompts:
        raise UsageError(f"--prompts: expected at least one prompt, got none, in {path}")
    return prompts


def _from_json(line: str, where: str) -> str:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(f"--prompts: expected JSON, got {error}, in {where}") from error
    if isinstance(value, dict):
        value = value.get("prompt")
    if not isinstance(value, str):
        raise UsageError(
            f"--prompts: expected a text or an object with a prompt, got {show(value)}, in {where}"
        )
    return value
