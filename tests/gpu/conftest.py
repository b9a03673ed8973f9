from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from pagedkv.errors import BackendUnavailableError
from pagedkv.kernels import load_backend


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none"))


class OnDevice:
    """A backend that is given tensors of the CPU and works on the device's copies of them."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def paged_attention(self, *arguments: Any) -> None:
        self.run("paged_attention", *arguments)

    def run(self, name: str, *arguments: Any) -> None:
        moved = [x.cuda() if isinstance(x, torch.Tensor) else x for x in arguments]
        getattr(self.module, name)(*moved)
        for given, used in zip(arguments, moved, strict=True):
            if isinstance(given, torch.Tensor):
                given.copy_(used)


@pytest.fixture(params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest) -> OnDevice:
    try:
        return OnDevice(load_backend(request.param))
    except BackendUnavailableError as error:
        pytest.skip(str(error))
