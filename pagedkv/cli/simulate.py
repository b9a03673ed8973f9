"""`pagedkv simulate`: what eviction policies find of a trace, at several sizes, and what none can beat."""

from __future__ import annotations

import csv
import json
import sys
from math import inf
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pagedkv.cli.outputs import check_output
from pagedkv.cli.tables import print_table
from pagedkv.cli.trace_options import (
    BlockSizeOption,
    HashBlockOption,
    ModelOption,
    RequestsOption,
    SeedOption,
    StrictOption,
    TokenizerOption,
    TraceArgument,
    WorkloadOption,
    load_trace,
    load_workload,
    numbers,
    words,
)
from pagedkv.errors import UsageError
from pagedkv.policy import CostModel, SimulationResult, Trace, find_model, simulate
from pagedkv.spec import parse_bytes

POLICY_HELP = "Of the pool, belady (knows the future), infinite (evicts nothing); or all."
COLUMNS = (
    "policy",
    "blocks",
    "GiB",
    "hit blocks",
    "hit tokens",
    "prefill saved",
    "evicted",
    "refused",
)


def simulate_traces(
    traces: TraceArgument = None,
    policy: Annotated[str, typer.Option(help=POLICY_HELP)] = "lru,belady,infinite",
    blocks: Annotated[
        str, typer.Option(help="Sizes of the pool, in blocks. Default: seven.", show_default=False)
    ] = "",
    block_size: BlockSizeOption = None,
    memory: Annotated[
        str, typer.Option(help="Or in bytes of the model's KV, such as 8GiB,16GiB.", show_default=False)
    ] = "",
    model: ModelOption = "llama-3.1-8b",
    tflops: Annotated[float, typer.Option(help="What the device does in prefill, 1e12/s.")] = 400,
    workload: WorkloadOption = None,
    requests: RequestsOption = 10_000,
    seed: SeedOption = 0,
    token_granular: Annotated[
        bool, typer.Option("--token-granular", help="Also count tokens behind the last whole block.")
    ] = False,
    equal_cost_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens into a prompt where attention costs as much as all else; hazard and gdsf keep what "
            "costs more. 0: all cost the same.",
            show_default=False,
        ),
    ] = None,
    hash_block_size: HashBlockOption = None,
    tokenizer: TokenizerOption = None,
    strict: StrictOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw hit rate against size into a PNG.", show_default=False)
    ] = None,
    time_plot: Annotated[
        Path | None, typer.Option(help="Draw hit rate over time into a PNG.", show_default=False)
    ] = None,
) -> None:
    """Replay traces through the real pool with every policy and size, and compare what they hit.

    Several traces are one workload, by arrival. A folder stands for the files in it.
    """
    if as_json and as_csv:
        raise UsageError("--json, --csv: expected one of them, got both")
    check_output("--plot", plot)
    check_output("--time-plot", time_plot)
    if memory and blocks:
        raise UsageError("--blocks, --memory: expected one of them, got both")
    if not 0 < tflops < inf:
        raise UsageError(f"--tflops: expected more than 0, got {tflops}")
    cost_model = CostModel(find_model(model), tflops * 1e12)
    trace = load_workload(traces, workload, requests, seed) or load_trace(
        traces or [], strict=strict, tokenizer=tokenizer, hash_block_size=hash_block_size
    )
    size = trace.natural_block_size if block_size is None else block_size
    bytes_per_block = size * cost_model.model.bytes_per_token()
    sizes = (
        _blocks_within(memory, bytes_per_block) or numbers("--blocks", blocks) or default_sizes(trace, size)
    )
    results = _run(
        trace, words("--policy", policy), sizes, size, token_granular, equal_cost_tokens, cost_model
    )
    if plot is not None:
        from pagedkv.cli.hit_plot import save_size_plot

        save_size_plot(results, plot, title=trace.name)
    if time_plot is not None:
        from pagedkv.cli.hit_plot import save_time_plot

        save_time_plot(trace, results, time_plot)
    if as_json:
        rows = [result.as_dict() | {"trace": trace.name} for result in results]
        print(json.dumps({"results": rows}, indent=2))
    elif as_csv:
        rows = [result.as_dict() for result in results]
        writer = csv.DictWriter(sys.stdout, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        _print_table(trace, results, cost_model.model.name, tflops)


def default_sizes(trace: Trace, block_size: int) -> list[int]:
    """Return sizes from where a pool is short to where nothing is evicted, each twice the one before."""
    [unlimited] = simulate(trace, policies=["infinite"], blocks=[1], block_size=block_size)
    largest = max(-(-request.num_tokens // block_size) for request in trace.requests)
    sizes = {max(unlimited.blocks >> shift, largest) for shift in range(7)}
    return sorted(sizes)


def _run(
    trace: Trace,
    policies: list[str],
    sizes: list[int],
    block_size: int,
    token_granular: bool,
    equal_cost_tokens: int | None,
    cost_model: CostModel,
) -> list[SimulationResult]:
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    runs = sum(1 if name == "infinite" else len(sizes) for name in policies)
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=runs * len(trace.requests))
        results = []
        found = simulate(
            trace,
            policies=policies,
            blocks=sizes,
            block_size=block_size,
            token_granular=token_granular,
            equal_cost_tokens=equal_cost_tokens,
            cost_model=cost_model,
            progress=lambda done: bar.advance(task, done),
        )
        for result in found:
            results.append(result)
            bar.update(task, completed=len(results) * len(trace.requests), description=result.policy)
    return results


def _blocks_within(memory: str | None, bytes_per_block: int) -> list[int]:
    """Return how many blocks fit into each size of `memory`, a list with commas."""
    sizes = []
    for part in memory.split(",") if memory else []:
        num_blocks = parse_bytes(part) // bytes_per_block
        if num_blocks < 1:
            raise UsageError(f"--memory: expected room for a block of {bytes_per_block} bytes, got {part}")
        sizes.append(num_blocks)
    return sizes


def _print_table(trace: Trace, results: list[SimulationResult], model: str, tflops: float) -> None:
    first = results[0]
    assert first.costs is not None
    print(
        f"{trace.name}: {first.requests:,} requests, {first.total_tokens:,} tokens, "
        f"{first.total_blocks:,} blocks of {first.block_size}\n"
        f"{model} at {tflops:g} TFLOP/s: {first.costs.prefill_seconds:,.0f} s of prefill without reuse"
    )
    table = Table(*COLUMNS)
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        costs = result.costs
        assert costs is not None
        table.add_row(
            result.policy,
            f"{result.blocks:,}",
            f"{costs.memory_gib:,.1f}",
            f"{result.block_hit_rate:.1%}",
            f"{result.token_hit_rate:.1%}",
            f"{costs.saved_prefill_seconds:,.0f} s",
            f"{result.evicted_blocks:,}",
            f"{result.refused_requests:,}",
        )
    print_table(table)
