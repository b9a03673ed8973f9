"""XXH3 of 128 bits equals the reference implementation at every length where its algorithm changes."""

from __future__ import annotations

import random

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import _core


@pytest.mark.parametrize("first_byte", [0, 255, None])
def test_it_equals_the_reference_at_every_length_to_2048(first_byte: int | None) -> None:
    data = random.Random(1).randbytes(2049) if first_byte is None else bytes([first_byte]) * 2049
    for length in range(2049):
        assert _core.xxh3_128(data[:length]) == xxhash.xxh3_128_digest(data[:length]), length


def test_it_equals_the_reference_on_long_messages() -> None:
    rng = random.Random(2)
    for _ in range(100):
        message = rng.randbytes(rng.randrange(100_000))
        assert _core.xxh3_128(message) == xxhash.xxh3_128_digest(message), len(message)


@given(st.binary(max_size=400))
def test_it_equals_the_reference_on_any_message(message: bytes) -> None:
    assert _core.xxh3_128(message) == xxhash.xxh3_128_digest(message)
