"""An inspection as one HTML file: inline SVG and CSS, light and dark, nothing loaded from elsewhere."""

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from dllm_engine.scheduler.request import Span
from dllm_engine.scheduler.step_plan import RefreshState
from dllm_engine.version import __version__

if TYPE_CHECKING:
    from dllm_engine.inspection.record import InspectedWindow, Inspection

_STYLE = Path(__file__).with_name("page.css")

_SIGNS = {"\n": "↵", "\t": "⇥", "\r": "␍"}


def draw_page(inspection: "Inspection") -> bytes:
    """The page, UTF-8."""
    parts = [_header(inspection), _retention(inspection), _prompt(inspection), _order(inspection), _cost(inspection)]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Cache inspection: {escape(inspection.model)}, {escape(inspection.settings)}</title>
<style>{_STYLE.read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
{"".join(parts)}
<footer>Positions count from 0, steps from 1. Drawn by dllm-engine {__version__}.</footer>
</main>
</body>
</html>
""".encode()


def _header(inspection: "Inspection") -> str:
    spans = inspection.block_spans
    sizes = _range([span.size for span in spans])
    denoised = sum(any(inspection.steps_of(span)) for span in spans)
    tiles = [
        (
            "canvas",
            f"{inspection.canvas_length:,}",
            f"{inspection.prompt_length} prompt + {inspection.gen_length} response",
        ),
        ("blocks denoised", f"{denoised} of {len(spans)}", f"of {sizes} tokens each"),
    ]
    windows = inspection.updated_windows
    if windows:
        retained = [max(map(len, window.retained)) for window in windows]
        outside = [inspection.outside(window) for window in windows]
        tiles += [
            ("retained per layer", _range(retained), f"of {_range(outside)} positions outside the block"),
            (
                "pages held, at most",
                f"{max(map(inspection.pages, windows)):,}",
                f"{inspection.num_layers} layers, {inspection.page_size} tokens per page",
            ),
        ]
    if inspection.num_shared:
        tiles.append(("found in shared pages", f"{inspection.num_shared:,}", "tokens that earlier requests computed"))
    passes = inspection.passes
    computed, uncached = sum(map(inspection.rows, passes)), inspection.canvas_length * len(passes)
    tiles += [
        ("forward passes", f"{len(passes):,}", f"for {sum(len(p.unmasked) for p in passes):,} tokens"),
        ("tokens computed", f"{computed:,}", f"{computed / uncached:.0%} of {uncached:,} without a cache"),
    ]
    shown = "".join(f"<div><dt>{name}</dt><dd>{value} <small>{note}</small></dd></div>" for name, value, note in tiles)
    title = "What the cache retained" if windows else "How the response was denoised"
    return f"""<header>
<h1>{title}</h1>
<p class="muted">{escape(inspection.model)} · {escape(inspection.settings)}</p>
</header>
<dl class="tiles">{shown}</dl>
"""


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _section(title: str, lead: str, legend: Iterable[tuple[str, str]], body: str) -> str:
    """``legend``: pairs of a CSS background and what it stands for."""
    items = "".join(
        f'<li><i class="{"ramp" if "gradient" in paint else "flat"}" style="background:{paint}"></i>{meaning}</li>'
        for paint, meaning in legend
    )
    shown = f'<ul class="legend">{items}</ul>' if items else ""
    return f'<section>\n<h2>{title}</h2>\n<p class="lead muted">{lead}</p>\n{shown}\n{body}\n</section>\n'


# What each layer retained


def _retention(inspection: "Inspection") -> str:
    title = "Retained positions, by layer"
    if not inspection.updated_windows:
        return _section(title, f"{inspection.without_retention.capitalize()}.", (), "")
    legend = [("var(--retained)", "retained in pages"), ("var(--block)", "the block itself, computed in every step")]
    if any(len(window.recomputed) > window.span.size for window in inspection.updated_windows):
        legend.append(("var(--again)", "computed in every step as well"))
    if any(inspection.evicts(window) for window in inspection.updated_windows):
        legend.append(("var(--evicted)", "evicted: neither computed nor read"))
    lead = (
        "One map per block, or for all that run together: a row per layer, a column per canvas position. The last row "
        "is the share of the layers that retained a position. The line separates prompt and response."
    )
    return _section(title, lead, legend, "\n".join(_heat_map(inspection, window) for window in inspection.windows))


def _heat_map(inspection: "Inspection", window: "InspectedWindow") -> str:
    first, last = window.passes[0].number, window.passes[-1].number
    name = _blocks_of(inspection, window)
    caption = f"<b>{name}</b><span>positions {window.span.start}–{window.span.stop - 1} · {_steps(first, last)}</span>"
    if not window.retained:
        note = f"Every step of {name} ({len(window.passes)} in all) came before its update: nothing was retained."
        return f'<figure><figcaption>{caption}</figcaption><p class="muted">{note}</p></figure>'
    outside = inspection.outside(window)
    sizes = [len(layer) for layer in window.retained]
    share = sum(sizes) / (outside * len(sizes))
    caption += (
        f'<span class="held">retained <b>{_range(sizes)}</b> of {outside} outside the block ({share:.0%}) · '
        f"{count_of(inspection.pages(window), 'page')}</span>"
    )
    layers, canvas = inspection.num_layers, inspection.canvas_length
    height = 18 if layers <= 8 else 11 if layers <= 16 else 7
    names = "".join(
        f'<b style="top:{(layer + 0.5) * height}px">{layer}</b>' for layer in range(0, layers, max(1, -(-12 // height)))
    )
    rows = "".join(
        f"<g><title>layer {layer}: {len(positions)} retained</title>"
        f'<path d="{_strokes(_runs(positions), layer)}" stroke="var(--retained)"/></g>'
        for layer, positions in enumerate(window.retained)
    )
    step = max(5, _spacing(canvas, 12))
    marks = [*range(0, canvas - step // 2, step), canvas]  # one close to the last would run into it
    label = f"{name}: positions that each of {layers} layers retained"
    return f"""<figure><figcaption>{caption}</figcaption>
<div class="scroll"><div class="heat" style="min-width:{canvas * 0.75:.0f}px">
<div class="names"><b style="bottom:-4px">layer</b></div><div class="parts"><span style="width:{
        _percent(inspection.prompt_length, canvas)
    }">prompt · {inspection.prompt_length}</span><span style="width:{
        _percent(canvas - inspection.prompt_length, canvas)
    }">response · {inspection.gen_length}</span></div>
