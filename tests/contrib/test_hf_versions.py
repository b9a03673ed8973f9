"""The range of releases is stated once, and what lies outside of it is refused with the range named."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from pagedkv import BackendUnavailableError
from pagedkv.contrib.hf.versions import NEWEST, OLDEST, check_transformers

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["3.5.1", "4.9.2", "4.46.3", "6.0.0", "10.1"])
def test_a_release_outside_of_the_range_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    message = f"transformers >= {OLDEST}, < 6, got {version}"
    with pytest.raises(BackendUnavailableError, match=re.escape(message)):
        check_transformers()


@pytest.mark.parametrize("version", [OLDEST, "4.47.0", "4.100.0.dev0", "5.0.0rc1", f"{NEWEST}.0", "5.99"])
def test_a_release_inside_of_the_range_is_let_through(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    assert check_transformers() == version


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BackendUnavailableError, match=r"got none installed; pip install 'pagedkv\[hf\]'"):
        check_transformers()


def test_the_package_and_the_tests_have_the_range_that_is_stated() -> None:
    assert f'"transformers>={OLDEST},<6"' in (ROOT / "pyproject.toml").read_text()
    found = re.search(r"^HF_RELEASES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    releases = found[1].split()
    assert releases[0].startswith(f"{OLDEST}.")
    assert releases[-1].startswith(f"{NEWEST}.")
    guide = (ROOT / "docs/guides/transformers.md").read_text()
    for release in releases:
        assert re.search(rf"\b{re.escape(release.rpartition('.')[0])}\b", guide), release
