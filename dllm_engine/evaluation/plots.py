"""Plots of accuracy: against its cost, and by the length of the prompt and the depth of a needle in it."""

import sys
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dllm_engine.evaluation.comparison import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKS = "os^DvPX*<>"
"""Marks of the unmasking rules; cache methods have matplotlib's colours."""
COSTS = {
    "response tokens per second": "tokens_per_second",
    "response tokens per forward pass": "tokens_per_pass",
    "memory at the peak (MiB)": "memory_mib",
}
"""Axes, and the figure of each."""


class TradeoffPoint(NamedTuple):
    """One combination on one task."""

    task: str
    cache_method: str
    unmasking: str
    costs: dict[str, float | None]
    """By the name of an axis; None is not drawn."""
    accuracy: float
    """A fraction."""
    stderr: float | None = None
    is_chosen: bool = False


def plot_beside(output: Path) -> Path | None:
    """A PNG of the same name as ``output``; None, with a warning, where it cannot be drawn."""
    if find_spec("matplotlib") is None:
        print(
            "no plot will be drawn: a plot needs matplotlib, which is not installed; run pip install "
            "'dllm-engine[eval]'",
            file=sys.stderr,
        )
        return None
    return output.with_suffix(".png")


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def draw_rows(rows: Sequence[Row], path: Path) -> None:
    """The rows of a comparison that asked for responses, against each of ``COSTS``."""
    points = []
    for row in rows:
        if row.result is not None and row.answers.cost.requests:
            costs = {axis: row.answers.cost.figures[name] for axis, name in COSTS.items()}
            task, result = f"{row.task}: {row.result.metric}", row.result
            points.append(TradeoffPoint(task, row.method, row.unmasking, costs, result.score, result.stderr))
    if points:
        draw_tradeoff(points, path)


def draw_tradeoff(points: Sequence[TradeoffPoint], path: Path) -> None:
    """A row of panels per task and a column per cost, a colour per cache method, a mark per unmasking rule; a ring
    around the chosen points."""
    tasks, methods, rules = (
        list(dict.fromkeys(getattr(p, name) for p in points)) for name in TradeoffPoint._fields[:3]
    )
    names = list(points[0].costs)
    figure = _figure(4.2 * len(names) + 2.6, 3.8 * len(tasks) + 0.4)
    grid = figure.subplots(len(tasks), len(names), squeeze=False)
    for task, panels in zip(tasks, grid, strict=True):
        for axes, name in zip(panels, names, strict=True):
            for point in points:
                if point.task != task or (cost := point.costs[name]) is None:
                    continue
                error = None if point.stderr is None else 100 * point.stderr
                look = f"C{methods.index(point.cache_method)}", MARKS[rules.index(point.unmasking) % len(MARKS)]
                axes.errorbar(cost, 100 * point.accuracy, error, color=look[0], marker=look[1], linestyle="none")
                if point.is_chosen:
                    axes.plot(cost, 100 * point.accuracy, "ko", markersize=14, fillstyle="none")
            axes.set_xlabel(name)
            axes.set_xlim(left=0)
            axes.grid(alpha=0.3)
        panels[0].set_ylabel(f"{task} (%)")
    last = figure.axes[-1]
    for index, method in enumerate(methods):
        last.plot([], [], "s", color=f"C{index}", label=method)
    for index, rule in enumerate(rules if len(rules) > 1 else ()):
        last.plot([], [], MARKS[index % len(MARKS)], color="gray", label=rule)
    figure.legend(frameon=False, loc="outside right upper")
    figure.savefig(path)


def draw_heat_maps(rows: Sequence[Row], path: Path) -> None:
    """A panel per row: score by length of the prompt and depth of the needle, as MaskKV's Figure 7 (arXiv 2510.09309).

    The parts of the rows have names such as ``64@25%``.
    """
    figure = _figure(3.6 * len(rows) + 0.8, 3.0)
    for axes, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        assert row.result is not None
        cells = {tuple(name.split("@")): 100 * score for name, score in row.result.details.items()}
        lengths, depths = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
        values = [[cells[length, depth] for length in lengths] for depth in depths]
        image = axes.imshow(values, cmap="YlGn", vmin=0, vmax=100, aspect="auto")
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", color="white" if value > 70 else "black")
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_yticks(range(len(depths)), depths)
        axes.set_title(textwrap.fill(f"{row.method} {row.unmasking}".replace("+", " +"), 40), size=8)
    figure.supxlabel("tokens of the prompt")
    figure.supylabel("depth of the needle")
    figure.colorbar(image, ax=figure.axes, label="exact match (%)")
    figure.savefig(path)
