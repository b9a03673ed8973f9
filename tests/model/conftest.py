"""Failed comparisons show both sides, though they are made in a helper."""

import pytest

pytest.register_assert_rewrite("side_by_side", "comparing", "event_replay", "pool_driving")
