"""The options of `pagedkv run`, some of which other commands have too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pagedkv.cli.model_loading import DEVICE_HELP, DTYPE_HELP, MODEL_HELP, REVISION_HELP
from pagedkv.errors import UsageError

DEFAULT_MEMORY = "1GiB"

DRAWING = {"rich_help_panel": "How answers are drawn"}
PENALTIES = {"rich_help_panel": "What changes the likelihood of tokens"}
CACHE = {"rich_help_panel": "Cache and batch"}
METRICS = {"rich_help_panel": "What it cost"}

Model = Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL", show_default=False)]
Revision = Annotated[str | None, typer.Option(help=REVISION_HELP)]
Prompt = Annotated[
    list[str] | None, typer.Option(help="What to answer. Repeat it: all prompts then run as one batch.")
]
PromptFile = Annotated[
    Path | None, typer.Option(help="A file with a prompt on each line; JSON texts in a .jsonl file.")
]
Chat = Annotated[bool, typer.Option("--chat", help="Lay prompts out with the model's chat template.")]
System = Annotated[str | None, typer.Option(help="The system message of every chat.")]
MaxTokens = Annotated[int, typer.Option(help="The most tokens of an answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer before this text. May be repeated.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's own end tokens.")]
DeadlineS = Annotated[
    float | None, typer.Option(help="End every answer after so many seconds with what there is.")
]

NumSamples = Annotated[int, typer.Option(help="Answers to each prompt, which share its pages.", **DRAWING)]
Temperature = Annotated[
    float, typer.Option(help="0 takes the likeliest token; more is more random.", **DRAWING)
]
TopK = Annotated[int, typer.Option(help="Draw among so many likeliest tokens; 0 is all.", **DRAWING)]
TopP = Annotated[
    float,
    typer.Option(help="Draw among the likeliest tokens that together reach this probability.", **DRAWING),
]
MinP = Annotated[
    float,
    typer.Option(
        help="Draw among tokens of at least this share of the likeliest one's probability.", **DRAWING
    ),
]
Seed = Annotated[int | None, typer.Option(help="Makes the draws repeatable.", **DRAWING)]
Beams = Annotated[
    int, typer.Option(help="Beam search with so many beams; --num-samples of the best are shown.", **DRAWING)
]
LengthPenalty = Annotated[float, typer.Option(help="More favours long beams, less short ones.", **DRAWING)]
EarlyStopping = Annotated[
    bool,
    typer.Option(
        "--early-stopping", help="End beams once as many are complete, though one may still win.", **DRAWING
    ),
]
Speculate = Annotated[
    int, typer.Option(help="Guess up to so many tokens a step from the text so far: only faster.", **DRAWING)
]
Logprobs = Annotated[
    int | None,
    typer.Option(help="Show each token's log-probability, and those of so many likeliest ones.", **DRAWING),
]
PromptLogprobs = Annotated[
    int | None,
    typer.Option(help="The same for the prompt's tokens; all of them are then computed.", **DRAWING),
]

RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1: less of what prompt and answer have.", **PENALTIES)
]
PresencePenalty = Annotated[float, typer.Option(help="Above 0: less of what the answer has.", **PENALTIES)]
FrequencyPenalty = Annotated[
    float, typer.Option(help="Above 0: less of what the answer has often.", **PENALTIES)
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        help="A token id and what to add to its logit, such as 42=-inf. May be repeated.",
        metavar="ID=BIAS",
        **PENALTIES,
    ),
]

Schedule = Annotated[
    str, typer.Option(help="Who is admitted next: fcfs, longest-prefix or depth-first.", **CACHE)
]
DType = Annotated[str, typer.Option(help=DTYPE_HELP, metavar="DTYPE", **CACHE)]
Device = Annotated[str, typer.Option(help=DEVICE_HELP, metavar="DEVICE", **CACHE)]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads of torch; by default as many as it likes.", **CACHE)
]
Memory = Annotated[
    str | None, typer.Option(help=f"Memory for keys and values, {DEFAULT_MEMORY} unless given.", **CACHE)
]
NumBlocks = Annotated[int | None, typer.Option(help="Instead of --memory: pages of 16 tokens.", **CACHE)]
Salt = Annotated[
    str | None, typer.Option(help="Cache salt: requests with different ones share nothing.", **CACHE)
]
NoPrefixCaching = Annotated[
    bool, typer.Option("--no-prefix-caching", help="Reuse nothing between prompts.", **CACHE)
]
Snapshot = Annotated[
    Path | None,
    typer.Option(help="Write the pool's pages into this file, for `pagedkv inspect`.", **CACHE),
]

Stats = Annotated[bool, typer.Option("--stats", help="Show latencies and what the cache did.", **METRICS)]
MetricsPort = Annotated[
    int | None,
    typer.Option(help="Serve metrics for Prometheus at this port meanwhile; 0 takes a free one.", **METRICS),
]
MetricsPrefix = Annotated[
    str,
    typer.Option(
        help="Before the metrics' names; vllm makes them vLLM's, for dashboards that are there.", **METRICS
    ),
]


def pages_of(memory: str | None, num_blocks: int | None) -> dict[str, Any]:
    """Return what an engine is told about its pages.

    Raises
    ------
    UsageError
        Both options are given.
    """
    if memory is not None and num_blocks is not None:
        raise UsageError("--memory and --num-blocks: expected one of them, got both")
    return {"num_blocks": num_blocks} if num_blocks is not None else {"memory": memory or DEFAULT_MEMORY}
