"""What the commands that run a model have in common: finding and loading it, and making an engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pagedkv.checks import check_int
from pagedkv.errors import UsageError

if TYPE_CHECKING:
    from pagedkv.runner import Engine, LoadedModel, Tokenizer
    from pagedkv.runner.ranks import Ranks

BUNDLED = "smollm2"
MODEL_HELP = (
    "A GGUF file, a Hugging Face folder, the name of a model on the Hub (org/model, or org/model/file.gguf), "
    f"or the word '{BUNDLED}' for the model that the demo runs."
)
REVISION_HELP = "Of a model on the Hub: a branch, tag or commit."
DEVICE_HELP = "Where to compute: cpu, or cuda for an NVIDIA GPU."
DTYPE_HELP = "Of weights, keys and values: float32 or bfloat16; int8 is for weights alone."


def progress_bar(console: Console) -> Progress:
    """Make a bar with a description, a count and the time so far; it shows nothing in a pipe or a log."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("[dim]{task.fields[unit]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def load_named_model(
    name: str,
    dtype: str,
    *,
    device: str = "cpu",
    revision: str | None = None,
    ranks: Ranks | None = None,
    progress: Progress,
) -> LoadedModel:
    """Load a model by path or name; adds a task to `progress`.

    Raises
    ------
    BackendUnavailableError
        The bundled model, or a package that is needed to load one, is not installed.
    UsageError
        The path leads to nothing or to no model, `dtype` is unknown, or `device` isn't there.
    """
    if ranks is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("torchrun: expected `pagedkv run`, got a command that takes one process")
    from pagedkv.runner.bundled import bundled_model_path
    from pagedkv.runner.hub import find_model, is_hub_name
    from pagedkv.runner.loader import load_model

    if name == BUNDLED:
        path = bundled_model_path()
    elif is_hub_name(name):
        progress.stop()  # a download has bars of its own
        path = find_model(name, revision=revision)
        progress.start()
    else:
        path = find_model(name, revision=revision)
    task: TaskID | None = None

    def show(done: int, total: int) -> None:
        nonlocal task
        if task is None:  # not before something is read: a refusal needs no bar
            task = progress.add_task("loading the model", total=total, unit="tensors")
        progress.update(task, completed=done)

    return load_model(path, dtype=dtype, device=device, ranks=ranks, progress=show)


def display_name(name: str) -> str:
    """Return what to call a model: its file's or folder's name, which tells more than its metadata."""
    from pagedkv.runner.bundled import FILE_NAME

    return FILE_NAME.removesuffix(".gguf") if name == BUNDLED else Path(name).resolve().name


def require_tokenizer(loaded: LoadedModel, name: str) -> Tokenizer:
    """Return the model's tokenizer.

    Raises
    ------
    UsageError
        The model's files hold none.
    """
    if loaded.tokenizer is None:
        raise UsageError(f"tokenizer: expected tokenizer.json beside the weights, got none, in {name}")
    return loaded.tokenizer


def make_engine(loaded: LoadedModel, **options: Any) -> Engine:
    """Make an engine.

    Raises
    ------
    UsageError
        Also when the machine has less memory than `options` ask for.
    """
    from pagedkv.runner.engine import Engine

    try:
        return Engine(loaded.model, loaded.tokenizer, **options)
    except MemoryError as error:  # of the core; for pages, there is an error of ours
        asked = ", ".join(f"{name}={value}" for name, value in options.items())
        raise UsageError(f"cache: expected what this machine's memory can hold, got {asked}") from error


def use_threads(threads: int | None) -> int:
    """Set torch's CPU threads, None leaving them as they are; return how many it takes.

    Raises
    ------
    UsageError
    """
    # Before torch: its threads then sleep while they wait for each other, instead of taking a core from
    # whatever else runs, which would slow the short steps of a decode most.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    if threads is not None:
        torch.set_num_threads(check_int("--threads", threads, 1, 1024))
    return torch.get_num_threads()


@contextmanager
def serve_metrics(engine: Engine, port: int | None, prefix: str, console: Console) -> Iterator[None]:
    """Serve an engine's metrics for Prometheus while the context lasts; with None as the port, do nothing.

    Raises
    ------
    BackendUnavailableError
        prometheus-client is not installed.
    UsageError
        The port is taken, or the prefix is none.
    """
    if port is None:
        yield
        return
    from pagedkv.prometheus import MetricsServer
    from pagedkv.runner import EngineCollector

    with MetricsServer(EngineCollector(engine, prefix=prefix), port=port) as server:
        console.print(f"metrics: http://127.0.0.1:{server.port}/metrics", highlight=False, soft_wrap=True)
        yield


@contextmanager
def joined_ranks(device: str) -> Iterator[Ranks | None]:
    """Join the processes that torchrun has started, for a context; None where there is only this one.

    Raises
    ------
    RankError
        At the end too: another process has failed.
    """
    from pagedkv.runner.ranks import Ranks

    ranks = Ranks.from_environment(device)
    if ranks is None:
        yield None
        return
    with ranks:
        yield ranks
