"""A plot of accuracy against speed for cache methods and unmasking rules."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

INK, MUTED, LINE = "#1b2026", "#626b76", "#dfe2e6"
COLOURS = ("#0f7c8c", "#ee9b1f", "#7a55c7", "#c2415b", "#3c7dd9", "#5d8a2f", "#8b95a1", "#a5673f", "#1b2026", "#d97fb8")
"""Of the cache methods, in order of appearance."""
MARKS = "os^DvPX*<>"
"""Of the unmasking rules."""


class TradeoffPoint(NamedTuple):
    """One combination on one task, or on all of them."""

    task: str
    cache_method: str
    unmasking: str
    speed: float
    """Response tokens per second, or per forward pass."""
    accuracy: float
    """A fraction."""
    stderr: float | None = None
    is_chosen: bool = False


def check_plot(path: Path) -> None:
    """Raise ``ValueError`` if the plot could not be written; called before anything is measured."""
    if path.suffix != ".png":
        raise ValueError(f"{path}: the plot is a .png; give the file that ending")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(
            "a plot needs matplotlib, which is not installed; run pip install 'dllm-engine[eval]'"
        ) from error


def draw_tradeoff(points: Sequence[TradeoffPoint], path: Path, per: str = "second") -> None:
    """A panel per task, a colour per cache method, a mark per unmasking rule; a ring around what was chosen."""
    from matplotlib.figure import Figure

    tasks, methods, rules = (
        list(dict.fromkeys(getattr(p, name) for p in points)) for name in TradeoffPoint._fields[:3]
    )
    figure = Figure(figsize=(4.2 * len(tasks) + 2.6, 4.2), dpi=150, facecolor="white", layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for point in (point for point in points if point.task == task):
            axes.errorbar(
                point.speed,
                100 * point.accuracy,
                yerr=None if point.stderr is None else 100 * point.stderr,
                color=COLOURS[methods.index(point.cache_method) % len(COLOURS)],
                marker=MARKS[rules.index(point.unmasking) % len(MARKS)],
                markersize=7,
                elinewidth=0.9,
                linestyle="none",
            )
            if point.is_chosen:
                axes.plot(point.speed, 100 * point.accuracy, "o", markersize=14, fillstyle="none", color=INK)
        axes.set_title(task, size=10, color=INK)
        axes.set_xlabel(f"response tokens per {per}", color=INK, size=9)
        axes.set_xlim(left=0)
        axes.margins(y=0.15)
        axes.grid(color=LINE, linewidth=0.7)
        axes.tick_params(colors=MUTED, labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("accuracy (%)", color=INK, size=9)
    last = figure.axes[-1]
    for index, method in enumerate(methods):
        last.plot([], [], "s", color=COLOURS[index % len(COLOURS)], label=method)
    if len(rules) > 1:
        for index, rule in enumerate(rules):
            last.plot([], [], MARKS[index % len(MARKS)], color=MUTED, label=rule)
    figure.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="outside right upper")
    figure.savefig(path)
