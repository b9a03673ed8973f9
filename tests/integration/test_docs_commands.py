"""The commands that the documentation shows print what it shows."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
from command import run

DOCS = Path(__file__).parents[2] / "docs" / "concepts"
COMMANDS = [
    (page.name, *found)
    for page in sorted(DOCS.glob("*.md"))
    for found in re.findall(
        r"^\$ pagedkv (.+)\n((?:.+\n|\n(?!```))*?)```", page.read_text("utf-8"), re.MULTILINE
    )
]


def test_there_are_commands_to_look_at() -> None:
    assert [arguments for _, arguments, _ in COMMANDS] == ["hash prompt.json", "inspect pool.npz"]


@pytest.mark.parametrize(("page", "arguments", "printed"), COMMANDS)
def test_a_command_prints_what_its_page_shows(
    page: str, arguments: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    doctest.testfile(str(DOCS / page), module_relative=False, encoding="utf-8")  # its examples write the file
    Path("prompt.json").write_text(str(list(range(40))))
    result = run(*arguments.split())
    assert result.returncode == 0, result.stderr
    shown = [line.rstrip() for line in printed.splitlines()]
    if shown[-1] == "…":
        del shown[-1]
    assert [line.rstrip() for line in result.stdout.splitlines()][: len(shown)] == shown
