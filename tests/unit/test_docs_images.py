"""The pictures of the concept pages are those that their script draws, and stay inside their frames."""

from __future__ import annotations

import sys
from pathlib import Path
from runpy import run_path
from typing import Any
from xml.etree import ElementTree

import pytest

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SVG = "{http://www.w3.org/2000/svg}"
NAMES = ["blocks", "digests", "eviction", "layout", "matching"]


@pytest.fixture(scope="module")
def pictures() -> dict[str, Any]:
    before = list(sys.path)
    try:
        return run_path(str(IMAGES / "concepts.py"))["PICTURES"]
    finally:
        sys.path[:] = before


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_picture_is_what_the_script_draws(name: str, pictures: dict[str, Any]) -> None:
    assert sorted(pictures) == NAMES
    assert (IMAGES / f"{name}.svg").read_text(encoding="utf-8") == pictures[name]().svg()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_leaves_the_frame_and_every_colour_has_two_themes(name: str) -> None:
    root = ElementTree.parse(IMAGES / f"{name}.svg").getroot()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.attrib[key]) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
    for text in root.iter(f"{SVG}text"):
        # No letter of a common font is wider than this on average; nobody's fonts are known here.
        length = 0.58 * float(text.attrib["font-size"]) * len(text.text or "")
        share = {"start": 0.0, "middle": 0.5, "end": 1.0}[text.attrib["text-anchor"]]
        left = float(text.attrib["x"]) - share * length
        assert left >= 0, text.text
        assert left + length <= width, text.text
    style = root.find(f"{SVG}style")
    assert style is not None
    assert style.text is not None
    light, dark = style.text.split("@media (prefers-color-scheme: dark)")
    used = {name for each in root.iter() for name in each.attrib.get("class", "").split()}
    for name in used:
        assert f".{name}" in light
        assert f".{name}" in dark
