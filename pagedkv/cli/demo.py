"""`pagedkv demo`: a real model and a long shared prompt, cold against warm, with proof of equal answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import Progress

from pagedkv.checks import check_int
from pagedkv.cli.demo_checks import (
    Answer,
    Verdict,
    Waits,
    check_isolation,
    check_ratio,
    check_reuse,
    check_same_answers,
    wait_cold_and_warm,
)
from pagedkv.cli.model_loading import (
    BUNDLED,
    DEVICE_HELP,
    DTYPE_HELP,
    MODEL_HELP,
    display_name,
    load_named_model,
    make_engine,
    progress_bar,
    require_tokenizer,
    use_threads,
)
from pagedkv.cli.outputs import check_output
from pagedkv.cli.plot import Point, save_plot

if TYPE_CHECKING:
    from pagedkv.cli.demo_runs import Prompt
    from pagedkv.runner import LoadedModel


def demo(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = BUNDLED,
    dtype: Annotated[
        str, typer.Option(help=f"{DTYPE_HELP} Only in float32 must every token be equal.", metavar="DTYPE")
    ] = "float32",
    device: Annotated[str, typer.Option(help=DEVICE_HELP, metavar="DEVICE")] = "cpu",
    max_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 24,
    output: Annotated[Path, typer.Option(help="Where to save the picture, a PNG.")] = Path(
        "pagedkv-demo.png"
    ),
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of torch; by default as many as it likes.")
    ] = None,
) -> None:
    """Show what reuse is worth: users ask a real model about one long text, cold and warm.

    The same requests then run with the cache off, and with a salt each: answers must be the same, and tenants
    must share nothing. A broken promise ends the command with exit code 1. Takes some minutes.
    """
    import matplotlib  # noqa: F401  (so that it is missed now and not after minutes)

    num_threads = use_threads(threads)
    from pagedkv.cli import demo_runs
    from pagedkv.cli.demo_report import print_report

    check_int("--max-tokens", max_tokens, 1, 2**31 - 1)
    check_output("--output", output)

    console = Console()
    if not console.is_terminal:  # a log has no width of its own
        console = Console(width=max(console.width, 110))
    with progress_bar(Console(stderr=True)) as progress:
        loaded = load_named_model(model, dtype, device=device, progress=progress)
        prompts = demo_runs.make_prompts(require_tokenizer(loaded, model), demo_runs.read_handbook())
        longest = max(len(prompt.token_ids) for prompt in prompts)
        demo_runs.check_context(longest, max_tokens, loaded.model.config.context_length)
        measured = measure(loaded, prompts, max_tokens=max_tokens, progress=progress)

    threads_used = f"{num_threads} CPU thread{'s' if num_threads > 1 else ''}"
    setting = f"{display_name(model)}, {dtype}, {threads_used if device == 'cpu' else device}"
    num_shared_tokens = demo_runs.count_shared_tokens(prompts)
    variants = {
        f"Cache on: {len(prompts)} users, {num_shared_tokens:,} shared tokens ({setting})": measured.shared,
        "Cache off: the same requests": measured.uncached,
        "Cache on, each user with a salt: the same requests": measured.salted,
    }
    verdicts = judge(measured, num_shared_tokens=num_shared_tokens, dtype=dtype)
    print_report(console, variants, verdicts, ratio=measured.waits.ratio)
    new_tokens = f"a question of about {demo_runs.NUM_QUESTION_TOKENS} tokens"
    subtitle = f"{setting}\nwarm: all of the prompt but {new_tokens} is in the cache"
    save_plot(measured.points, output, subtitle=subtitle)
    console.print(f"\npicture: {output}", highlight=False, soft_wrap=True)
    if not all(verdict.holds for verdict in verdicts):
        raise typer.Exit(1)


class Measured(NamedTuple):
    """What the demo measured: the same questions three times, and time against prompt length."""

    shared: list[Answer]
    uncached: list[Answer]
    salted: list[Answer]
    points: list[Point]
    waits: Waits


def measure(loaded: LoadedModel, prompts: list[Prompt], *, max_tokens: int, progress: Progress) -> Measured:
    """Run everything, one engine after the other so that there is only one set of pages at a time."""
    from pagedkv.cli import demo_runs

    total = demo_runs.count_tokens(prompts, max_tokens)
    lengths = [n for n in demo_runs.SWEEP_LENGTHS if n < len(prompts[0].token_ids)]
    tasks = {
        name: progress.add_task(name, total=size, unit="tokens", start=False)
        for name, size in (
            ("cache on", total),
            ("a salt for each user", total),
            ("prompts of several lengths", demo_runs.sweep_tokens(lengths)),
            ("cache off", total),
        )
    }

    def advance(name: str) -> demo_runs.Advance:
        progress.start_task(tasks[name])
        if progress.disable:  # in a log, a line is better than minutes of silence
            progress.console.print(f"running: {name}")
        return lambda num_tokens: progress.advance(tasks[name], num_tokens)

    # Room for every tenant at once: that nothing is shared must not be because it was evicted.
    blocks_of = [-(-(len(prompt.token_ids) + max_tokens) // 16) for prompt in prompts]
    engine = make_engine(loaded, num_blocks=sum(blocks_of))
    demo_runs.warm_up(engine, prompts[0])
    shared = demo_runs.ask_all(engine, prompts, max_tokens=max_tokens, advance=advance("cache on"))
    demo_runs.forget_everything(engine)
    salts = [prompt.user for prompt in prompts]
    salted = demo_runs.ask_all(
        engine, prompts, max_tokens=max_tokens, salts=salts, advance=advance("a salt for each user")
    )
    demo_runs.forget_everything(engine)
    points = demo_runs.sweep(engine, prompts, lengths=lengths, advance=advance("prompts of several lengths"))
    del engine

    engine = make_engine(loaded, num_blocks=max(blocks_of), prefix_caching=False)
    uncached = demo_runs.ask_all(engine, prompts, max_tokens=max_tokens, advance=advance("cache off"))
    # The users' own requests make the last point: the whole handbook.
    waits = wait_cold_and_warm(shared, uncached)
    points.append(Point(shared[0].num_prompt_tokens, waits.cold_s, waits.warm_s))
    return Measured(shared, uncached, salted, points, waits)


def judge(measured: Measured, *, num_shared_tokens: int, dtype: str) -> list[Verdict]:
    """Hold every promise of reuse against what was measured."""
    _, *warm = measured.shared
    return [
        check_same_answers("with reuse and without", measured.uncached, measured.shared, dtype=dtype),
        check_same_answers(
            "with a salt each and without a cache", measured.uncached, measured.salted, dtype=dtype
        ),
        check_isolation(measured.salted),
        check_reuse(warm, num_shared_tokens),
        check_ratio(measured.waits),
    ]
