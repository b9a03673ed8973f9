"""One function that loads whatever model a path leads to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from pagedkv.checks import show
from pagedkv.errors import UsageError
from pagedkv.runner.gguf_loader import MAGIC, GGUFSource
from pagedkv.runner.hf_loader import HFSource
from pagedkv.runner.hub import find_model
from pagedkv.runner.model import AnyModel, Model
from pagedkv.runner.parallel import LeadingModel, RankPart
from pagedkv.runner.ranks import Ranks
from pagedkv.runner.shard import Shard
from pagedkv.runner.tokenizer import Tokenizer
from pagedkv.runner.weights import Progress, collect_tensors

# Beside weights of 8 bits everything is computed in bfloat16.
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}


class LoadedModel(NamedTuple):
    """A model and, when its files have one, its tokenizer."""

    model: AnyModel
    tokenizer: Tokenizer | None


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    revision: str | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model: of which kinds, docs/reference/models.md says.

    Parameters
    ----------
    path : path or str
        A GGUF file, or a folder with config.json and safetensors; or the name of either on the Hub, as in
        `find_model`.
    dtype : {"float32", "bfloat16", "int8"}
        Of the weights, and so of K and V; beside weights of int8, with a scale for each row, these and all
        that is computed are bfloat16.
    device : {"cpu", "cuda"} or torch.device
        Where the weights go, and with them all that is computed.
    revision : str, optional
        Of a model on the Hub.
    ranks : Ranks, optional
        The processes that are to compute the model together. Each calls this and gets its part: on rank 0 one
        for an engine, on the others one for `parallel.follow`.
    progress : callable, optional
        Called with (tensors done, tensors in all).

    Raises
    ------
    UsageError
        The path leads to nothing, to no model, or to one that this runner doesn't compute; or the device is
        not there.
    BackendUnavailableError
        The model is on the Hub, and huggingface_hub isn't installed.
    """
    where = check_device(device)
    if dtype not in _DTYPES:
        expected = "'float32', 'bfloat16' or 'int8'"
        raise UsageError(f"dtype: expected {expected}, got {dtype!r}, in load_model")
    int8 = dtype == "int8"
    source = open_source(find_model(path, revision=revision))
    shard = None if ranks is None else Shard.of(source.config, ranks.rank, ranks.size)
    weights = collect_tensors(
        source.tensors(),
        source.config,
        dtype=_DTYPES[dtype],
        device=where if ranks is None else ranks.device,
        where=source.where,
        progress=progress,
        cut=None if shard is None else shard.cut,
    )
    if shard is None or ranks is None:
        return LoadedModel(Model(source.config, weights, int8_weights=int8), source.tokenizer())
    model = Model(shard.config, weights, RankPart(shard, ranks), int8_weights=int8)
    return LoadedModel(LeadingModel(model, ranks) if ranks.rank == 0 else model, source.tokenizer())


def check_device(device: str | torch.device) -> torch.device:
    """Return a device that this machine has.

    Raises
    ------
    UsageError
        It is of another kind than "cpu" and "cuda", or there is none; the message says why.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise UsageError(f"device: expected 'cpu' or 'cuda', got {show(device)}")
    if found.type == "cpu":
        return found
    reason = None
    if torch.version.cuda is None and torch.version.hip is None:
        reason = f"torch {torch.__version__}, which was built for CPUs only"
    elif not torch.cuda.is_available():
        reason = "none that torch can use (is the driver there?)"
    elif (found.index or 0) >= torch.cuda.device_count():
        reason = f"{torch.cuda.device_count()} GPU(s)"
    if reason is not None:
        raise UsageError(f"device {str(found)!r}: expected a GPU, got {reason}")
    return found


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
