"""Logs of prompts: texts, token ids, chats, and requests as they were sent to an API."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.checks import show
from pagedkv.errors import UsageError
from pagedkv.extras import check_salt
from pagedkv.policy.chats import render
from pagedkv.policy.lines import read_entries
from pagedkv.policy.readers import token_ids_of
from pagedkv.policy.trace import Problem
from pagedkv.prompts.lint import LoggedPrompt, Tokenizer


def read_log(
    paths: Iterable[Path], tokenizer: Tokenizer, *, strict: bool = False
) -> tuple[list[LoggedPrompt], list[Problem]]:
    """Read prompts in the order of the files.

    An object has ``prompt`` (a text, or token ids), ``token_ids``, ``text``, ``messages`` or
    ``conversations``; with messages also ``system`` and ``tools``, as in requests to an API.

    Raises
    ------
    UsageError
        A file can't be read or holds no prompt; if `strict`, also the first entry that is wrong.
    """
    prompts: list[LoggedPrompt] = []
    problems: list[Problem] = []
    for path in paths:
        count, before = len(prompts), len(problems)
        for item in read_entries(path):
            if isinstance(item, Problem):
                problem = item
            else:
                try:
                    prompts.append(_prompt(item.where, item.value, tokenizer))
                    continue
                except UsageError as error:
                    problem = Problem(item.where, str(error))
            if strict:
                raise UsageError(str(problem))
            problems.append(problem)
        if len(prompts) == count:
            why = f"; {problems[before]}" if len(problems) > before else ""
            raise UsageError(f"{path}: expected a prompt at least, got none{why}")
    return prompts, problems


def _prompt(where: str, fields: dict[str, Any], tokenizer: Tokenizer) -> LoggedPrompt:
    salt = fields.get("cache_salt")
    if salt is not None:
        check_salt(salt)
    for name in ("token_ids", "prompt_token_ids", "prompt"):
        if isinstance(fields.get(name), list):
            if not fields[name]:
                raise UsageError(f"{name}: expected at least one token id, got none")
            return LoggedPrompt(where, token_ids_of(name, fields[name]), salt, True)
    if "messages" in fields or "conversations" in fields:
        text = render(fields)
    else:
        names = [name for name in ("prompt", "text", "input") if name in fields]
        if not names:
            raise UsageError(f"fields: expected a prompt, messages or token_ids, got {show(list(fields))}")
        text = fields[names[0]]
        if not isinstance(text, str):
            raise UsageError(f"{names[0]}: expected a text or a list of token ids, got {show(text)}")
    if not text:
        raise UsageError("prompt: expected a text, got an empty one")
    return LoggedPrompt(where, np.array(tokenizer.encode(text), np.uint32), salt)
