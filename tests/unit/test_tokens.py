"""Bad arguments of hash_blocks get one clear sentence; odd but right ones work."""

from __future__ import annotations

import array
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import UsageError
from pagedkv.hashing import Adapter, Embeddings, Extra, Media, as_tokens, hash_blocks, hash_blocks_batch

RANGE = "expected an integer from 0 to 4294967295, got"

SCHEMES = "sha256, xxh3-128, sha256-vllm, sha256-cbor-vllm, xxhash-vllm, xxhash-cbor-vllm"


class Tensor:
    """What torch's tensor is to numpy."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if self.values is None:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return np.asarray(self.values, dtype)


class FaultyToken:
    def __index__(self) -> int:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([5, -1], f"{RANGE} -1, at index 1"),
        ([2**32], f"{RANGE} 4294967296, at index 0"),
        ([0] * 20 + [2**63], f"{RANGE} 9223372036854775808, at index 20"),
        ([-1, 2**63], f"{RANGE} -1, at index 0"),
        ([1, 2**64], f"{RANGE} 18446744073709551616, at index 1"),
        ([1, -(2**80)], f"{RANGE} -1208925819614629174706176, at index 1"),
        ([10**5000], "expected an integer from 0 to 4294967295, got one of 16610 bits, at index 0"),
        (np.array([7, -2], np.int8), f"{RANGE} -2, at index 1"),
        (np.array([7, -2], np.int16), f"{RANGE} -2, at index 1"),
        (np.array([7, -2], np.int32), f"{RANGE} -2, at index 1"),
        (np.array([7, 8, 2**32]), f"{RANGE} 4294967296, at index 2"),
        (np.array([2**64 - 1], np.uint64), f"{RANGE} 18446744073709551615, at index 0"),
        (np.array([1, -1], object), f"{RANGE} -1, at index 1"),
        ([np.uint64(2**33)], f"{RANGE} 8589934592, at index 0"),
        (range(-1, 5), f"{RANGE} -1, at index 0"),
        (range(5, -2, -1), f"{RANGE} -1, at index 6"),
        (range(2**40), f"{RANGE} 1099511627775, at index 1099511627775"),
        ([1, 2.0], "expected an integer, got 2.0 (float), at index 1"),
        ([1, None], "expected an integer, got None (NoneType), at index 1"),
        ([1, "2"], "expected an integer, got '2' (str), at index 1"),
        ([True], "expected an integer, got True (bool), at index 0"),
        ([3, 1, True], "expected an integer, got True (bool), at index 2"),
        ([np.float32(1)], "expected an integer, got"),
        ([[1, 2], [3, 4]], "expected an integer, got [1, 2] (list), at index 0"),
        ([[1], [2, 3]], "expected an integer, got [1] (list), at index 0"),
        ([[]], "expected an integer, got [] (list), at index 0"),
        (["x" * 100], "expected an integer, got '" + "x" * 36 + "... (str), at index 0"),
        (np.array([1.0]), "expected an integer dtype, got float64"),
        (np.array([True]), "expected an integer dtype, got bool"),
        (np.array(["a"]), "expected an integer dtype, got <U1"),
        (np.array(["2020-01-01"], "M8[D]"), "expected an integer dtype, got datetime64[D]"),
        (np.zeros((2, 3), int), "expected one dimension, got shape (2, 3)"),
        (np.array(5), "expected one dimension, got shape ()"),
        (np.int64(5), "expected one dimension, got shape ()"),
        (Tensor([1.0]), "expected an integer dtype, got float64"),
        (Tensor(None), "expected an array that numpy can read, got Tensor (can't convert cuda:0"),
        (5, "expected a sequence, got 5 (int)"),
        (None, "expected a sequence, got None (NoneType)"),
        ("abc", "expected token ids in order, got str"),
        (b"abc", "expected token ids in order, got bytes"),
        ({1, 2}, "expected token ids in order, got set"),
        ({1: 2}, "expected token ids in order, got dict"),
    ],
)
def test_bad_token_ids_are_refused_by_index_and_value(token_ids: Any, message: str) -> None:
    with pytest.raises(UsageError, match="^token_ids: " + re.escape(message)):
        hash_blocks(token_ids)
    with pytest.raises(UsageError, match=r"^prompts\[1\]: " + re.escape(message)):
        hash_blocks_batch([[1, 2], token_ids])


def test_a_bad_token_from_a_generator_is_named_too() -> None:
    with pytest.raises(UsageError, match=r"got 'b' \(str\), at index 1"):
        hash_blocks(token for token in (1, "b"))


def test_an_error_of_the_callers_own_code_passes_through() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        hash_blocks(broken())
    with pytest.raises(ZeroDivisionError):
        hash_blocks([FaultyToken()])


@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        iter,
        deque,
        np.array,
        Tensor,
        lambda r: array.array("I", r),
        lambda r: memoryview(array.array("Q", r)),
        lambda r: [np.uint8(t) for t in r],
        lambda r: [np.array(t) for t in r],
        lambda r: np.array(r, object),
        lambda r: range(47, -1, -1)[::-1],
    ],
)
def test_any_ordered_integers_will_do(convert: Callable[[range], Any]) -> None:
    assert hash_blocks(convert(range(48))) == hash_blocks(list(range(48)))


def test_no_tokens_are_no_blocks_whatever_holds_them() -> None:
    for nothing in ([], (), range(0), range(5, 5), iter(()), np.array([]), np.array([], bool), Tensor([])):
        assert hash_blocks(nothing) == []


def test_a_suitable_array_is_not_copied() -> None:
    tokens = np.arange(48, dtype=np.int64)
    assert np.shares_memory(as_tokens(tokens), tokens)


def test_reading_tokens_leaves_a_read_only_array_alone() -> None:
    tokens = np.arange(48, dtype=np.int32)[::-1]
    tokens.flags.writeable = False
    hash_blocks(tokens)
    assert tokens.tolist() == list(range(47, -1, -1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size: expected an integer from 1 to 65535, got 0"),
        ({"block_size": 65536}, "block_size: expected an integer from 1 to 65535, got 65536"),
        ({"block_size": 16.0}, "block_size: expected an integer, got 16.0 (float)"),
        ({"block_size": True}, "block_size: expected an integer, got True (bool)"),
        ({"namespace": "model"}, "namespace: expected bytes, got 'model' (str)"),
        ({"namespace": None}, "namespace: expected bytes, got None (NoneType)"),
        ({"scheme": "md5"}, f"scheme: expected one of {SCHEMES}, or a VLLMScheme, got 'md5' (str)"),
        ({"scheme": None}, f"scheme: expected one of {SCHEMES}, or a VLLMScheme, got None (NoneType)"),
        ({"scheme": np.array(["a", "b"])}, f"scheme: expected one of {SCHEMES}, or a VLLMScheme, got"),
        ({"scheme": []}, f"scheme: expected one of {SCHEMES}, or a VLLMScheme, got [] (list)"),
        ({"extras": 5}, "extras: expected a sequence, got 5 (int)"),
        ({"extras": Extra(128, b"")}, "extras: expected a sequence, got Extra(tag=128, payload=b'') (Extra)"),
        (
            {"extras": ["a"]},
            "extras: expected Adapter, Media, Embeddings or Extra, got 'a' (str), at index 0",
        ),
        *(
            ({"extras": text}, f"extras: expected a sequence, got {text!r} ({type(text).__name__})")
            for text in ("", "a", b"", {}, np.array(5))
        ),
        (
            {"extras": [Extra(128, b""), None]},
            "extras: expected Adapter, Media, Embeddings or Extra, got None",
        ),
        (
            {"extras": [Media(40, 9, bytes(32))]},
            "extras[0]: expected to end within the 48 tokens, got an end of 49",
        ),
        (
            {"extras": [Media(0, 48, bytes(32)), Embeddings([48], bytes(32))]},
            "extras[1]: expected to end within the 48 tokens, got an end of 49",
        ),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match="^" + re.escape(message)):
        hash_blocks(range(48), **options)
    with pytest.raises(UsageError, match="^" + re.escape(message)):
        hash_blocks_batch([range(48)], **options)


def test_a_batch_that_is_no_sequence_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^prompts: expected a sequence, got 5 \(int\)"):
        hash_blocks_batch(5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^prompts: expected a sequence, got '' \(str\)"):
        hash_blocks_batch("")
    with pytest.raises(UsageError, match=r"^prompts: expected a sequence in order, got \{\(1, 2\)\} \(set\)"):
        hash_blocks_batch({(1, 2)})
    with pytest.raises(UsageError, match=r"^prompts\[0\]: expected a sequence, got 1 \(int\)"):
        hash_blocks_batch([1, 2, 3])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Adapter("", b"1"), "Adapter.id: expected 1 to 4294967295 bytes, got 0"),
        (lambda: Adapter(7, b"1"), "Adapter.id: expected str or bytes, got 7 (int)"),
        (lambda: Adapter("a", b""), "Adapter.revision: expected 1 to 64 bytes, got 0"),
        (lambda: Adapter("a", bytes(65)), "Adapter.revision: expected 1 to 64 bytes, got 65"),
        (lambda: Adapter("a", "1"), "Adapter.revision: expected bytes, got '1' (str)"),
        (lambda: Media(-1, 2, bytes(32)), "Media.start: expected an integer from 0 to 2147483647, got -1"),
        (lambda: Media(0, 0, bytes(32)), "Media.length: expected an integer from 1 to 2147483647, got 0"),
        (lambda: Media(0.5, 1, bytes(32)), "Media.start: expected an integer, got 0.5 (float)"),
        (lambda: Media(0, 1, bytes(31)), "Media.digest: expected 32 bytes, got 31"),
        (lambda: Media(0, 1, "0" * 32), "Media.digest: expected bytes, got '00000000000000"),
        (
            lambda: Embeddings([], bytes(32)),
            "Embeddings.positions: expected at least one and none twice, got []",
        ),
        (lambda: Embeddings([3, 3], bytes(32)), "Embeddings.positions: expected at least one and none twice"),
        (lambda: Embeddings([-1], bytes(32)), "Embeddings.positions: expected an integer from 0 to"),
        (lambda: Embeddings(4, bytes(32)), "Embeddings.positions: expected a sequence, got 4 (int)"),
        (lambda: Embeddings(b"\x04", bytes(32)), "Embeddings.positions: expected a sequence, got b'\\x04'"),
        (lambda: Embeddings([4], b""), "Embeddings.digest: expected 32 bytes, got 0"),
        (lambda: Extra(127, b""), "Extra.tag: expected an integer from 128 to 255, got 127"),
        (lambda: Extra(256, b""), "Extra.tag: expected an integer from 128 to 255, got 256"),
        (lambda: Extra(128, "x"), "Extra.payload: expected bytes, got 'x' (str)"),
    ],
)
def test_bad_extras_are_refused_where_they_are_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match="^" + re.escape(message)):
        make()


def test_numpy_integers_will_do_wherever_an_int_will() -> None:
    assert hash_blocks(range(48), block_size=np.int64(8)) == hash_blocks(range(48), block_size=8)  # type: ignore[arg-type]
    media = Media(np.int64(3), np.uint8(2), bytes(32))  # type: ignore[arg-type]
    assert media == Media(3, 2, bytes(32))
    assert type(media.start) is type(media.length) is int
    assert Embeddings(np.array([5, 2]), bytes(32)).positions == (2, 5)
