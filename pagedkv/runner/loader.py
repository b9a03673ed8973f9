"""One function that loads whatever model a path leads to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from pagedkv.errors import UsageError
from pagedkv.runner.gguf_loader import MAGIC, GGUFSource
from pagedkv.runner.hf_loader import HFSource
from pagedkv.runner.model import Model
from pagedkv.runner.tokenizer import Tokenizer
from pagedkv.runner.weights import Progress, collect_tensors

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LoadedModel(NamedTuple):
    """A model and, when its files have one, its tokenizer."""

    model: Model
    tokenizer: Tokenizer | None


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a Llama-family model.

    Parameters
    ----------
    path : path
        A GGUF file, or a folder with config.json and safetensors.
    dtype : {"float32", "bfloat16"}
        Of the weights, and so of K and V.
    progress : callable, optional
        Called with (tensors done, tensors in all).

    Raises
    ------
    UsageError
        The path leads to nothing, to no model, or to one that this runner doesn't compute.
    """
    if dtype not in _DTYPES:
        raise UsageError(f"dtype: expected {' or '.join(map(repr, _DTYPES))}, got {dtype!r}, in load_model")
    source = open_source(Path(path))
    weights = collect_tensors(
        source.tensors(),
        source.config,
        dtype=_DTYPES[dtype],
        device=torch.device(device),
        where=source.where,
        progress=progress,
    )
    return LoadedModel(Model(source.config, weights), source.tokenizer())


def open_source(path: Path) -> GGUFSource | HFSource:
    """Open `path` as what it is; reads the configuration but no tensor."""
    if path.is_dir():
        return HFSource(path)
    expected = "a GGUF file or a folder with config.json and safetensors"
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise UsageError(f"model: expected {expected}, got {error.strerror or error}, in {path}") from error
    if magic != MAGIC:
        raise UsageError(f"model: expected {expected}, got a file of another kind, in {path}")
    return GGUFSource(path)
