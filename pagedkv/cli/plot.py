"""The demo's picture: time to first token against prompt length, cold and warm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

COLD_COLOUR = "#c2410c"
WARM_COLOUR = "#0f766e"
TEXT_COLOUR = "#1f2937"
QUIET_COLOUR = "#6b7280"


class Point(NamedTuple):
    """A prompt length in tokens, and the seconds to the first token without and with reuse."""

    num_prompt_tokens: int
    cold_s: float
    warm_s: float


def save_plot(points: Sequence[Point], path: Path, *, subtitle: str) -> None:
    """Draw the points, shortest prompt first, and write a PNG.

    Parameters
    ----------
    points : sequence of Point
        At least one.
    path : Path
        Overwritten.
    subtitle : str
        What the figures were measured with: model, dtype, threads. Two short lines at most.
    """
    # Not pyplot, which keeps figures for the whole process and may look for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = sorted(points)
    lengths = [point.num_prompt_tokens for point in points]
    last = points[-1]
    figure = Figure(figsize=(8, 4.8), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.09, 0.12, 0.8, 0.67))
    axes.plot(lengths, [point.cold_s for point in points], "o-", color=COLD_COLOUR, lw=2.2, clip_on=False)
    axes.plot(lengths, [point.warm_s for point in points], "o-", color=WARM_COLOUR, lw=2.2, clip_on=False)

    # Each line is labelled where it ends, so that nobody has to look at a legend.
    for seconds, word, colour in ((last.cold_s, "cold", COLD_COLOUR), (last.warm_s, "warm", WARM_COLOUR)):
        label = f"{word}\n{_seconds(seconds)}"
        axes.annotate(
            label, (lengths[-1], seconds), (11, -6), textcoords="offset points",
            color=colour, fontsize=11, fontweight="bold", va="bottom", annotation_clip=False,
        )  # fmt: skip
    for point in points:
        axes.annotate(
            f"{point.cold_s / point.warm_s:.0f}×", (point.num_prompt_tokens, point.cold_s), (-6, 8),
            textcoords="offset points", color=QUIET_COLOUR, fontsize=10, ha="right",
        )  # fmt: skip

    axes.set_xlim(0, lengths[-1] * 1.03)
    axes.set_ylim(0, max(point.cold_s for point in points) * 1.12)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xlabel("prompt length, tokens", color=TEXT_COLOUR, fontsize=11)
    axes.set_ylabel("time to first token, seconds", color=TEXT_COLOUR, fontsize=11)
    axes.tick_params(colors=QUIET_COLOUR, labelsize=10, length=0)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#9ca3af")

    title = "A shared beginning is read once: time to first token"
    figure.text(0.09, 0.94, title, color=TEXT_COLOUR, fontsize=14, fontweight="bold", va="center")
    figure.text(0.09, 0.905, subtitle, color=QUIET_COLOUR, fontsize=10, va="top", linespacing=1.4)
    figure.savefig(path, format="png")


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
