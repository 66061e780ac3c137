"""Inspections as a PNG, drawn with matplotlib; the same parts as the HTML page, for reports and terminals."""

import textwrap
import warnings
from collections.abc import Iterable, Iterator
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from dllm_engine.inspection.record import count_of
from dllm_engine.scheduler.step_plan import RefreshState

if TYPE_CHECKING:
    from dllm_engine.inspection.record import InspectedBlock, Inspection

WIDTH, MARGIN, DPI = 12.0, 0.5, 150
"""Inches, inches, pixels per inch."""
INK, MUTED, LINE = "#1b2026", "#626b76", "#dfe2e6"
EVICTED, AGAIN, BLOCK, RETAINED = "#e6e9ec", "#f8d9a3", "#ee9b1f", "#0f7c8c"
COOL, WARM = "#4fb9c8", "#a98cf0"
STATES = {RefreshState.FULL: "#8b95a1", RefreshState.UPDATE: RETAINED, RefreshState.REUSE: BLOCK}
CELLS = ListedColormap([EVICTED, AGAIN, BLOCK, RETAINED])
_FONT = "DejaVu Sans Mono"
_FONT_SIZE = 8.5
_CHARACTER = 0.602 * _FONT_SIZE / 72
"""Width of a character of that font, in inches."""


class Shaded(NamedTuple):
    """A token to write: its text, its shade from 0 to 1, and what stands below it."""

    text: str
    shade: float
    below: str = ""


class Sheet:
    """A figure filled from top to bottom; lengths in inches."""

    def __init__(self, height: float) -> None:
        self.figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
        self.height = height
        self.top = MARGIN

    def text(self, text: str, size: float, color: str = INK, *, bold: bool = False) -> None:
        self.figure.text(
            MARGIN / WIDTH,
            1 - self.top / self.height,
            text,
            size=size,
            color=color,
            va="top",
            weight="bold" if bold else "normal",
            parse_math=False,
        )
        self.top += size / 72 * 1.55

    def axes(self, height: float, *, left: float = 0.0) -> Axes:
        """Axes over the width of the sheet, ``left`` inches in."""
        x = MARGIN + left
        bottom = 1 - (self.top + height) / self.height
        axes = self.figure.add_axes((x / WIDTH, bottom, (WIDTH - MARGIN - x) / WIDTH, height / self.height))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=7.5, labelcolor=MUTED, pad=3)
        self.top += height
        return axes


def draw_figure(inspection: "Inspection") -> bytes:
    """The PNG."""
    with warnings.catch_warnings():
        # Characters that the font lacks become boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        # Drawn once to learn the height, then on a sheet of that height.
        height = _draw(inspection, Sheet(100.0)).top + MARGIN
        sheet = _draw(inspection, Sheet(height))
        buffer = BytesIO()
        sheet.figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw(inspection: "Inspection", sheet: Sheet) -> Sheet:
    blocks = inspection.updated_blocks
    sheet.text("What the cache retained" if blocks else "How the response was denoised", 17, bold=True)
    sheet.text(f"{inspection.model} · canvas {inspection.canvas_length}", 10, MUTED)
    for line in inspection.summary:
        for part in textwrap.wrap(line, 120):
            sheet.text(part, 10)
    if blocks:
        _section(sheet, "Retained positions, by layer", _cell_legend(inspection))
        for index, block in enumerate(inspection.blocks):
            if block.retained:
                _heat_map(sheet, inspection, index, block)
        layers = inspection.num_layers
        _section(sheet, "How many layers retained each prompt token", _ramp(COOL, "no layer", f"all {layers} layers"))
        prompt = zip(inspection.prompt_pieces, inspection.prompt_share, strict=True)
        _tokens(sheet, (Shaded(piece.replace("\n", "↵"), share) for piece, share in prompt), COOL)
    _section(sheet, "Order of denoising", _ramp(WARM, "first step of the block", "last step"))
    for index, block in enumerate(inspection.blocks):
        first, last = block.passes[0].number, block.passes[-1].number
        sheet.text(f"Block {index + 1} · steps {first}–{last}", 9, MUTED)
        _tokens(sheet, _response_tokens(inspection, block), WARM)
    left = len(inspection.block_spans) - len(inspection.blocks)
    if left:
        sheet.text(f"The response ended early: {count_of(left, 'more block')} stayed masked.", 9, MUTED)
    _section(
        sheet,
        "Tokens computed per step",
        [Patch(color=color, label=state.value.upper()) for state, color in STATES.items()],
    )
    _bars(sheet, inspection)
    return sheet


def _section(sheet: Sheet, title: str, legend: list[Patch]) -> None:
    sheet.top += 0.25
    sheet.text(title, 13, bold=True)
    axes = sheet.axes(0.3)
    axes.axis("off")
    axes.legend(
        handles=legend, loc="center left", bbox_to_anchor=(-0.005, 0.5), ncols=len(legend), frameon=False, fontsize=8.5
    )
    sheet.top += 0.05


def _cell_legend(inspection: "Inspection") -> list[Patch]:
    blocks = inspection.updated_blocks
    legend = [Patch(color=RETAINED, label="retained in pages"), Patch(color=BLOCK, label="the block itself")]
    if any(len(block.recomputed) > block.span.size for block in blocks):
        legend.append(Patch(color=AGAIN, label="computed in every step as well"))
    if any(map(inspection.evicts, blocks)):
        legend.append(Patch(color=EVICTED, label="evicted"))
    return legend


