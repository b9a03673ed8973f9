"""What a replay gave: percentiles, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from pagedkv.cli.replay import Outcome, Served

PERCENTILES = (50, 90, 99)


class Spread(NamedTuple):
    """A quantity over all requests: its mean and `PERCENTILES`."""

    mean: float
    percentiles: tuple[float, ...]


def spread(values: Sequence[float]) -> Spread | None:
    """Sum values up; None where there are none."""
    if not len(values):
        return None
    return Spread(float(np.mean(values)), tuple(float(p) for p in np.percentile(values, PERCENTILES)))


def output_gaps_s(served: Sequence[Served]) -> list[float]:
    """Return each request's mean seconds between two tokens, of those that have two."""
    gaps = [each.request.time_per_output_token_s for each in served]
    return [gap for gap in gaps if gap is not None]


def hit_rate(served: Sequence[Served]) -> float:
    """Return the share of prompt tokens that were found; 0 without any."""
    num_tokens = sum(each.request.num_prompt_tokens for each in served)
    return sum(each.request.num_cached_tokens for each in served) / num_tokens if num_tokens else 0.0


def latencies(served: Sequence[Served]) -> dict[str, Spread | None]:
    """Sum up what users wait for, in seconds."""
    return {
        "time to first token": spread([each.time_to_first_token_s for each in served]),
        "time per output token": spread(output_gaps_s(served)),
        "in the queue": spread([each.queue_s for each in served]),
        "arrival to end": spread([each.end_s - each.due_s for each in served]),
    }


def throughput(outcome: Outcome) -> dict[str, float]:
    """Return rates over the whole replay."""
    served, seconds = outcome.served, max(outcome.duration_s, 1e-9)
    return {
        "requests_per_s": len(served) / seconds,
        "prompt_tokens_per_s": sum(each.request.num_prompt_tokens for each in served) / seconds,
        "output_tokens_per_s": sum(each.request.num_output_tokens for each in served) / seconds,
    }


def replay_table(outcome: Outcome, title: str) -> Table:
    """Make the table of percentiles; rates stand in its caption."""
    table = Table(title=title, title_justify="left", header_style="dim", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("milliseconds")
    for heading in ("mean", *(f"p{p}" for p in PERCENTILES)):
        table.add_column(heading, justify="right")
    for name, found in latencies(outcome.served).items():
        figures = () if found is None else (found.mean, *found.percentiles)
        table.add_row(name, *(f"{1000 * figure:,.1f}" for figure in figures))
    rates = throughput(outcome)
    num_cached = sum(each.request.num_cached_tokens for each in outcome.served)
    num_prompt = sum(each.request.num_prompt_tokens for each in outcome.served)
    table.caption_justify = "left"
    requests_per_s, prompt_tokens_per_s, output_tokens_per_s = rates.values()
    table.caption = (
        f"{len(outcome.served):,} requests in {outcome.duration_s:.1f} s: {requests_per_s:.2f} a second, "
        f"{prompt_tokens_per_s:,.0f} prompt and {output_tokens_per_s:,.1f} answer tokens a second\n"
        f"hit rate {hit_rate(outcome.served):.1%}: {num_cached:,} of {num_prompt:,} prompt tokens were cached"
    )
    return table


def replay_json(outcome: Outcome, about: dict[str, Any]) -> dict[str, Any]:
    """Gather everything that a later reader could ask for; times are seconds from the start."""
    summary: dict[str, Any] = {
        name.replace(" ", "_") + "_s": None
        if found is None
        else {"mean": found.mean, **{f"p{p}": v for p, v in zip(PERCENTILES, found.percentiles, strict=True)}}
        for name, found in latencies(outcome.served).items()
    }
    summary |= {**throughput(outcome), "hit_rate": hit_rate(outcome.served), "duration_s": outcome.duration_s}
    requests = [
        {
            "chat": each.chat,
            "turn": each.turn,
            "due_s": each.due_s,
            "first_token_s": each.first_token_s,
            "end_s": each.end_s,
            **each.request.stats._asdict(),
            # From the arrival, not from the submission: a step may have been running in between.
            "queue_s": each.queue_s,
            "time_to_first_token_s": each.time_to_first_token_s,
        }
        for each in outcome.served
    ]
    return {**about, "summary": summary, "refused": outcome.refused, "requests": requests}
