"""`pagedkv hash`: the digests of token files, to compare with a store, a router or another engine."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from pagedkv import BlockHash, VLLMScheme, hash_blocks
from pagedkv.errors import UsageError

FILES_HELP = "JSON list, .npy of integers, or ids between blanks or commas; - is standard input."
SCHEME_HELP = "sha256, xxh3-128, sha256-vllm, sha256-cbor-vllm, xxhash-vllm or xxhash-cbor-vllm."


def hash_files(
    files: Annotated[list[str], typer.Argument(help=FILES_HELP, show_default=False)],
    block_size: Annotated[int, typer.Option(help="Tokens in a block.")] = 16,
    namespace: Annotated[str, typer.Option(help="What all the KV depends on, such as the model.")] = "",
    salt: Annotated[str | None, typer.Option(help="The cache salt.")] = None,
    salt_from: Annotated[int | None, typer.Option(help="Position at whose block the salt enters.")] = None,
    scheme: Annotated[str, typer.Option(help=SCHEME_HELP)] = "sha256",
    vllm_seed: Annotated[str | None, typer.Option(help="PYTHONHASHSEED of the vLLM to equal.")] = None,
    vllm_recipe: Annotated[str | None, typer.Option(help="0.31, 0.20 or 0.12: the version to equal.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the digest of every whole block of token files: index, token range, digest."""
    options = {
        "block_size": block_size,
        "namespace": namespace.encode(),
        "cache_salt": salt,
        "salt_from": salt_from,
        "scheme": _make_scheme(scheme, vllm_seed, vllm_recipe),
    }
    # All are hashed before any is printed: a bad file must not leave half an answer.
    chains = [_hash_file(name, options) for name in files]
    if as_json:
        rows = [
            {"file": name, "num_tokens": num_tokens, "digests": [digest.hex() for digest in digests]}
            for name, num_tokens, digests in chains
        ]
        print(json.dumps({"scheme": scheme, "block_size": block_size, "files": rows}, indent=2))
        return
    for name, num_tokens, digests in chains:
        if len(chains) > 1:
            print(f"{name}: {num_tokens} tokens, {len(digests)} blocks")
        for i, digest in enumerate(digests):
            print(f"{i}  [{i * block_size}, {(i + 1) * block_size})  {digest.hex()}")


def read_tokens(data: bytes) -> Any:
    """Token ids from the bytes of a file, whose form the first bytes tell.

    Raises
    ------
    ValueError
        They are of none of the three forms.
    """
    if data.startswith(b"\x93NUMPY"):
        return np.load(io.BytesIO(data), allow_pickle=False)
    text = data.decode()
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [int(word) for word in text.replace(",", " ").split()]


def _hash_file(name: str, options: dict[str, Any]) -> tuple[str, int, list[BlockHash]]:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise UsageError(f"{name}: expected a readable file, got {error.strerror}") from error
    try:
        token_ids = read_tokens(data)
    except (ValueError, EOFError, RecursionError) as error:
        raise UsageError(f"{name}: expected {FILES_HELP.partition(';')[0]}, got {error}") from error
    try:
        digests = hash_blocks(token_ids, **options)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error
    return name, len(token_ids), digests


def _make_scheme(name: str, seed: str | None, recipe: str | None) -> str | VLLMScheme:
    if not name.endswith("-vllm"):
        if seed is not None or recipe is not None:
            raise UsageError(f"--vllm-seed, --vllm-recipe: expected a scheme of vLLM with them, got {name!r}")
        return name
    return VLLMScheme(name, seed=seed, recipe=recipe or "0.31")  # type: ignore[arg-type]  # it checks them
