"""Adapters: what is not installed is skipped."""

from __future__ import annotations

from typing import Any

import pytest

collect_ignore_glob = []
try:
    import transformers
except ModuleNotFoundError:
    collect_ignore_glob = ["test_hf_*.py"]
else:
    transformers.utils.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    """Matrices this small take longer on several threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _unwritten_pages_hold_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is often zero, and whatever else it holds must not matter."""
    import torch

    from pagedkv import KVPages
    from pagedkv.contrib.hf import store

    class Poisoned(KVPages):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for blocks in self.extents:
                blocks.fill_(torch.nan)

    monkeypatch.setattr(store, "KVPages", Poisoned)
