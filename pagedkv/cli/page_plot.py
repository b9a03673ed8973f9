"""A snapshot as a picture: the pages in rows, by state, depth, priority and order of eviction."""

from __future__ import annotations

from math import ceil, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import PoolSnapshot
from pagedkv.cli.plot import QUIET_COLOUR, TEXT_COLOUR
from pagedkv.snapshot import STATES

STATE_COLOURS = ("#e5e7eb", "#f59e0b", "#0f766e", "#93c5fd")
"""In the order of `STATES`; they differ in lightness too."""
NOTHING_COLOUR = "#f8f9fa"


def save_page_plot(snapshot: PoolSnapshot, path: Path, *, title: str) -> None:
    """Draw four maps of the same pages, page 0 at the top left, and write a PNG over `path`."""
    # Not pyplot, which keeps figures for the whole process and may look for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 10), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    size = f"{snapshot.num_blocks:,} pages of {snapshot.block_size} tokens"
    figure.text(0.04, 0.965, title, color=TEXT_COLOUR, fontsize=14, fontweight="bold", va="center")
    figure.text(0.04, 0.938, f"{size}, {snapshot.now_s:,.1f} s after the pool was made", color=QUIET_COLOUR)

    states = ListedColormap(list(STATE_COLOURS))
    grid = _grid(snapshot.state)
    _draw(figure, (0.04, 0.53), "state", grid, cmap=states, vmin=0, vmax=len(STATES) - 1)
    labels = [f"{word} {(snapshot.state == i).sum():,}" for i, word in enumerate(STATES)]
    patches = [Patch(color=c, label=label) for c, label in zip(STATE_COLOURS, labels, strict=True)]
    figure.legend(
        handles=patches, loc="upper left", bbox_to_anchor=(0.033, 0.533), ncols=2, frameon=False,
        labelcolor=QUIET_COLOUR, fontsize=9, labelspacing=0.3,
    )  # fmt: skip

    published, evictable = snapshot.depth >= 0, snapshot.eviction_rank >= 0
    _draw_scaled(figure, (0.52, 0.53), "depth: blocks before it in the prompt", snapshot.depth, published)
    _draw_scaled(figure, (0.04, 0.06), "priority", snapshot.priority, published)
    _draw_scaled(
        figure, (0.52, 0.06), "order of eviction: the darkest next", snapshot.eviction_rank, evictable
    )
    figure.savefig(path, format="png")


def _draw_scaled(
    figure: Any,
    corner: tuple[float, float],
    name: str,
    values: npt.NDArray[Any],
    shown: npt.NDArray[np.bool_],
) -> None:
    """Draw the pages that are `shown`, with a scale of colours below."""
    image = _draw(figure, corner, name, _grid(np.where(shown, values, np.nan)), cmap="viridis")
    if shown.any():
        scale = figure.colorbar(
            image, cax=figure.add_axes((corner[0], corner[1] - 0.02, 0.44, 0.012)), orientation="horizontal"
        )
        scale.outline.set_visible(False)
        scale.ax.tick_params(colors=QUIET_COLOUR, labelsize=8, length=0)
        scale.ax.xaxis.get_major_locator().set_params(integer=True)


def _draw(figure: Any, corner: tuple[float, float], name: str, grid: npt.NDArray[Any], **options: Any) -> Any:
    axes = figure.add_axes((*corner, 0.44, 0.36))
    axes.set_title(name, color=TEXT_COLOUR, fontsize=11, loc="left")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_facecolor(NOTHING_COLOUR)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes.imshow(grid, interpolation="nearest", aspect="auto", **options)


def _grid(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Values in rows that make a square, or nearly, filled up with nan."""
    side = ceil(sqrt(len(values)))
    filled = np.full(side * ceil(len(values) / side), np.nan, np.float32)
    filled[: len(values)] = values
    return filled.reshape(-1, side)
