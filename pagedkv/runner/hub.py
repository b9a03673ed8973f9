"""From what a user calls a model to a file or folder on this machine, downloaded from the Hub if need be."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from pagedkv.checks import show
from pagedkv.errors import BackendUnavailableError, UsageError

_HUB_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(/(?P<file>[^:]+\.gguf))?")
# No pickled weights, no second copy of them by another name, nothing of what lies in folders.
_WANTED = ["*.json", "*.jinja", "*.safetensors"]
_UNWANTED = ["*/*", "consolidated*"]


def is_hub_name(name: str | os.PathLike[str]) -> bool:
    """Say whether `name` means a model on the Hub: it looks like one, and no file here has that name."""
    text = os.fspath(name)
    match = _HUB_NAME.fullmatch(text)
    looks_so = match is not None and (match["file"] is not None or not text.endswith(".gguf"))
    return looks_so and not Path(text).exists()


def find_model(name: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """Return where a model is; one on the Hub is downloaded first, or found in the local cache.

    Parameters
    ----------
    name : path or str
        A path, ``org/model`` for a folder on the Hub, or ``org/model/file.gguf`` for a file in one.
    revision : str, optional
        A branch, tag or commit on the Hub; its main branch by default.

    Raises
    ------
    BackendUnavailableError
        The model is on the Hub, and huggingface_hub isn't installed.
    UsageError
        The Hub can't be reached and the model isn't in its cache, there is no such model or revision, it
        may not be read, or has no file that this runner reads; or a revision of a path was asked for.
    """
    if not is_hub_name(name):
        if revision is not None:
            expected = "one only with the name of a model on the Hub"
            raise UsageError(f"revision: expected {expected}, got {show(revision)}, with {os.fspath(name)}")
        return Path(name)
    match = _HUB_NAME.fullmatch(os.fspath(name))
    assert match is not None, "is_hub_name says so"
    try:
        import huggingface_hub
    except ImportError as error:
        expected = "a file or folder of that name, or huggingface_hub to download it"
        raise BackendUnavailableError(
            f"model {os.fspath(name)!r}: expected {expected} (pip install 'pagedkv[hub]'), got neither"
        ) from error
    repo, file = match["repo"], match["file"]
    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision))
        folder = Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
            )
        )
    except _hub_errors() as error:
        raise _refusal(repo, revision, error) from error
    if not (folder / "config.json").is_file():
        expected = f"config.json and safetensors, or a GGUF file by its name ({repo}/FILE.gguf)"
        raise UsageError(f"model {repo!r}: expected {expected}, got a repository without config.json")
    return folder


def _hub_errors() -> tuple[type[Exception], ...]:
    """Return what huggingface_hub raises; that of its transport depends on its release."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    httpx: Any = sys.modules.get("httpx")
    transport = () if httpx is None else (httpx.HTTPError,)
    return (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError, *transport)


def _refusal(repo: str, revision: str | None, error: Exception) -> UsageError:
    from huggingface_hub import constants, errors

    what = f"model {repo!r}" + ("" if revision is None else f", revision {revision!r}")
    if isinstance(error, errors.GatedRepoError):
        how = "accept its terms on the Hub, then `hf auth login` or set HF_TOKEN"
        return UsageError(f"{what}: expected one that may be read, got a gated one; {how}")
    if isinstance(error, errors.RevisionNotFoundError):
        return UsageError(f"{what}: expected a branch, tag or commit of the model, got none by that name")
    if isinstance(error, errors.RepositoryNotFoundError):
        how = "no file or folder here has that name either; a private one needs HF_TOKEN"
        return UsageError(f"{what}: expected a model on {constants.ENDPOINT}, got none by that name; {how}")
    # What the disk complains of has a number; what has none came from the network.
    is_of_the_disk = isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError)
    is_answer = isinstance(error, errors.HfHubHTTPError | errors.EntryNotFoundError | ValueError)
    if isinstance(error, errors.LocalEntryNotFoundError) or not (is_of_the_disk or is_answer):
        how = (
            f"download it where there is a network (`hf download {repo} --local-dir FOLDER`) and give the "
            f"folder instead of the name, or copy it into the cache, {constants.HF_HUB_CACHE}"
        )
        return UsageError(
            f"{what}: expected a file or folder of that name, a copy in the Hub's cache, or a connection to "
            f"{constants.ENDPOINT}, got none of them; {how}"
        )
    reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    return UsageError(f"{what}: expected files from {constants.ENDPOINT}, got {reason[0]}")
