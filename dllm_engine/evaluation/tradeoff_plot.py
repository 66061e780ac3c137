"""A plot of accuracy against what it costs, for cache methods and unmasking rules."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, LINE = "#1b2026", "#626b76", "#dfe2e6"
COLOURS = (
    *("#0f7c8c", "#ee9b1f", "#7a55c7", "#c2415b", "#3c7dd9", "#5d8a2f"),
    *("#8b95a1", "#a5673f", "#1b2026", "#d97fb8", "#2fb37a", "#b7a01c"),
)
"""Of the cache methods, in order of appearance."""
MARKS = "os^DvPX*<>"
"""Of the unmasking rules."""
NEEDS_MATPLOTLIB = "a plot needs matplotlib, which is not installed; run pip install 'dllm-engine[eval]'"


class TradeoffPoint(NamedTuple):
    """One combination on one task, or on all of them."""

    task: str
    cache_method: str
    unmasking: str
    costs: dict[str, float | None]
    """What it costs, by the name of an axis; None is not drawn."""
    accuracy: float
    """A fraction."""
    stderr: float | None = None
    is_chosen: bool = False


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot_beside(output: Path) -> Path | None:
    """Where the plot of a result file goes; None, with a word why, where none can be drawn."""
    if can_plot():
        return output.with_suffix(".png")
    print(f"no plot will be drawn: {NEEDS_MATPLOTLIB}", file=sys.stderr)
    return None


def new_figure(width: float, height: float) -> "Figure":
    """An empty one of this size, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")


def draw_tradeoff(points: Sequence[TradeoffPoint], path: Path) -> None:
    """A row of panels per task and a column per cost, a colour per cache method, a mark per unmasking rule; a ring
    around what was chosen."""
    tasks, methods, rules = (
        list(dict.fromkeys(getattr(p, name) for p in points)) for name in TradeoffPoint._fields[:3]
    )
    names = list(points[0].costs)
    figure = new_figure(4.2 * len(names) + 2.6, 3.8 * len(tasks) + 0.4)
    grid = figure.subplots(len(tasks), len(names), squeeze=False)
    for task, row in zip(tasks, grid, strict=True):
        for axes, name in zip(row, names, strict=True):
            for point in points:
                if point.task != task or (cost := point.costs[name]) is None:
                    continue
                axes.errorbar(
                    cost,
                    100 * point.accuracy,
                    yerr=None if point.stderr is None else 100 * point.stderr,
                    color=COLOURS[methods.index(point.cache_method) % len(COLOURS)],
                    marker=MARKS[rules.index(point.unmasking) % len(MARKS)],
                    markersize=7,
                    elinewidth=0.9,
                    linestyle="none",
                )
                if point.is_chosen:
                    axes.plot(cost, 100 * point.accuracy, "o", markersize=14, fillstyle="none", color=INK)
            axes.set_xlabel(name, color=INK, size=9)
            axes.set_xlim(left=0)
            axes.margins(y=0.15)
            axes.grid(color=LINE, linewidth=0.7)
            axes.tick_params(colors=MUTED, labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(f"{task} (%)", color=INK, size=9)
    last = figure.axes[-1]
    for index, method in enumerate(methods):
        last.plot([], [], "s", color=COLOURS[index % len(COLOURS)], label=method)
    if len(rules) > 1:
        for index, rule in enumerate(rules):
            last.plot([], [], MARKS[index % len(MARKS)], color=MUTED, label=rule)
    figure.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="outside right upper")
    figure.savefig(path)
