"""`pagedkv hash` as a user runs it: in a process of its own."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pagedkv import VLLMScheme, hash_blocks

TOKENS = list(range(40))
HIDE_TORCH = (
    "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('pagedkv', run_name='__main__')"
)


def run(
    *arguments: str | Path, stdin: bytes = b"", code: str | None = None
) -> subprocess.CompletedProcess[bytes]:
    start = ["-m", "pagedkv"] if code is None else ["-c", code]
    command = [sys.executable, *start, "hash", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=120)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def lines_of(digests: list[bytes], block_size: int = 16) -> str:
    rows = ((i, i * block_size, (i + 1) * block_size, digest.hex()) for i, digest in enumerate(digests))
    return "".join(f"{i}  [{start}, {end})  {digest}\n" for i, start, end, digest in rows)


FORMS = {
    "JSON": json.dumps(TOKENS).encode(),
    "JSON with a line break first": b"\n " + json.dumps(TOKENS, indent=1).encode(),
    "lines": "\n".join(map(str, TOKENS)).encode(),
    "blanks": " ".join(map(str, TOKENS)).encode(),
    "commas": ", ".join(map(str, TOKENS)).encode(),
    "npy of int64": npy(np.array(TOKENS)),
    "npy of uint16": npy(np.array(TOKENS, np.uint16)),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_token_file_gives_a_line_a_block(form: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(FORMS[form])
    result = run(file)
    assert result.returncode == 0, result.stderr
    assert result.stdout.decode() == lines_of(list(hash_blocks(TOKENS)))
    assert run("-", stdin=FORMS[form]).stdout == result.stdout


def test_the_options_are_those_of_hash_blocks(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_bytes(FORMS["JSON"])
    options = ["--block-size", "8", "--namespace", "m", "--salt", "é", "--salt-from", "20"]
    expected = hash_blocks(
        TOKENS, block_size=8, namespace=b"m", cache_salt="é", salt_from=20, scheme="xxh3-128"
    )
    result = run(file, *options, "--scheme", "xxh3-128")
    assert result.stdout.decode() == lines_of(list(expected), 8)


def test_a_scheme_of_vllm_takes_its_seed_and_recipe() -> None:
    options = ["--scheme", "sha256-vllm", "--vllm-seed", "0", "--vllm-recipe", "0.20", "--salt", "s"]
    scheme = VLLMScheme("sha256-vllm", seed="0", recipe="0.20")
    expected = hash_blocks(TOKENS, cache_salt="s", scheme=scheme)
    assert run("-", *options, stdin=FORMS["JSON"]).stdout.decode() == lines_of(list(expected))


def test_several_files_are_grouped_under_their_names(tmp_path: Path) -> None:
    long, short = tmp_path / "long", tmp_path / "short"
    long.write_bytes(FORMS["lines"])
    short.write_bytes(b"1 2 3")
    shown = run(long, short).stdout.decode()
    expected = lines_of(list(hash_blocks(TOKENS)))
    assert shown == f"{long}: 40 tokens, 2 blocks\n{expected}{short}: 3 tokens, 0 blocks\n"


def test_json_tells_all_and_needs_no_torch() -> None:
    result = run("-", "--json", stdin=FORMS["JSON"], code=HIDE_TORCH)
    assert result.returncode == 0, result.stderr
    digests = [digest.hex() for digest in hash_blocks(TOKENS)]
    files = [{"file": "-", "num_tokens": 40, "digests": digests}]
    assert json.loads(result.stdout) == {"scheme": "sha256", "block_size": 16, "files": files}


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (b"1 2 x", [], "-: expected JSON list, .npy of integers, or ids between blanks or commas, got"),
        (b"[1, 2", [], "-: expected JSON list"),
        (b"\xff\xfe", [], "-: expected JSON list"),
        (npy(np.array(TOKENS))[:90], [], "-: expected JSON list"),
        (npy(np.array([{}])), [], "-: expected JSON list"),
        (npy(np.array(5)), [], "-: token_ids: expected one dimension, got shape ()"),
        (npy(np.array([1.5])), [], "-: token_ids: expected an integer dtype"),
        (b"[1, [2]]", [], "-: token_ids: expected an integer"),
        (b"1 -2", [], "-: token_ids: expected an integer from 0 to 4294967295, got -2, at index 1"),
        (b"1", ["--block-size", "0"], "-: block_size: expected an integer from 1"),
        (b"1", ["--scheme", "md5"], "-: scheme: expected one of sha256"),
        (b"1", ["--scheme", "xxhash-vllm"], "VLLMScheme.seed: expected"),
        (b"1", ["--vllm-seed", "0"], "--vllm-seed, --vllm-recipe: expected a scheme of vLLM"),
        (b"1", ["--salt-from", "16"], "-: salt_from: expected a cache_salt with it"),
        (b"1", ["no/such/file"], "no/such/file: expected a readable file, got No such file"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_nothing_is_printed(
    content: bytes, arguments: list[str], message: str
) -> None:
    result = run("-", *arguments, stdin=content)
    assert result.returncode == 2
    assert result.stdout == b""
    assert result.stderr.decode().startswith(f"pagedkv: {message}")
    assert result.stderr.count(b"\n") == 1
