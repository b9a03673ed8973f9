"""The guide to capacity shows what its commands print."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest
from command import run
from guide_files import write_prompts

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "capacity.md"
COMMANDS = re.findall(
    r"^```\n\$ pagedkv (.+)\n((?:.*\n)*?)```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
)


def test_every_command_is_shown() -> None:
    names = {arguments.split()[0] for arguments, _ in COMMANDS}
    assert names == {"plan", "simulate", "breakeven", "lint"}


@pytest.mark.parametrize(("arguments", "printed"), COMMANDS, ids=[arguments for arguments, _ in COMMANDS])
def test_a_command_prints_what_the_page_shows(
    arguments: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_prompts(tmp_path)
    result = run(*shlex.split(arguments))
    assert result.returncode == 0, result.stderr
    shown = [line.rstrip() for line in printed.splitlines()]
    lines = [line.rstrip() for line in result.stdout.rstrip().splitlines()]
    if shown[0] == "…":  # only the end
        shown = shown[1:]
        lines = lines[-len(shown) :]
    assert lines == shown


def test_the_examples_in_python_give_what_is_printed() -> None:
    results = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert results.failed == 0
    assert results.attempted >= 16
