"""The two serialisations that vLLM hashes, against pickle itself and against the examples of RFC 8949."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.errors import UsageError
from pagedkv.schemes import cbor, pickled

integers = st.integers(-(2**40), 2**64 - 1) | st.sampled_from(
    [n + d for n in (0, 2**8, 2**16, 2**31, 2**32) for d in (-1, 0, 1)]
)
# Strings of two letters on: CPython keeps one object for each single letter, which pickle then sees.
texts = st.text(min_size=2, max_size=300)
leaves = st.none() | integers | st.binary(max_size=255) | texts
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=5).map(tuple), max_leaves=400)


def with_own_objects(value: Any) -> Any:
    """A copy in which no string, bytes or tuple is one object with an equal one."""
    if isinstance(value, str):
        return value.encode("utf-8").decode("utf-8")
    if isinstance(value, bytes):
        return bytes(bytearray(value))
    if isinstance(value, tuple):
        return tuple([with_own_objects(element) for element in value])
    return value


def has_shared_bytes(value: Any) -> bool:
    """Bytes of length 0 and 1 are one object each."""
    if isinstance(value, tuple):
        return any(map(has_shared_bytes, value))
    return isinstance(value, bytes) and len(value) < 2


@given(values.filter(lambda value: not has_shared_bytes(value)))
def test_pickled_equals_pickle(value: Any) -> None:
    expected = pickle.dumps(with_own_objects(value), protocol=5)
    if len(expected) < pickled.FRAME_SIZE_BYTES and len(expected) >= 16:  # under 4 bytes there is no frame
        assert pickled.dumps(value) == expected


def with_constants(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple([with_constants(element) for element in value])
    return pickled.Constant(value) if isinstance(value, str) else value


def test_a_string_that_equals_a_constant_is_still_an_object_of_its_own() -> None:
    one = (pickled.Constant("lora"), "lora")
    assert pickled.dumps(one) == pickle.dumps(("lora", "".join(["lo", "ra"])), protocol=5)
    assert cbor.dumps(one) == cbor.dumps(("lora", "lora"))


@given(st.lists(st.sampled_from(["one", "two", "three"]), min_size=1, max_size=6))
def test_a_shared_string_is_written_once_and_then_named_by_its_place(names: list[str]) -> None:
    value = tuple((name, i) for i, name in enumerate(names))  # sampled: each is one object
    assert pickled.dumps(with_constants(value)) == pickle.dumps(value, protocol=5)


def test_a_shared_string_behind_more_than_255_others_is_named_in_four_bytes() -> None:
    tag = "tag"
    value = tuple([bytes([i % 256, i // 256]) for i in range(300)] + [tag, tag])
    assert pickled.dumps(with_constants(value)) == pickle.dumps(value, protocol=5)


def test_what_pickle_would_split_into_frames_is_refused() -> None:
    with pytest.raises(UsageError, match="expected under 65536 bytes when pickled"):
        pickled.dumps(tuple(range(2**20, 2**20 + 13_200)))


# RFC 8949, appendix A, of the types that are there
RFC_8949_EXAMPLES = {
    0: "00", 1: "01", 10: "0a", 23: "17", 24: "1818", 25: "1819", 100: "1864", 1000: "1903e8",
    1000000: "1a000f4240", 1000000000000: "1b000000e8d4a51000", 18446744073709551615: "1bffffffffffffffff",
    -18446744073709551616: "3bffffffffffffffff", -1: "20", -10: "29", -100: "3863", -1000: "3903e7",
    None: "f6", b"": "40", b"\1\2\3\4": "4401020304", "": "60", "a": "6161", "IETF": "6449455446",
    "\u00fc": "62c3bc", "\u6c34": "63e6b0b4", "\U00010151": "64f0908591", (): "80", (1, 2, 3): "83010203",
    (1, (2, 3), (4, 5)): "8301820203820405",
    tuple(range(1, 26)): "98190102030405060708090a0b0c0d0e0f101112131415161718181819",
}  # fmt: skip


@pytest.mark.parametrize("value", RFC_8949_EXAMPLES)
def test_cbor_gives_the_examples_of_the_rfc(value: Any) -> None:
    assert cbor.dumps(value).hex() == RFC_8949_EXAMPLES[value]


@given(values, values)
def test_cbor_is_injective(one: Any, other: Any) -> None:
    assert (cbor.dumps(one) == cbor.dumps(other)) == (one == other)
