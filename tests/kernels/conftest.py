"""What the tests of kernels share; also, the tests in the folders below find this one's modules by it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from backends import EXACT


@pytest.fixture(scope="module", params=EXACT)
def each_exact_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a whole module on one backend after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDKV_BACKEND", request.param)
        yield
