"""`pagedkv breakeven`: from how many uses on a provider's prompt cache pays, and what it costs on a trace."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from pagedkv.cli.tables import print_table
from pagedkv.cli.trace_options import (
    BlockSizeOption,
    HashBlockOption,
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
from pagedkv.policy import PROVIDERS, Bill, Rules, Trace, bill_trace
from pagedkv.policy.breakeven import FORMULA
from pagedkv.policy.chains import Chains


def breakeven(
    traces: TraceArgument = None,
    provider: Annotated[
        str, typer.Option(help=f"Known rules: {', '.join(PROVIDERS)}.")
    ] = "anthropic-5m,anthropic-1h,openai",
    write: Annotated[
        float | None, typer.Option(help="Own rules: a write, in input tokens.", show_default=False)
    ] = None,
    read: Annotated[
        float | None, typer.Option(help="Own rules: a read, in input tokens.", show_default=False)
    ] = None,
    ttl: Annotated[float, typer.Option(help="Own rules: seconds that a prefix is kept.")] = 300,
    min_tokens: Annotated[int, typer.Option(help="Own rules: the shortest prefix that is kept.")] = 0,
    step_tokens: Annotated[int, typer.Option(help="Own rules: reads count in multiples of it.")] = 1,
    price: Annotated[float, typer.Option(help="Of a million input tokens, in any currency.")] = 3.0,
    tokens: Annotated[int, typer.Option(help="Tokens of the prefix that is reused.")] = 10_000,
    uses: Annotated[str, typer.Option(help="How often it is used while it is kept.")] = "1,2,3,5,10,100",
    workload: WorkloadOption = None,
    requests: RequestsOption = 10_000,
    seed: SeedOption = 0,
    block_size: BlockSizeOption = None,
    hash_block_size: HashBlockOption = None,
    tokenizer: TokenizerOption = None,
    strict: StrictOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say from how many uses on a prompt cache pays, by each provider's rules, and what it does for a trace.

    Prices are multiples of an input token's. With --write and --read, rules of your own are compared too.
    """
    all_rules = _rules(provider, write, read, ttl, min_tokens, step_tokens)
    counts = numbers("--uses", uses)
    if not counts:
        raise UsageError(f"--uses: expected at least one count, got {uses!r}")
    if tokens < 1 or not 0 <= price < float("inf"):
        raise UsageError(f"--tokens, --price: expected at least 1 and 0, got {tokens} and {price:g}")
    bills: list[Bill] = []
    trace = None
    if traces or workload is not None:
        trace = load_workload(traces, workload, requests, seed) or load_trace(
            traces or [], strict=strict, tokenizer=tokenizer, hash_block_size=hash_block_size
        )
        size = trace.natural_block_size if block_size is None else block_size
        if not 1 <= size <= 65535:
            raise UsageError(f"--block-size: expected an integer from 1 to 65535, got {size}")
        chains = Chains(trace, size)
        bills = [bill_trace(trace, rules, block_size=size, chains=chains) for rules in all_rules]
    if as_json:
        print(json.dumps(_as_dict(all_rules, counts, tokens, price, trace, bills), indent=2, default=str))
        return
    _print_uses(all_rules, counts, tokens, price)
    if trace is not None:
        _print_bills(trace, bills, price)


def _rules(
    provider: str, write: float | None, read: float | None, ttl: float, min_tokens: int, step_tokens: int
) -> list[Rules]:
    found = []
    for name in words("--provider", provider):
        if name not in PROVIDERS:
            raise UsageError(f"--provider: expected some of {', '.join(PROVIDERS)}, got {name!r}")
        found.append(PROVIDERS[name])
    if (write is None) != (read is None):
        raise UsageError("--write, --read: expected both or none, got one")
    if write is not None and read is not None:
        found.append(Rules("own", write, read, ttl, min_tokens, step_tokens).checked())
    return found


def _as_dict(
    all_rules: list[Rules],
    counts: list[int],
    tokens: int,
    price: float,
    trace: Trace | None,
    bills: list[Bill],
) -> dict[str, Any]:
    unit = price / 1e6
    rows = []
    for rules in all_rules:
        by_uses = [
            {
                "uses": count,
                "without": tokens * count * unit,
                "with": rules.cost(tokens, count) * unit,
                "saved": (tokens * count - rules.cost(tokens, count)) * unit,
            }
            for count in counts
        ]
        threshold = rules.threshold if rules.first_use_that_pays is not None else None
        pays = {"threshold": threshold, "first_use_that_pays": rules.first_use_that_pays}
        rows.append({**rules._asdict(), **pays, "by_uses": by_uses})
    answer: dict[str, Any] = {"formula": FORMULA, "price": price, "tokens": tokens, "rules": rows}
    if trace is not None:
        answer["trace"] = {
            "name": trace.name,
            "requests": len(trace.requests),
            "bills": [_bill(bill, unit) for bill in bills],
        }
    return answer


def _bill(bill: Bill, unit: float) -> dict[str, Any]:
    return {
        "rules": bill.rules.name,
        "read_tokens": bill.read_tokens,
        "written_tokens": bill.written_tokens,
        "read_again_tokens": bill.read_again_tokens,
        "without": bill.without * unit,
        "with": bill.cost * unit,
        "saved": (bill.without - bill.cost) * unit,
        "with_read_again": bill.cost_read_again * unit,
        "saved_read_again": (bill.without - bill.cost_read_again) * unit,
    }


def _print_uses(all_rules: list[Rules], counts: list[int], tokens: int, price: float) -> None:
    unit = price / 1e6
    print(f"A prefix of P = {tokens:,} tokens, {price:g} a million input tokens; w a write, r a read")
    print(FORMULA)
    terms = ("rules", "w", "r", "kept", "least", "even at", "pays from")
    table = Table(*terms, *(f"N = {count:,}" for count in counts))
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row(*["without", *[""] * 6], *(f"{tokens * count * unit:,.4g}" for count in counts))
    for rules in all_rules:
        pays = rules.first_use_that_pays
        table.add_row(
            rules.name,
            f"{rules.write:g}",
            f"{rules.read:g}",
            f"{rules.ttl_s:g} s",
            f"{rules.min_tokens:,}",
            f"{rules.threshold:.3g}",
            "never" if pays is None else f"N = {pays}",
            *(f"{rules.cost(tokens, count) * unit:,.4g}" for count in counts),
        )
    print_table(table)


def _print_bills(trace: Trace, bills: list[Bill], price: float) -> None:
    unit = price / 1e6
    print(f"{trace.name}: {len(trace.requests):,} requests, {trace.num_tokens:,} tokens, "
          f"{trace.num_tokens * unit:,.2f} without a cache")  # fmt: skip
    print("first with every prompt written to its end, then only what is read again while it is kept")
    table = Table("rules", "read", "written", "cost", "saved", "written", "cost", "saved")
    for column in table.columns[1:]:
        column.justify = "right"
    for bill in bills:
        saved, fewer = bill.without - bill.cost, bill.without - bill.cost_read_again
        table.add_row(
            bill.rules.name,
            f"{bill.read_tokens / bill.without:.1%}",
            f"{bill.written_tokens / bill.without:.1%}",
            f"{bill.cost * unit:,.2f}",
            f"{saved * unit:,.2f} ({saved / bill.without:.1%})",
            f"{bill.read_again_tokens / bill.without:.1%}",
            f"{bill.cost_read_again * unit:,.2f}",
            f"{fewer * unit:,.2f} ({fewer / bill.without:.1%})",
        )
    print_table(table)