def _ramp(color: str, least: str, most: str) -> list[Patch]:
    shades = ((0.0, least), (0.5, "…"), (1.0, most))
    return [Patch(facecolor=_mix(color, shade), edgecolor=LINE, label=label) for shade, label in shades]


def _heat_map(sheet: Sheet, inspection: "Inspection", index: int, block: "InspectedBlock") -> None:
    layers, canvas = inspection.num_layers, inspection.canvas_length
    cells = np.zeros((layers, canvas), dtype=int)
    cells[:, block.recomputed] = 1
    cells[:, slice(*block.span)] = 2
    for layer, positions in enumerate(block.retained):
        cells[layer, positions] = 3
    sizes = {len(layer) for layer in block.retained}
    retained = "–".join(map(str, sorted({min(sizes), max(sizes)})))
    first, last = block.passes[0].number, block.passes[-1].number
    sheet.top += 0.12
    sheet.text(
        f"Block {index + 1} · positions {block.span.start}–{block.span.stop - 1} · steps {first}–{last} · retained "
        f"{retained} of {inspection.outside(block)} outside the block · {count_of(inspection.pages(block), 'page')}",
        9,
    )
    sheet.top += 0.16
    axes = sheet.axes(layers * (0.17 if layers <= 8 else 0.11 if layers <= 16 else 0.07), left=0.35)
    axes.imshow(cells, cmap=CELLS, vmin=0, vmax=3, aspect="auto", interpolation="nearest")
    axes.hlines(np.arange(1, layers) - 0.5, -0.5, canvas - 0.5, color="white", linewidth=0.8)
    axes.vlines([span.start - 0.5 for span in inspection.block_spans], -0.5, layers - 0.5, color="white", linewidth=0.8)
    axes.axvline(inspection.prompt_length - 0.5, color=INK, linewidth=1.6)
    for start, name in ((0, f"prompt · {inspection.prompt_length}"), (inspection.prompt_length, "response")):
        axes.annotate(
            name, (start - 0.5, -0.5), (1, 2), textcoords="offset points", size=7, color=MUTED, annotation_clip=False
        )
    axes.set_yticks(range(0, layers, 1 if layers <= 16 else 4))
    axes.set_ylabel("layer", color=MUTED, fontsize=7.5)
    sheet.top += 0.28


def _response_tokens(inspection: "Inspection", block: "InspectedBlock") -> Iterator[Shaded]:
    first, last = block.passes[0].number, block.passes[-1].number
    unmasked_at = inspection.unmasked_at
    for position in range(*block.span):
        offset = position - inspection.prompt_length
        step = unmasked_at[offset]
        assert step is not None
        known = offset < len(inspection.response_pieces)
        piece = inspection.response_pieces[offset].replace(" ", "␣").replace("\n", "↵") if known else "·"
        yield Shaded(piece or "–", (step - first + 1) / (last - first + 1), str(step))


def _tokens(sheet: Sheet, tokens: Iterable[Shaded], color: str) -> None:
    """Write tokens in lines; those with something below them apart from each other."""
    widest = (WIDTH - 2 * MARGIN) / _CHARACTER
    placed: list[tuple[float, int, float, Shaded]] = []
    column, line = 0.0, 0
    apart = False
    for token in tokens:
        apart = bool(token.below)
        length = max(len(token.text), len(token.below)) + (1.0 if apart else 0.0)
        if column and column + length > widest:
            column, line = 0.0, line + 1
        placed.append((column, line, length, token))
        column += length + (0.7 if apart else 0.0)
        if token.text.endswith("↵") and not apart:
            column, line = 0.0, line + 1
    num_lines = line + (1 if column else 0)
    height, gap = (0.36, 0.06) if apart else (0.21, 0.02)
    axes = sheet.axes(num_lines * height)
    axes.set(xlim=(0, widest), ylim=(num_lines * height, 0), xticks=[], yticks=[])
    style: dict[str, Any] = {"ha": "center", "va": "center", "color": INK, "parse_math": False, "clip_on": True}
    for x, row, length, token in placed:
        top, middle = row * height, x + length / 2
        edge = LINE if apart else "white"
        box = Rectangle(
            (x, top), length, height - gap, facecolor=_mix(color, token.shade), edgecolor=edge, linewidth=0.6
        )
        axes.add_patch(box)
        axes.text(middle, top + 0.1, token.text, size=_FONT_SIZE, family=_FONT, **style)
        axes.text(middle, top + 0.23, token.below, size=6.5, **style)
    sheet.top += 0.1


def _bars(sheet: Sheet, inspection: "Inspection") -> None:
    passes = inspection.passes
    axes = sheet.axes(1.1, left=0.35)
    axes.bar(
        [step.number for step in passes],
        [inspection.rows(step) for step in passes],
        color=[STATES[step.state] for step in passes],
        width=0.8,
    )
    axes.set(xlim=(0.5, len(passes) + 0.5), ylim=(0, inspection.canvas_length))
    axes.set_yticks([0, inspection.canvas_length])
    axes.locator_params(axis="x", integer=True)
    sheet.top += 0.25


def _mix(color: str, share: float) -> tuple[float, float, float]:
    """``share`` of the colour on white."""
    red, green, blue = (1 - share + share * part for part in to_rgb(color))
    return red, green, blue
