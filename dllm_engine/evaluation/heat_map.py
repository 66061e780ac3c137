"""Accuracy by the length of the prompt and the depth of the needle in it, as MaskKV's Figure 7 (arXiv 2510.09309)."""

import csv
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from dllm_engine.evaluation.score import Score
from dllm_engine.evaluation.tradeoff_plot import INK, MUTED, new_figure

PANELS_PER_ROW = 3


class Cell(NamedTuple):
    """A square of the map; its name is that of a part of a task."""

    length: int
    """Of the prompt, in tokens."""
    depth: int
    """Percent of the prompt before the needle."""

    @property
    def name(self) -> str:
        return f"{self.length}@{self.depth}%"

    @classmethod
    def parse(cls, name: str) -> Self:
        """The cell of this name."""
        length, depth = name.removesuffix("%").split("@")
        return cls(int(length), int(depth))


def write_cells(scores: Sequence[Score], path: Path) -> None:
    """CSV with a line per score and cell."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("method", "unmasking", *Cell._fields, "score"))
        for score in scores:
            for name, accuracy in score.result.details.items():
                writer.writerow((score.method, score.unmasking, *Cell.parse(name), accuracy))


def draw_heat_map(scores: Sequence[Score], path: Path) -> None:
    """A panel per score, with a column per length and a row per depth."""
    cells = [Cell.parse(name) for name in scores[0].result.details]
    lengths, depths = (sorted(set(values)) for values in zip(*cells, strict=True))
    columns = min(len(scores), PANELS_PER_ROW)
    rows = -(-len(scores) // columns)
    figure = new_figure(3.6 * columns + 0.8, 3.0 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, score in zip(grid, scores, strict=False):
        found = {Cell.parse(name): 100 * accuracy for name, accuracy in score.result.details.items()}
        values = [[found[Cell(length, depth)] for length in lengths] for depth in depths]
        image = axes.imshow(values, cmap="YlGn", vmin=0, vmax=100, aspect="auto")
        for row, of_depth in enumerate(values):
            for column, value in enumerate(of_depth):
                ink = "white" if value > 70 else INK
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", size=8, color=ink)
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_yticks(range(len(depths)), [f"{depth}%" for depth in depths])
        axes.tick_params(colors=MUTED, labelsize=8, length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(textwrap.fill(f"{score.method} {score.unmasking}".replace("+", " +"), 40), color=INK, size=8)
    for axes in grid[len(scores) :]:
        axes.set_visible(False)
    figure.supxlabel("tokens of the prompt", color=INK, size=9)
    figure.supylabel("depth of the needle", color=INK, size=9)
    figure.colorbar(image, ax=grid[: len(scores)].tolist(), label="exact match (%)")
    figure.savefig(path)
