"""What every test shares: the profiles of the property-based tests, and a line that says what is tested."""

from __future__ import annotations

import os

# Read when torch is loaded. Threads that spin while they wait slow a busy machine down tenfold.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from hypothesis import HealthCheck, Phase, settings

import pagedkv

# Both profiles leave out the per-example deadline: the first example pays for imports and compiled caches.
settings.register_profile(
    "ci",
    derandomize=True,  # the same examples every time, so that a red run is red again
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "nightly",
    max_examples=1000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# Whether a test fails at all: what breaks the code on purpose needs no small example.
settings.register_profile("unshrunk", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"pagedkv {pagedkv.__version__} from {pagedkv.__path__[0]}"
