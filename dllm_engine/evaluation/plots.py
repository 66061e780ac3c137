"""Plots of accuracy against its cost."""

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from dllm_engine.evaluation.comparison import Row

MARKS = "os^DvPX*<>"
"""Marks of the unmasking rules; cache methods have matplotlib's colours."""
COSTS = {
    "tokens_per_second": "response tokens per second",
    "tokens_per_pass": "response tokens per forward pass",
    "memory_mib": "memory at the peak (MiB)",
}
"""Costs with their axis labels."""


def plot_beside(output: Path | None) -> Path | None:
    """Path of a PNG with the name of ``output``; None without an output, or with a
    warning if plots cannot be drawn.
    """
    if output is None:
        return None
    if find_spec("matplotlib") is None:
        print(
            "no plot is drawn: matplotlib is not installed; run pip install "
            "'.[eval]' in a checkout",
            file=sys.stderr,
        )
        return None
    return output.with_suffix(".png")


def draw_tradeoff(measured: Sequence[Row], path: Path | None) -> None:
    """Draw panels with a row per task and a column per cost. Colours show cache
    methods, marks show unmasking rules.
    """
    rows = [
        row.values | {"panel": f"{row.task}: {row.result.metric}"}
        for row in measured
        if row.cost.requests
    ]
    if path is None or not rows:
        return
    from matplotlib.figure import Figure

    panels, methods, rules = (
        [*dict.fromkeys(row[key] for row in rows)]
        for key in ("panel", "method", "unmasking")
    )
    figure = Figure(
        figsize=(4.2 * len(COSTS) + 2.6, 3.8 * len(panels) + 0.4),
        dpi=150,
        layout="constrained",
    )
    grid = figure.subplots(len(panels), len(COSTS), squeeze=False)
    for line, panel in zip(grid, panels, strict=True):
        for axes, label in zip(line, COSTS.values(), strict=True):
            axes.set(xlabel=label, xlim=(0, None))
            axes.grid(alpha=0.3)
        line[0].set_ylabel(f"{panel} (%)")
    for row in rows:
        mark = MARKS[rules.index(row["unmasking"]) % len(MARKS)]
        error = None if row["stderr"] is None else 100 * row["stderr"]
        for axes, cost in zip(grid[panels.index(row["panel"])], COSTS, strict=True):
            if row[cost] is not None:
                axes.errorbar(
                    row[cost],
                    100 * row["score"],
                    error,
                    fmt=mark,
                    color=f"C{methods.index(row['method'])}",
                )
    for index, method in enumerate(methods):
        axes.plot([], [], "s", color=f"C{index}", label=method)
    for index, rule in enumerate(rules if len(rules) > 1 else ()):
        axes.plot([], [], MARKS[index % len(MARKS)], color="gray", label=rule)
    figure.legend(frameon=False, loc="outside right upper")
    figure.savefig(path)
    print(f"wrote {path}")


def draw_reliability(measured: Sequence[Row], path: Path | None) -> None:
    """Draw the share of right values over their probability, for rows with both. The
    plot is saved beside ``path``.
    """
    rows = [row for row in measured if "reliability" in row.result.details]
    if path is None or not rows:
        return
    curves = {}
    for row in rows:
        error = row.result.details["calibration_error"]
        label = f"{row.method} {row.unmasking} (error {error:.3f})"
        curves[label] = row.result.details["reliability"]
    draw_curves(curves, path.with_name(f"{path.stem}.reliability.png"))


def draw_curves(
    curves: Mapping[str, Sequence[tuple[float, float, int]]], path: Path
) -> None:
    """Draw the share of right values over their probability, by label."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 4.4), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], "--", color="gray", label="calibrated")
    for label, bins in curves.items():
        means, shares, _ = zip(*bins, strict=True)
        axes.plot(means, shares, "o-", label=label)
    axes.set(
        xlabel="probability of the chosen value",
        ylabel="share of right values",
        xlim=(0, 1),
        ylim=(0, 1),
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)
    print(f"wrote {path}")
