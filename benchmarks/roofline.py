"""A picture of attention's rows below what the machine gives at most."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.attention_table import F32_GEMM, GEMM, READ
from benchmarks.running import Outcome
from benchmarks.shapes import THREADS, with_threads

COLOURS = ("#1b7f5c", "#b0562b")


def draw(outcomes: Iterable[Outcome], file: Path) -> None:
    """Draw operations a byte against operations a second, for the rows with both, and the ceilings."""
    from matplotlib import pyplot

    by_name = {outcome.row.name: outcome for outcome in outcomes}
    figure, axes = pyplot.subplots(figsize=(10, 6.5), layout="constrained")
    intensities = [2.0**power for power in range(-1, 15)]
    for num_threads, colour in zip(THREADS, COLOURS, strict=True):
        ending = with_threads("", num_threads)
        label = f"{num_threads} thread{'s' * (num_threads > 1)}"
        machine = by_name.get(f"machine{ending}")
        if machine and machine.medians:
            medians = machine.medians  # µs a megabyte read, and a million operations
            gb_s = 1000 / medians[READ]
            for series, style in ((GEMM, "-"), (F32_GEMM, ":")):
                gflop_s = 1000 / medians[series]
                if series == GEMM and medians[GEMM] > medians[F32_GEMM]:
                    continue  # this machine multiplies no bfloat16, and its ceiling is float32's
                roof = [min(gb_s * x, gflop_s) for x in intensities]
                text = f"{label}: {gb_s:.3g} GB/s, {series} {gflop_s:.3g} GFLOP/s"
                axes.plot(intensities, roof, style, color=colour, label=text, linewidth=1)
        for outcome in by_name.values():
            ours, row = outcome.medians.get("pagedkv"), outcome.row
            if ours is None or not row.num_operations or not row.num_bytes or not row.name.endswith(ending):
                continue
            x, y = row.num_operations / row.num_bytes, row.num_operations / ours / 1000
            axes.plot(x, y, "o", color=colour)
            name = row.name.removesuffix(ending)
            axes.annotate(name, (x, y), (5, -9), textcoords="offset points", fontsize=8, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("operations a byte of K and V that must be read")
    axes.set_ylabel("GFLOP/s")
    axes.set_title("Attention over pages below what this machine gives (medians of one run)")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
