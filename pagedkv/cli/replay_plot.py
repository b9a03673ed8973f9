"""The picture of a replay: what users waited for and what the cache found, over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.cli.plot import COLD_COLOUR, QUIET_COLOUR, TEXT_COLOUR, WARM_COLOUR
from pagedkv.cli.replay import Served
from pagedkv.cli.replay_report import PERCENTILES

MAX_WINDOWS = 24
MIN_REQUESTS = 4
"""How many requests a window should have on average: percentiles of fewer say nothing."""
COLOURS = (WARM_COLOUR, "#3b5bdb", COLD_COLOUR)
"""Of the percentiles, the lowest first."""

Value = Callable[[Served], float | None]


def save_replay_plot(served: Sequence[Served], path: Path, *, subtitle: str) -> None:
    """Draw percentiles of TTFT and TPOT and the hit rate over time, and write a PNG.

    Parameters
    ----------
    served : sequence of Served
        At least one.
    path : Path
        Overwritten.
    subtitle : str
        What was replayed on what; two short lines at most.
    """
    # Not pyplot, which keeps figures for the whole process and may look for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    served = sorted(served, key=lambda each: each.first_token_s)
    figure = Figure(figsize=(8, 8.4), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 1, sharex=True)
    figure.subplots_adjust(left=0.11, right=0.86, top=0.87, bottom=0.07, hspace=0.28)
    edges = window_edges([each.first_token_s for each in served])
    _draw_percentiles(axes[0], served, edges, lambda each: 1000 * each.time_to_first_token_s)
    axes[0].set_title("time to first token, ms", **_TITLE)
    _draw_percentiles(axes[1], served, edges, _gap_ms)
    axes[1].set_title("time per output token, ms", **_TITLE)
    _draw_hit_rate(axes[2], served, edges)
    axes[2].set_title("hit rate: share of prompt tokens that were cached", **_TITLE)
    axes[2].set_xlabel("seconds since the start", color=TEXT_COLOUR, fontsize=10)
    for each in axes:
        each.tick_params(colors=QUIET_COLOUR, labelsize=9, length=0)
        each.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        each.set_axisbelow(True)
        each.spines[["top", "right", "left"]].set_visible(False)
        each.spines["bottom"].set_color("#9ca3af")
        each.set_xlim(0, 1.01 * edges[-1])
    figure.text(0.11, 0.965, "Chats replayed", color=TEXT_COLOUR, fontsize=14, fontweight="bold", va="center")
    figure.text(0.11, 0.945, subtitle, color=QUIET_COLOUR, fontsize=9.5, va="top", linespacing=1.4)
    figure.savefig(path, format="png")


_TITLE: dict[str, Any] = {"loc": "left", "color": TEXT_COLOUR, "fontsize": 11}


def window_edges(times_s: Sequence[float]) -> list[float]:
    """Cut the time into equal windows, as many as the number of values lets mean something."""
    num_windows = int(np.clip(len(times_s) // MIN_REQUESTS, 1, MAX_WINDOWS))
    return [float(edge) for edge in np.linspace(0, max(*times_s, 1e-3), num_windows + 1)]


def windows(served: Sequence[Served], edges: Sequence[float]) -> list[list[Served]]:
    """Sort requests into windows by their first tokens; the last edge belongs to the last window."""
    found: list[list[Served]] = [[] for _ in edges[1:]]
    for each in served:
        place = int(np.searchsorted(edges, each.first_token_s, side="right")) - 1
        found[min(max(place, 0), len(found) - 1)].append(each)
    return found


def _gap_ms(served: Served) -> float | None:
    gap = served.request.time_per_output_token_s
    return None if gap is None else 1000 * gap


def _draw_percentiles(axes: Any, served: Sequence[Served], edges: Sequence[float], value: Value) -> None:
    points = [(each.first_token_s, found) for each in served if (found := value(each)) is not None]
    if not points:
        return
    axes.plot(*zip(*points, strict=True), ".", color="#cbd5e1", ms=4, zorder=1)
    lines: list[list[tuple[float, float]]] = [[] for _ in PERCENTILES]
    for start, end, group in zip(edges, edges[1:], windows(served, edges), strict=False):
        values = [found for each in group if (found := value(each)) is not None]
        if values:
            for line, percentile in zip(lines, np.percentile(values, PERCENTILES), strict=True):
                line.append(((start + end) / 2, float(percentile)))
    for line, percentile, colour in zip(lines, PERCENTILES, COLOURS, strict=True):
        axes.plot(*zip(*line, strict=True), "o-", color=colour, lw=1.8, ms=3.5, label=f"p{percentile}")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False, fontsize=9)


def _draw_hit_rate(axes: Any, served: Sequence[Served], edges: Sequence[float]) -> None:
    cached = np.array([each.request.num_cached_tokens for each in served])
    prompt = np.array([each.request.num_prompt_tokens for each in served])
    times_s = [each.first_token_s for each in served]
    rates = []
    for group in windows(served, edges):
        total = sum(each.request.num_prompt_tokens for each in group)
        rates.append(sum(each.request.num_cached_tokens for each in group) / total if total else np.nan)
    axes.stairs(rates, edges, color=WARM_COLOUR, lw=0, fill=True, alpha=0.25, label="window")
    axes.plot(times_s, cached.cumsum() / prompt.cumsum(), color=WARM_COLOUR, lw=1.8, label="so far")
    axes.set_ylim(0, 1)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False, fontsize=9)
