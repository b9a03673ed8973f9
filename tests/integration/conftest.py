"""Models that several integration tests share; each is made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import TINY, random_tensors

from pagedkv.errors import BackendUnavailableError
from pagedkv.runner.bundled import bundled_model_path
from pagedkv.runner.loader import LoadedModel, load_model
from pagedkv.runner.model import Model


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    # Small matrices gain nothing from more, and lose much where other processes want the cores too.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model() -> Model:
    return Model(TINY, random_tensors(TINY))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        return bundled_model_path()
    except BackendUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> LoadedModel:
    return load_model(smollm2_path)
