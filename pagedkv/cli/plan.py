"""`pagedkv plan`: what of a model's KV fits into a memory, and how much memory a trace is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pagedkv.cli.tables import print_table
from pagedkv.cli.trace_options import (
    HashBlockOption,
    RequestsOption,
    SeedOption,
    StrictOption,
    TokenizerOption,
    WorkloadOption,
    load_trace,
    load_workload,
    words,
)
from pagedkv.policy import MemoryPlan, Need, Trace, find_model, needed_blocks, plan_memory
from pagedkv.policy.costs import GIB

MODEL_HELP = "A config.json, a folder with one, or a known name such as llama-3.1-8b."


def plan(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, show_default=False)],
    memory: Annotated[str, typer.Option(help="Bytes that are left for KV, on one device.")] = "16GiB",
    dtype: Annotated[
        str | None, typer.Option(help="Of the KV. Default: the model's.", show_default=False)
    ] = None,
    scales: Annotated[bool, typer.Option("--scales", help="Count a scale for each token and head.")] = False,
    layout: Annotated[str, typer.Option(help="NHD or HND.")] = "NHD",
    block_size: Annotated[int, typer.Option(help="Tokens in a block.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a request, prompt and answer.")] = 8192,
    shared: Annotated[int, typer.Option(help="Tokens at their begin that all requests share.")] = 0,
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share the KV heads.")] = 1,
    trace: Annotated[
        list[Path] | None, typer.Option(help="A trace that the memory is for; may be repeated.")
    ] = None,
    workload: WorkloadOption = None,
    requests: RequestsOption = 10_000,
    seed: SeedOption = 0,
    policy: Annotated[str, typer.Option(help="Policies to size the pool for, beside LRU.")] = "lru,belady",
    hash_block_size: HashBlockOption = None,
    tokenizer: TokenizerOption = None,
    strict: StrictOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what of a model's KV fits into a memory: blocks, requests at a time, and cached prefixes.

    With a trace also the size of the pool at which 90 % and 99 % of its reachable hits are had.
    """
    found = plan_memory(
        find_model(model),
        memory,
        dtype=dtype,
        scales=scales,
        layout=layout,
        block_size=block_size,
        num_tokens=length,
        shared_tokens=shared,
        tensor_parallel=tensor_parallel,
    )
    policies = words("--policy", policy)
    replayed, needs = None, []
    if trace or workload is not None:
        replayed = load_workload(trace, workload, requests, seed) or load_trace(
            trace or [], strict=strict, tokenizer=tokenizer, hash_block_size=hash_block_size
        )
        needs = _needs(replayed, policies)
    if as_json:
        answer = found.as_dict()
        if replayed is not None:
            answer["trace"] = _trace_as_dict(replayed, needs, found.bytes_per_token)
        print(json.dumps(answer, indent=2))
        return
    _print_plan(found)
    if replayed is not None:
        _print_needs(replayed, needs, found.bytes_per_token)


def _needs(trace: Trace, policies: list[str]) -> list[Need]:
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("replaying", total=None)

        def show(policy: str) -> None:
            bar.update(task, advance=1, description=f"{policy}: {bar.tasks[0].completed + 1:.0f} replays")

        return needed_blocks(trace, policies, progress=show)


def _trace_as_dict(trace: Trace, needs: list[Need], bytes_per_token: int) -> dict[str, Any]:
    size = trace.natural_block_size
    rows = []
    for need in needs:
        gib = None if need.blocks is None else need.blocks * size * bytes_per_token / GIB
        saved = None if need.blocks_saved is None else need.blocks_saved * size * bytes_per_token / GIB
        rows.append({**need._asdict(), "gib": gib, "gib_saved": saved})
    return {"name": trace.name, "block_size": size, "requests": len(trace.requests), "needs": rows}


def _print_plan(plan: MemoryPlan) -> None:
    groups = Table("layers", "sees", "KV heads", "head dim", f"page ({plan.layout})", "bytes a token",
                   "bytes a block", "blocks a request", title_justify="left")  # fmt: skip
    for group in plan.groups:
        groups.add_row(
            f"{group.num_layers}",
            "all" if group.window is None else f"{group.window:,} tokens",
            f"{group.num_kv_heads}",
            f"{group.head_dim}",
            " × ".join(map(str, group.page_shape)),
            f"{group.bytes_per_token:,}",
            f"{group.bytes_per_block:,}",
            f"{group.blocks_per_request:,}",
        )
    print(f"{plan.model}: KV in {plan.dtype}, blocks of {plan.block_size} tokens")
    print_table(groups)
    facts = [
        ("a token", f"{plan.bytes_per_token:,} bytes"),
        (
            f"{plan.num_tokens:,} tokens, every layer keeping all",
            _bytes(plan.num_tokens * plan.bytes_per_token),
        ),
        ("a request of as many, windows counted", _bytes(plan.request_bytes)),
    ]
    if plan.shared_tokens:
        facts.append((f"of it shared ({plan.shared_tokens:,} tokens)", _bytes(plan.shared_bytes)))
    facts += [
        ("memory", _bytes(plan.memory_bytes)),
        ("blocks that fit, every layer keeping all", f"{plan.num_blocks:,}"),
        ("requests at a time", f"{plan.concurrent_requests:,}"),
    ]
    for what, value in facts:
        print(f"{what:45} {value}")
    cached = Table("kept for cached prefixes", "tokens", "requests at a time")
    for row in plan.cached:
        cached.add_row(f"{row.share:.0%}", f"{row.cached_tokens:,}", f"{row.concurrent_requests:,}")
    print_table(cached)


def _print_needs(trace: Trace, needs: list[Need], bytes_per_token: int) -> None:
    size = trace.natural_block_size
    print(f"{trace.name}: {len(trace.requests):,} requests, blocks of {size} tokens")
    table = Table("of the reachable hits", "policy", "hit blocks", "blocks", "GiB", "GiB fewer than LRU")
    for column in table.columns[2:]:
        column.justify = "right"
    for need in sorted(needs, key=lambda need: need.share):
        unit = size * bytes_per_token / GIB
        table.add_row(
            f"{need.share:.0%}",
            need.policy,
            f"{need.block_hit_rate:.1%}",
            "not reached" if need.blocks is None else f"{need.blocks:,}",
            "" if need.blocks is None else f"{need.blocks * unit:,.1f}",
            "" if need.blocks_saved is None or need.policy == "lru" else f"{need.blocks_saved * unit:,.1f}",
        )
    print_table(table)


def _bytes(count: int) -> str:
    return f"{count:,} bytes = {count / GIB:,.2f} GiB"
