"""`pagedkv bench serve`: chats replayed with their arrivals on the real engine."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pagedkv.checks import check_int, check_number
from pagedkv.cli import run_options as options
from pagedkv.cli.chats import arrival_times, make_chats, read_chats
from pagedkv.cli.model_loading import (
    BUNDLED,
    MODEL_HELP,
    display_name,
    load_named_model,
    make_engine,
    progress_bar,
    require_tokenizer,
    serve_metrics,
    use_threads,
)
from pagedkv.cli.outputs import check_output
from pagedkv.errors import UsageError

if TYPE_CHECKING:
    from pagedkv.runner import LoadedModel, Tokenizer

CHATS = {"rich_help_panel": "Chats that are made up, without --chats"}
ARRIVALS = {"rich_help_panel": "Arrivals"}
MANY = 2**31 - 1


def serve(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")] = BUNDLED,
    chats: Annotated[
        Path | None,
        typer.Option(help='A file with a chat on each line: {"messages": [{"role": …, "content": …}, …]}.'),
    ] = None,
    num_chats: Annotated[int, typer.Option(help="How many chats.", **CHATS)] = 16,
    turns: Annotated[int, typer.Option(help="Requests of each chat.", **CHATS)] = 3,
    system_words: Annotated[int, typer.Option(help="Words of the system message of all.", **CHATS)] = 400,
    question_words: Annotated[int, typer.Option(help="Words of each question.", **CHATS)] = 20,
    rate: Annotated[
        float | None, typer.Option(help="Chats a second, 1 unless given; inf: all at once.", **ARRIVALS)
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Arrivals by the file's timestamps (seconds).", **ARRIVALS)
    ] = False,
    think_s: Annotated[
        float, typer.Option(help="Seconds from an answer to the chat's next question.", **ARRIVALS)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of arrivals and of questions.", **ARRIVALS)] = 0,
    max_tokens: options.MaxTokens = 32,
    schedule: options.Schedule = "fcfs",
    dtype: options.DType = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    memory: options.Memory = None,
    num_blocks: options.NumBlocks = None,
    no_prefix_caching: options.NoPrefixCaching = False,
    metrics_port: options.MetricsPort = None,
    metrics_prefix: options.MetricsPrefix = "pagedkv",
    output: Annotated[Path, typer.Option(help="Where to save the picture, a PNG.")] = Path(
        "pagedkv-serve.png"
    ),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every request and the summary into this file.")
    ] = None,
) -> None:
    """Replay chats with their arrivals on the engine: percentiles of latencies, and the hit rate over time.

    Each question of a chat is a request whose prompt is the chat so far. Waits count from the arrival.

    For example: pagedkv bench serve smollm2 --num-chats 32 --rate 2 --dtype bfloat16
    """
    import matplotlib  # noqa: F401  (so that it is missed now and not after minutes)

    from pagedkv.cli.replay import Replay
    from pagedkv.cli.replay_plot import save_replay_plot
    from pagedkv.cli.replay_report import replay_json, replay_table

    if timestamps and (rate is not None or chats is None):
        got = "--rate" if rate is not None else "no --chats"
        raise UsageError(f"--timestamps: expected --chats with it and no --rate, got {got}")
    for name, number, least in (
        ("--num-chats", num_chats, 1),
        ("--turns", turns, 1),
        ("--system-words", system_words, 0),
        ("--question-words", question_words, 1),
        ("--max-tokens", max_tokens, 1),
    ):
        check_int(name, number, least, MANY)
    check_number("--think-s", think_s)
    pages = options.pages_of(memory, num_blocks)
    check_output("--output", output)
    check_output("--json", json_file)
    if chats is not None:
        found = read_chats(chats)
    else:
        found = make_chats(
            num_chats,
            num_turns=turns,
            num_system_words=system_words,
            num_question_words=question_words,
            seed=seed,
        )
    wanted_rate = 1.0 if rate is None else rate
    arrivals = arrival_times(found, None if timestamps else wanted_rate, seed=seed)

    num_threads = use_threads(threads)
    console = Console(stderr=True)
    with ExitStack() as stack:
        progress = stack.enter_context(progress_bar(console))
        loaded = load_named_model(model, dtype, device=device, progress=progress)
        tokenizer = require_tokenizer(loaded, model)
        _warm_up(loaded, tokenizer)
        engine = make_engine(loaded, **pages, prefix_caching=not no_prefix_caching, schedule=schedule)
        stack.enter_context(serve_metrics(engine, metrics_port, metrics_prefix, console))
        total = sum(chat.num_turns for chat in found)
        task = progress.add_task("replaying", total=total, unit="requests")
        replay = Replay(engine, tokenizer, found, arrivals, max_tokens=max_tokens, think_s=think_s)
        outcome = replay.run(lambda count: progress.advance(task, count))

    where = f"{num_threads} CPU thread{'s' * (num_threads > 1)}" if device == "cpu" else device
    caching = "off" if no_prefix_caching else "on"
    setting = f"{display_name(model)}, {dtype}, {where}, prefix caching {caching}"
    pace = "at their timestamps" if timestamps else f"at {wanted_rate:g} a second"
    what = f"{len(found)} chats {pace}"
    out = Console()
    if not out.is_terminal:  # a log has no width of its own
        out = Console(width=max(out.width, 110))
    for reason in outcome.refused:
        console.print(f"ended early: {reason}", markup=False, highlight=False, soft_wrap=True)
    if not outcome.served:
        raise UsageError(f"chats: expected at least one that fits the model, got {len(found)} that don't")
    out.print(replay_table(outcome, f"{what} ({setting})"), highlight=False)
    save_replay_plot(outcome.served, output, subtitle=f"{what}\n{setting}")
    out.print(f"\npicture: {output}", highlight=False, soft_wrap=True)
    if json_file is not None:
        about = {
            "model": display_name(model),
            "dtype": dtype,
            "device": device,
            "threads": num_threads,
            "prefix_caching": not no_prefix_caching,
            "schedule": schedule,
            "rate": None if timestamps else str(wanted_rate),
            "num_chats": len(found),
        }
        json_file.write_text(json.dumps(replay_json(outcome, about), indent=1) + "\n", encoding="utf-8")


def _warm_up(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    """Answer a line on an engine of its own, so that no count of the replay's has it."""
    from pagedkv.runner import SamplingParams

    prompt = tokenizer.encode("A page is the memory that holds a block.")
    make_engine(loaded, num_blocks=16).generate([prompt], SamplingParams(max_tokens=4))
