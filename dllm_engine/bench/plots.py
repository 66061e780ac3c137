"""Results as pictures, drawn with matplotlib: a file per model, a row of panels per prompt length and unmasking."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dllm_engine.bench.report import MIB, Report, machine_line, run_line
from dllm_engine.evaluation.tradeoff_plot import INK, LINE, MUTED, new_figure

SHADES = ("#9ad3da", "#4fb9c8", "#0f7c8c", "#0a4f5a")
"""Of batches, from small to large."""
WHOLE, REUSE = "#8b95a1", "#ee9b1f"
WEIGHTS, PAGES, WORKING = "#8b95a1", "#0f7c8c", "#f0c27a"
BAR = 0.8
"""Of the room that a cell has."""


class Bars(NamedTuple):
    """One panel: a value per cell, or several on top of each other."""

    title: str
    parts: Sequence[tuple[str, str, Callable[[dict[str, Any]], float | None]]]
    """(label, colour, value) of each; without a colour it has the batch's shade."""
    stacked: bool = False
    best: float | None = None
    """Where a line marks the best there can be."""


PANELS = (
    Bars("visible tokens/s", [("", "", lambda cell: cell["tokens_per_second"])]),
    Bars(
        "step time over its floor",
        [
            ("whole canvas", WHOLE, lambda cell: cell["whole"] and cell["whole"]["time_over_floor"]),
            ("reuse", REUSE, lambda cell: cell["reuse"] and cell["reuse"]["time_over_floor"]),
        ],
        best=1.0,
    ),
    Bars(
        "memory at the peak, MiB",
        [
            ("weights", WEIGHTS, lambda cell: cell["weight_bytes"] / MIB),
            ("pages", PAGES, lambda cell: cell["page_bytes"] / MIB),
            ("working", WORKING, lambda cell: cell["working_bytes"] / MIB),
        ],
        stacked=True,
    ),
)


def draw(report: Report, folder: Path) -> list[Path]:
    """Write ``bench-<model>.png`` for each model of a report; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for run in report["runs"]:
        file = folder / f"bench-{run['model'].strip('/').replace('/', '-')}.png"
        _figure(report, run).savefig(file)
        files.append(file)
    return files


def _figure(report: Report, run: dict[str, Any]) -> Figure:
    rows = list(dict.fromkeys((cell["prompt"], cell["unmasking"]) for cell in run["cells"]))
    methods = list(dict.fromkeys(cell["method"] for cell in run["cells"]))
    batches = sorted({cell["batch"] for cell in run["cells"]})
    most = max(sum((cell["prompt"], cell["unmasking"]) == row for cell in run["cells"]) for row in rows)
    figure = new_figure(3.8 * len(PANELS), len(rows) * (0.7 + 0.19 * most) + 1.3)
    figure.suptitle(f"{run_line(run)}\n{machine_line(report)}", size=8, color=MUTED, wrap=True)
    grid = figure.subplots(len(rows), len(PANELS), squeeze=False, sharey="row")
    for (prompt, unmasking), row in zip(rows, grid, strict=True):
        cells = [cell for cell in run["cells"] if (cell["prompt"], cell["unmasking"]) == (prompt, unmasking)]
        cells.sort(key=lambda cell: (methods.index(cell["method"]), cell["batch"]))
        for bars, axes in zip(PANELS, row, strict=True):
            _bars(axes, bars, cells, batches)
        row[0].set_yticks(range(len(cells)), [f"{cell['method']}, batch {cell['batch']}" for cell in cells])
        row[0].set_ylim(len(cells) - 0.5, -0.5)
        row[0].set_ylabel(f"prompt {prompt}, {unmasking}", color=INK, size=9)
    for bars, axes in zip(PANELS, grid[0], strict=True):
        handles, labels = axes.get_legend_handles_labels()
        axes.set_title(bars.title, size=10, color=INK, pad=20 if labels else 6)
        if labels:
            place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": len(labels)}
            axes.legend(handles, labels, frameon=False, fontsize=7, labelcolor=INK, borderpad=0.2, **place)
    return figure


def _bars(axes: Axes, bars: Bars, cells: list[dict[str, Any]], batches: list[int]) -> None:
    slots = 1 if bars.stacked else len(bars.parts)
    labelled: set[str] = set()
    for row, cell in enumerate(cells):
        shade = SHADES[batches.index(cell["batch"]) * len(SHADES) // len(batches)]
        left = 0.0
        for slot, (label, colour, value_of) in enumerate(bars.parts):
            value = value_of(cell)
            if value is None:
                continue
            middle = row if bars.stacked else row + BAR * ((slot + 0.5) / slots - 0.5)
            new = label if label and label not in labelled else None
            axes.barh(middle, value, left=left, height=BAR / slots, color=colour or shade, label=new)
            labelled.add(label)
            if bars.stacked:
                left += value
            else:
                text = f" {value:,.0f}" if value >= 100 else f" {value:.3g}"
                axes.annotate(text, (value, middle), size=5.5, color=MUTED, va="center")
    if bars.best is not None:
        axes.axvline(bars.best, color=INK, linewidth=0.8, linestyle=":")
    axes.margins(x=0.12)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=7.5, labelcolor=MUTED)
    axes.grid(axis="x", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