<div class="names">{names}</div>{_strip(inspection, window, layers, layers * height, rows, label)}
<div class="names share"><b style="top:7px">share</b></div><div class="share">{
        _strip(inspection, window, 1, 14, _share_row(inspection, window), "share of the layers")
    }</div>
<div></div><div class="ticks">{_ticks(marks, canvas)}</div>
</div></div></figure>"""


def _blocks_of(inspection: "Inspection", window: "InspectedWindow") -> str:
    """Of which blocks a window is: ``Block 1``, ``Blocks 2–4``."""
    spans = inspection.block_spans
    numbers = [n for n, span in enumerate(spans, 1) if window.span.start <= span.start < window.span.stop]
    return f"Block {numbers[0]}" if len(numbers) == 1 else f"Blocks {numbers[0]}–{numbers[-1]}"


def _strip(inspection: "Inspection", window: "InspectedWindow", rows: int, height: int, cells: str, label: str) -> str:
    """A map ``rows`` high, stretched to its place: background, what is computed, cells, borders of the blocks."""
    canvas, middle, seen = inspection.canvas_length, rows / 2, inspection.seen(window)
    spans = inspection.block_spans
    borders = "".join(f"M{span.start} 0v{rows}" for span in spans[1:])
    between_rows = "".join(f"M0 {row}h{canvas}" for row in range(1, rows))
    return f"""<svg viewBox="0 0 {canvas} {rows}" height="{height}" preserveAspectRatio="none" role="img" aria-label="{
        label
    }" shape-rendering="crispEdges"><g stroke-width="{rows}"><path d="M0 {middle}h{seen}" stroke="var(--evicted)"/>
<path d="{_strokes(_runs(window.recomputed), middle - 0.5)}" stroke="var(--again)"/>
<path d="{_strokes([window.span], middle - 0.5)}" stroke="var(--block)"/></g>
{cells}
<path d="{between_rows}{borders}" stroke="var(--card)" vector-effect="non-scaling-stroke"/>
<path d="M{inspection.prompt_length} 0v{
        rows
    }" stroke="var(--edge)" stroke-width="2" vector-effect="non-scaling-stroke"/></svg>"""


def _share_row(inspection: "Inspection", window: "InspectedWindow") -> str:
    """One path per share that occurs."""
    shares = window.share_of_layers(range(inspection.canvas_length))
    return "".join(
        f'<path d="{_strokes(_runs([p for p, s in enumerate(shares) if s == share]), 0)}" stroke="var(--retained)" '
        f'stroke-opacity="{share:.3f}"/>'
        for share in sorted(set(shares) - {0.0})
    )


def _runs(positions: list[int]) -> Iterator[Span]:
    """The positions, ascending, as spans without gaps."""
    first = 0
    for i, position in enumerate(positions):
        if i + 1 == len(positions) or positions[i + 1] != position + 1:
            yield Span(positions[first], position + 1)
            first = i + 1


def _strokes(spans: Iterable[Span], row: float) -> str:
    """A path that is one unit high and covers the spans."""
    return "".join(f"M{span.start} {row + 0.5:g}h{span.size}" for span in spans)


def _ticks(marks: Iterable[int], length: int, shift: float = 0.0) -> str:
    return "".join(f'<b style="left:{_percent(mark - shift, length)}">{mark}</b>' for mark in marks)


def _spacing(length: int, most: int) -> int:
    """A round number of which at most so many fit into a length."""
    return next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10**9) if length / step <= most)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3f}%"


# The text


