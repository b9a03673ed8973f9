"""The pages say what the code does: their examples run, their links lead somewhere."""

from __future__ import annotations

import doctest
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"blocks": 25, "digests": 9, "eviction": 50, "layout": 25, "matching": 35}
"""The pages, and how many examples each has at least: none may get lost by its mark-up."""


REFERENCE = {"ops": 18}
GUIDES = {"integrate-an-engine": 20, "transformers": 20}
NEED_TORCH = ("concepts/layout", "reference/ops", "guides/integrate-an-engine", "guides/transformers")


def _pages() -> list[object]:
    folders = {"concepts": PAGES, "reference": REFERENCE, "guides": GUIDES}
    pages = [f"{folder}/{page}" for folder, names in folders.items() for page in names]
    no_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
    return [pytest.param(page, marks=no_torch if page in NEED_TORCH else ()) for page in pages]


@pytest.mark.parametrize("page", _pages())
def test_every_example_in_the_documentation_gives_what_is_printed(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write a file
    path = DOCS / f"{page}.md"
    results = doctest.testfile(str(path), module_relative=False, encoding="utf-8")
    assert results.failed == 0
    assert results.attempted >= (PAGES | REFERENCE | GUIDES)[path.stem]


def test_every_concept_is_a_page_with_a_picture_in_the_list_of_pages() -> None:
    pages = sorted((DOCS / "concepts").glob("*.md"))
    assert [page.stem for page in pages] == sorted(PAGES)
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    for page in pages:
        assert f"](../images/{page.stem}.svg)" in page.read_text(encoding="utf-8")
        assert f"(concepts/{page.name})" in index


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as they are made of the text."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*sorted(DOCS.glob("**/*.md")), DOCS.parent / "README.md"], ids=str)
def test_every_link_inside_the_documentation_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target
