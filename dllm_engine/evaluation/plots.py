"""Plots of accuracy: against its cost, and by the length of the prompt and the depth of a needle in it."""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_engine.evaluation.comparison import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKS = "os^DvPX*<>"
"""Marks of the unmasking rules; cache methods have matplotlib's colours."""
COSTS = {
    "tokens_per_second": "response tokens per second",
    "tokens_per_pass": "response tokens per forward pass",
    "memory_mib": "memory at the peak (MiB)",
}
"""Costs, and the label of each one's axis."""


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


def draw_tradeoff(rows: Sequence[Mapping[str, Any]], path: Path, costs: Sequence[str] = tuple(COSTS)) -> None:
    """A row of panels per task and a column per cost, a colour per cache method, a mark per unmasking rule; a ring
    around what was chosen.

    A row has the values of a comparison's; None is not drawn.
    """
    panels, methods, rules = (
        list(dict.fromkeys(values)) for values in zip(*map(_panel_method_and_rule, rows), strict=True)
    )
    figure = _figure(4.2 * len(costs) + 2.6, 3.8 * len(panels) + 0.4)
    grid = figure.subplots(len(panels), len(costs), squeeze=False)
    for line, panel in zip(grid, panels, strict=True):
        for axes, cost in zip(line, costs, strict=True):
            axes.set(xlabel=COSTS[cost], xlim=(0, None))
            axes.grid(alpha=0.3)
        line[0].set_ylabel(f"{panel} (%)")
    for row in rows:
        panel, method, rule = _panel_method_and_rule(row)
        look = {"color": f"C{methods.index(method)}", "marker": MARKS[rules.index(rule) % len(MARKS)]}
        error = None if row["stderr"] is None else 100 * row["stderr"]
        for axes, cost in zip(grid[panels.index(panel)], costs, strict=True):
            if row[cost] is not None:
                axes.errorbar(row[cost], 100 * row["score"], error, linestyle="none", **look)
                if row.get("is_chosen"):
                    axes.plot(row[cost], 100 * row["score"], "ko", markersize=14, fillstyle="none")
    for index, method in enumerate(methods):
        axes.plot([], [], "s", color=f"C{index}", label=method)
    for index, rule in enumerate(rules if len(rules) > 1 else ()):
        axes.plot([], [], MARKS[index % len(MARKS)], color="gray", label=rule)
    figure.legend(frameon=False, loc="outside right upper")
    figure.savefig(path)


def _panel_method_and_rule(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return f"{row['task']}: {row['metric']}", row["method"], row["unmasking"]


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
