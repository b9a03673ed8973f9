"""Pictures of a simulation: hit rate against size, and over time, a line for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.cli.plot import QUIET_COLOUR, TEXT_COLOUR
from pagedkv.policy import SimulationResult, Trace

COLOURS = ("#0f766e", "#c2410c", "#1d4ed8", "#a21caf", "#4d7c0f", "#b45309", "#0e7490", "#be123c")
BOUND_COLOUR = "#6b7280"
BOUNDS = ("belady", "infinite")
WINDOWS = 60
LABEL_POINTS = 12


def save_size_plot(results: Sequence[SimulationResult], path: Path, *, title: str) -> None:
    """Draw the share of blocks hit against the size of the pool, and write a PNG over `path`."""
    figure, axes = _figure(
        title, f"hit blocks by all blocks of the prompts, {results[0].block_size} tokens each"
    )
    sizes = sorted({result.blocks for result in results if result.policy != "infinite"})
    for policy, colour in _colours(results).items():
        own = sorted((result.blocks, result.block_hit_rate) for result in results if result.policy == policy)
        style = "--" if policy in BOUNDS else "-"
        if policy == "infinite":
            ends = (sizes[0], sizes[-1]) if sizes else (own[0][0], own[0][0])
            axes.plot(ends, [own[0][1]] * 2, ":", color=colour, lw=1.5)
            end = (ends[1], own[0][1])
        else:
            axes.plot(*zip(*own, strict=True), style, marker="o", ms=4, color=colour, lw=2, clip_on=False)
            end = own[-1]
        _label(axes, policy, end, colour)
    axes.set_xscale("log", base=2)
    if sizes:
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30 if len(sizes) > 6 else 0)
        axes.minorticks_off()
    axes.set_xlabel("blocks in the pool", color=TEXT_COLOUR, fontsize=11)
    _finish(figure, axes, path)


def save_time_plot(trace: Trace, results: Sequence[SimulationResult], path: Path) -> None:
    """Draw the share of blocks hit in each of sixty windows of time, for the smallest size of each policy."""
    smallest: dict[str, SimulationResult] = {}
    for result in results:
        if result.policy not in smallest or result.blocks < smallest[result.policy].blocks:
            smallest[result.policy] = result
    blocks = min((r.blocks for r in smallest.values() if r.policy != "infinite"), default=results[0].blocks)
    size = results[0].block_size
    figure, axes = _figure(trace.name, f"hit blocks over time, {blocks:,} blocks of {size} tokens")
    times = np.array([request.time_s for request in trace.requests])
    totals = np.array([-(-request.num_tokens // size) for request in trace.requests])
    edges = np.linspace(times[0], max(times[-1], times[0] + 1e-9), WINDOWS + 1)
    window = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, WINDOWS - 1)
    all_blocks = np.bincount(window, totals, WINDOWS)
    filled = np.flatnonzero(all_blocks)
    middles = (edges[:-1] + edges[1:]) / 2 - times[0]
    for policy, colour in _colours(results).items():
        hits = np.bincount(window, smallest[policy].hits_by_request, WINDOWS)
        # Nothing was asked in an empty window: the line stops, and a point alone is shown as one.
        rates = np.divide(hits, all_blocks, out=np.full(WINDOWS, np.nan), where=all_blocks > 0)
        style = {"belady": "--", "infinite": ":"}.get(policy, "-")
        axes.plot(middles, rates, style, marker=".", ms=4, color=colour, lw=1.8)
        _label(axes, policy, (middles[filled[-1]], rates[filled[-1]]), colour)
    axes.set_xlabel("seconds since the first request", color=TEXT_COLOUR, fontsize=11)
    _finish(figure, axes, path)


def _figure(title: str, subtitle: str) -> tuple[Any, Any]:
    # Not pyplot, which keeps figures for the whole process and may look for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.09, 0.15, 0.78, 0.68))
    shown = title if len(title) <= 70 else title[:67] + "..."
    figure.text(0.09, 0.94, shown, color=TEXT_COLOUR, fontsize=14, fontweight="bold", va="center")
    figure.text(0.09, 0.905, subtitle, color=QUIET_COLOUR, fontsize=10, va="top")
    return figure, axes


def _colours(results: Sequence[SimulationResult]) -> dict[str, str]:
    names = dict.fromkeys(result.policy for result in results)
    own = iter(COLOURS * (len(names) // len(COLOURS) + 1))
    return {name: BOUND_COLOUR if name in BOUNDS else next(own) for name in names}


def _label(axes: Any, text: str, end: tuple[float, float], colour: str) -> None:
    axes.annotate(
        text, end, (8, 0), textcoords="offset points", color=colour, fontsize=10, va="center",
        annotation_clip=False,
    )  # fmt: skip


def _finish(figure: Any, axes: Any, path: Path) -> None:
    from matplotlib.ticker import PercentFormatter

    _spread_labels(axes)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.tick_params(colors=QUIET_COLOUR, labelsize=10, length=0)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#9ca3af")
    figure.savefig(path, format="png")


def _spread_labels(axes: Any) -> None:
    """Move labels that would lie on each other apart, each group around its middle."""
    low, high = axes.get_ylim()
    points_per_unit = 0.68 * 4.8 * 72 / ((high - min(low, 0)) or 1)
    labels = sorted(axes.texts, key=lambda text: float(text.xy[1]))
    groups: list[tuple[float, int]] = []  # where its middle is, how many labels
    for label in labels:
        middle, count = label.xy[1] * points_per_unit, 1
        while groups and middle - groups[-1][0] < LABEL_POINTS * (count + groups[-1][1]) / 2:
            other, others = groups.pop()
            middle = (middle * count + other * others) / (count + others)
            count += others
        groups.append((middle, count))
    places = [
        middle + LABEL_POINTS * (place - (count - 1) / 2)
        for middle, count in groups
        for place in range(count)
    ]
    for label, place in zip(labels, places, strict=True):
        label.set_position((8, place - label.xy[1] * points_per_unit))
