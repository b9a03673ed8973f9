"""What `pagedkv run` prints about its requests, beside their answers."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from pagedkv.runner import Completion, Engine, Request, Tokenizer, TokenLogprobs

NUMBER = "%.3f"


def cost_table(requests: list[Request]) -> Table:
    """Make a table of what each request cost."""
    headings = ["prompt tokens", "cached", "first token, s", "answer tokens", "tokens/s", "ended by"]
    guesses = any(request.num_draft_tokens for request in requests)
    if guesses:
        headings.insert(4, "guesses that held")
    table = Table("", *headings, box=None, header_style="dim", pad_edge=False)
    for column in table.columns[1:-1]:
        column.justify = "right"
    for number, request in enumerate(requests, 1):
        first_token_s, speed = request.time_to_first_token_s, request.decode_tokens_per_s
        cells = [
            str(request.num_prompt_tokens),
            str(request.num_cached_tokens),
            "–" if first_token_s is None else f"{first_token_s:.3f}",
            str(request.num_output_tokens),
            "–" if speed is None else f"{speed:.1f}",
            ", ".join(dict.fromkeys(str(each.finish_reason) for each in request.completions)),
        ]
        if guesses:
            cells.insert(4, f"{request.num_accepted_tokens} of {request.num_draft_tokens}")
        table.add_row(escape(f"[{number}]"), *cells)
    return table


def stats_table(engine: Engine, requests: list[Request]) -> Table:
    """Make a table of what requests waited for, and of what the engine's cache did."""
    metrics, cache = engine.metrics, engine.cache.stats()
    costs = [request.stats for request in requests]
    table = Table(title="what it cost", title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for name, waits_s in (
        ("in the queue", [cost.queue_s for cost in costs]),
        ("time to first token", [cost.time_to_first_token_s for cost in costs]),
        ("time per output token", [cost.time_per_output_token_s for cost in costs]),
    ):
        known = [1000 * wait_s for wait_s in waits_s if wait_s is not None]
        table.add_row(name, f"{median(known):,.2f} ms median, {max(known):,.2f} ms at most" if known else "–")
    found = ", ".join(f"{count:,} from {source}" for source, count in cache.hits_by_source.items())
    num_computed = cache.num_prompt_tokens - cache.num_cached_tokens
    table.add_row("prompt tokens", f"{cache.num_prompt_tokens:,}: {found}, {num_computed:,} computed")
    table.add_row("hit rate", f"{cache.hit_rate:.1%}")
    table.add_row("answer tokens", f"{metrics.num_output_tokens:,}")
    states = ("free", "writable", "committed", "evictable")
    pages = ", ".join(f"{getattr(cache, f'num_{state}_blocks'):,} {state}" for state in states)
    table.add_row("pages", f"{cache.num_blocks:,}: {pages}")
    evicted = [f"{count:,} for {reason}" for reason, count in cache.num_evicted_by.items() if count]
    table.add_row("evictions", ", ".join(evicted) or "none")
    table.add_row("preemptions", f"{metrics.num_preemptions:,}")
    return table


def answer_title(number: int, completion: Completion) -> str:
    """Return what stands before one of several answers."""
    if len(completion.request.completions) == 1:
        return f"[{number}]"
    score = "" if completion.score is None else f" {NUMBER % completion.score}"
    return f"[{number}.{completion.index + 1}]{score}"


def logprob_table(tokens: Iterable[TokenLogprobs | None], tokenizer: Tokenizer, title: str) -> Table:
    """Make a table of tokens, with their log-probabilities and those of the likeliest ones.

    None stands for the first token of a prompt, which nothing precedes, and is left out.
    """
    table = Table("token", "logprob", "rank", "likeliest", title=escape(title), box=None, header_style="dim")
    for found in filter(None, tokens):
        best = "  ".join(
            f"{_shown(tokenizer, token_id)} {NUMBER % logprob}" for token_id, logprob in found.top
        )
        own = _shown(tokenizer, found.token_id)
        table.add_row(escape(own), NUMBER % found.logprob, str(found.rank), escape(best))
    return table


def _shown(tokenizer: Tokenizer, token_id: int) -> str:
    return repr(tokenizer.decode([token_id], skip_special_tokens=False))
