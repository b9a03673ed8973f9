"""`pagedkv run`: answers one prompt, or several at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pagedkv.cli.model_loading import (
    DTYPE_HELP,
    MODEL_HELP,
    load_named_model,
    make_engine,
    progress_bar,
    require_tokenizer,
)
from pagedkv.cli.outputs import check_output
from pagedkv.errors import UsageError

if TYPE_CHECKING:
    from pagedkv.runner import Engine, Request, SamplingParams, Tokenizer

DEFAULT_MEMORY = "1GiB"


def run(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL", show_default=False)],
    prompt: Annotated[
        list[str], typer.Option(help="What to answer. Repeat it: all prompts then run as one batch.")
    ],
    chat: Annotated[
        bool, typer.Option("--chat", help="Lay prompts out with the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="The system message of every chat.")] = None,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; more is more random.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw among so many likeliest tokens; 0 is all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Draw among the likeliest tokens that together reach this probability.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes the draws repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text. May be repeated.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP, metavar="DTYPE")] = "float32",
    memory: Annotated[
        str | None, typer.Option(help=f"Memory for keys and values, {DEFAULT_MEMORY} unless given.")
    ] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Instead of --memory: pages of 16 tokens.")] = None,
    salt: Annotated[
        str | None, typer.Option(help="Cache salt: requests with different ones share nothing.")
    ] = None,
    no_prefix_caching: Annotated[
        bool, typer.Option("--no-prefix-caching", help="Reuse nothing between prompts.")
    ] = False,
    snapshot: Annotated[
        Path | None, typer.Option(help="Write the pool's pages into this file, for `pagedkv inspect`.")
    ] = None,
) -> None:
    """Answer prompts with a Llama-family model, through the cache.

    The answer to a single prompt is printed as it is written. Answers go to stdout, all else to stderr.

    For example: pagedkv run smollm2 --chat --prompt "What is a page?"
    """
    from pagedkv.runner import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    if system is not None and not chat:
        raise UsageError("--system: expected --chat with it, got none")
    if memory is not None and num_blocks is not None:
        raise UsageError("--memory and --num-blocks: expected one of them, got both")
    check_output("--snapshot", snapshot)
    pages: dict[str, Any] = (
        {"num_blocks": num_blocks} if num_blocks is not None else {"memory": memory or DEFAULT_MEMORY}
    )

    console = Console(stderr=True)
    with progress_bar(console) as progress:
        loaded = load_named_model(model, dtype, progress=progress)
    tokenizer = require_tokenizer(loaded, model)
    engine = make_engine(loaded, **pages, prefix_caching=not no_prefix_caching)
    prompts = [_encode(tokenizer, each, chat=chat, system=system) for each in prompt]
    if len(prompts) == 1:
        requests = [_stream(engine, prompts[0], params=params, salt=salt)]
    else:
        requests = _run_batch(engine, prompts, params=params, salt=salt, console=console)
        for i, request in enumerate(requests):
            print(f"[{i + 1}] {prompt[i]}\n{request.text}\n")
    console.print(_table(requests))
    if snapshot is not None:
        engine.cache.pool.snapshot().save(snapshot)


def _encode(tokenizer: Tokenizer, text: str, *, chat: bool, system: str | None) -> list[int]:
    if not chat:
        return tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer.encode_chat(messages)


def _stream(engine: Engine, prompt: list[int], *, params: SamplingParams, salt: str | None) -> Request:
    """Run one request and write its text as it comes."""

    def write(_: Request, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    (request,) = engine.generate([prompt], params, cache_salt=salt, on_token=write)
    sys.stdout.write("\n")
    return request


def _run_batch(
    engine: Engine, prompts: list[list[int]], *, params: SamplingParams, salt: str | None, console: Console
) -> list[Request]:
    """Run all requests at once, with a bar that counts the tokens of their answers."""
    with progress_bar(console) as progress:
        task = progress.add_task("answering", total=None, unit="tokens")
        requests = engine.generate(
            prompts, params, cache_salt=salt, on_token=lambda _request, _text: progress.advance(task)
        )
        progress.update(task, total=sum(len(request.output_ids) for request in requests))
    return requests


def _table(requests: list[Request]) -> Table:
    """Make a table of what each request cost."""
    headings = ("prompt tokens", "cached", "first token, s", "answer tokens", "tokens/s", "ended by")
    table = Table("", *headings, box=None, header_style="dim", pad_edge=False)
    for column in table.columns[1:-1]:
        column.justify = "right"
    for i, request in enumerate(requests):
        speed = request.decode_tokens_per_s
        assert request.time_to_first_token_s is not None, "it is finished"
        table.add_row(
            f"[{i + 1}]".replace("[", r"\["),
            str(request.num_prompt_tokens),
            str(request.num_cached_tokens),
            f"{request.time_to_first_token_s:.3f}",
            str(len(request.output_ids)),
            "–" if speed is None else f"{speed:.1f}",
            request.finish_reason,
        )
    return table
