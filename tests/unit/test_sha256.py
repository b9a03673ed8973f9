"""Every path of SHA-256 gives what hashlib gives. What this processor lacks is skipped, with the reason."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from pagedkv import _core
from pagedkv.errors import UsageError

PATHS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(reason), reason=reason))
    for name, reason in _core.sha256_isas().items()
]

# FIPS 180-4's published examples.
FIPS_EXAMPLES = {
    "empty": (b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
    "abc": (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
    "448 bits": (
        b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
    ),
    "896 bits": (
        b"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrs"
        b"mnopqrstnopqrstu",
        "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1",
    ),
    "one million a": (
        b"a" * 1_000_000,
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0",
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("example", FIPS_EXAMPLES)
def test_each_path_gives_the_published_examples(path: str, example: str) -> None:
    message, digest = FIPS_EXAMPLES[example]
    assert _core.sha256(message, path).hex() == digest


@pytest.mark.parametrize("path", PATHS)
def test_each_path_equals_hashlib_at_every_length_around_the_padding(path: str) -> None:
    data = random.Random(1).randbytes(300)
    for length in range(301):
        assert _core.sha256(data[:length], path) == hashlib.sha256(data[:length]).digest(), length


@pytest.mark.parametrize("path", PATHS)
def test_each_path_equals_hashlib_on_random_messages(path: str) -> None:
    rng = random.Random(2)
    for _ in range(200):
        message = rng.randbytes(rng.randrange(10_000))
        assert _core.sha256(message, path) == hashlib.sha256(message).digest(), len(message)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("chunk_size", [1, 3, 55, 56, 63, 64, 65, 127, 128, 200])
def test_pieces_of_any_size_give_the_digest_of_the_whole(path: str, chunk_size: int) -> None:
    data = random.Random(3).randbytes(300)
    for length in range(0, 301, 7):
        expected = hashlib.sha256(data[:length]).digest()
        assert _core.sha256(data[:length], path, chunk_size) == expected, length


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_prompts", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [0, 1, 2, 100])
def test_each_path_chains_blocks_as_hashlib_does(path: str, num_prompts: int, num_blocks: int) -> None:
    parent = random.Random(4).randbytes(32)
    tokens = np.frombuffer(random.Random(5).randbytes(64 * num_blocks), "<u4")
    digests = [parent]
    for i in range(num_blocks):
        block = tokens[16 * i : 16 * i + 16].tobytes()
        digests.append(hashlib.sha256(digests[-1] + block).digest())
    assert _core.sha256_chain(parent, tokens, path, num_prompts) == b"".join(digests[1:])


def test_the_path_in_use_runs_here_and_is_portable_only_for_want_of_another() -> None:
    runnable = [name for name, reason in _core.sha256_isas().items() if not reason]
    assert _core.sha256_isa() in runnable
    assert (_core.sha256_isa() == "portable") == (runnable == ["portable"])


def test_a_path_that_cannot_run_here_is_refused_with_the_reason() -> None:
    lacking = {name: reason for name, reason in _core.sha256_isas().items() if reason}
    assert lacking, "no processor is both x86-64 and ARM"
    for name, reason in lacking.items():
        with pytest.raises(UsageError, match=reason):
            _core.sha256(b"", name)


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(UsageError, match=r"isa: expected a name of sha256_isas.*got 'md5'"):
        _core.sha256(b"", "md5")
