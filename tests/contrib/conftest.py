"""Adapters: what is not installed is skipped."""

from __future__ import annotations

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