def _prompt(inspection: "Inspection") -> str:
    title = "How many layers retained each prompt token"
    shares = inspection.prompt_share
    if not shares:
        return ""
    layers = inspection.num_layers
    body = "".join(
        f'<span style="--s:{share:.3g}" title="position {position}: retained by {share * layers:.3g} of {layers} '
        f'layers">{_inline(piece)}</span>'
        for position, (piece, share) in enumerate(zip(inspection.prompt_pieces, shares, strict=True))
    )
    lead = (
        f"The prompt as the model sees it. A token is shaded by the share of the {layers} layers that retained it, "
        f"averaged over {count_of(len(inspection.updated_windows), 'block')}; the mean is "
        f"{sum(shares) / len(shares):.0%}."
    )
    legend = [("linear-gradient(90deg, var(--card), var(--cool))", "no layer … every layer")]
    return _section(title, lead, legend, f'<div class="text">{body}</div>')


def _inline(piece: str) -> str:
    """A piece of running text: signs for what cannot be seen, and the line breaks themselves."""
    shown = []
    for character in piece:
        sign = _SIGNS.get(character)
        shown.append(escape(character) if sign is None else f'<span class="sign">{sign}</span>')
        if character == "\n":
            shown.append("\n")
    return "".join(shown)


def _order(inspection: "Inspection") -> str:
    rows, left = [], 0
    for number, span in enumerate(inspection.block_spans, start=1):
        steps = inspection.steps_of(span)
        taken = [step for step in steps if step is not None]
        left += len(steps) - len(taken)
        if not taken:
            continue
        first, last = min(taken), max(taken)
        tokens = []
        for position, step in zip(range(*span), steps, strict=True):
            offset = position - inspection.prompt_length
            shade = 0 if step is None else (step - first + 1) / (last - first + 1)
            known = step is not None and offset < len(inspection.response_pieces)
            kind, piece = ("part", inspection.response_pieces[offset]) if known else ("cut", "·")
            title = f"position {position}: {'not unmasked' if step is None else f'unmasked in step {step}'}"
            tokens.append(
                f'<span class="{kind}" style="--s:{shade:.3g}" title="{title}">{_boxed(piece)}'
                f"<small>{'–' if step is None else step}</small></span>"
            )
        rows.append(f"<p><b>Block {number}</b> <span>{_steps(first, last)}</span></p>")
        rows.append(f'<div class="tokens">{"".join(tokens)}</div>')
    lead = (
        "The response, block by block. The number under a token is the step that unmasked it; the stronger "
        "its colour, the later in its block."
    )
    if len(inspection.response_pieces) < inspection.canvas_length - inspection.prompt_length - left:
        lead += " Dashed: after the end of the answer, not part of it."
    if left:
        lead += f" The response ended early: {count_of(left, 'position')} stayed masked."
    legend = [("linear-gradient(90deg, var(--card), var(--warm))", "first step of the block … last step")]
    return _section("Order of denoising", lead, legend, f'<div class="order">{"".join(rows)}</div>')


def _boxed(piece: str) -> str:
    """A token standing alone: its spaces as dots, an empty one as a dash."""
    return "".join("␣" if character == " " else escape(_SIGNS.get(character, character)) for character in piece) or "–"


# What it cost


def _cost(inspection: "Inspection") -> str:
    passes, canvas = inspection.passes, inspection.canvas_length
    names = {
        RefreshState.FULL: "FULL: the whole canvas, cache untouched",
        RefreshState.UPDATE: "UPDATE: what is due, and retains",
        RefreshState.REUSE: "REUSE: active rows only, the rest from pages",
    }
    used = [state for state in names if any(step.state is state for step in passes)]
    bars = "".join(
        f"<g><title>step {step.number}, {step.state.value.upper()}: {inspection.rows(step)} tokens computed, "
        f"{len(step.unmasked)} unmasked</title>"
        f'<path d="M{step.number - 0.5} {canvas}v-{inspection.rows(step)}" stroke="var(--{step.state.value})"/></g>'
        for step in passes
    )
    every = _spacing(len(passes), 16)
    steps = [number for number in range(1, len(passes) + 1) if number == 1 or number % every == 0]
    starts = "".join(f"M{window.passes[0].number - 1} 0v{canvas}" for window in inspection.windows[1:])
    body = f"""<div class="bars"><svg viewBox="0 0 {len(passes)} {canvas}" preserveAspectRatio="none" role="img"
 aria-label="tokens computed per step">
<g stroke-width=".8">{bars}</g>
<path d="{starts}" stroke="var(--muted)" stroke-dasharray="3 3" vector-effect="non-scaling-stroke"/></svg>
<div class="ticks">{_ticks(steps, len(passes), shift=0.5)}</div></div>"""
    lead = (
        f"The tokens each forward pass fed to the model; a full bar is the canvas of {canvas}. A dashed line: a block "
        f"joined."
    )
    return _section("Tokens computed per step", lead, [(f"var(--{s.value})", names[s]) for s in used], body)


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first}–{last}"


def count_of(number: int, noun: str, plural: str = "s") -> str:
    """``1 page``, ``2 pages``; ``plural`` is the noun's ending."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"
