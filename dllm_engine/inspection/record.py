"""Inspections: what the cache of one request retained and in which order its response was unmasked.

``LLM.inspect`` and ``dllm inspect`` make them; ``page.py`` draws them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dllm_engine.evaluation.result_file import check_folder_of
from dllm_engine.figures import DiffusionFigures
from dllm_engine.inspection.page import count_of, draw_page
from dllm_engine.scheduler.page_layout import pages_for
from dllm_engine.scheduler.request import Span
from dllm_engine.scheduler.step_plan import RefreshState


@dataclass(frozen=True)
class ForwardPass:
    """One denoising step."""

    number: int
    """Over the whole response, from 1."""
    state: RefreshState
    computed: list[int] | None
    """Canvas positions fed to the model; None: all of them."""
    unmasked: list[int]
    """Canvas positions that got their token."""


@dataclass
class InspectedWindow:
    """The blocks that ran together, from the step in which the last of them joined. One block, unless a request runs
    several at once."""

    span: Span
    passes: list[ForwardPass]
    retained: list[list[int]] = field(default_factory=list)
    """Per layer, the canvas positions that it retained in the window's last UPDATE; empty without an UPDATE."""

    @cached_property
    def recomputed(self) -> list[int]:
        """Canvas positions that REUSE steps compute; the window is always among them."""
        rows = set(range(*self.span))
        for step in self.passes:
            if step.state is RefreshState.REUSE:
                rows.update(step.computed or ())
        return sorted(rows)

    def share_of_layers(self, positions: range) -> list[float]:
        """For each of the positions, the share of the layers that retained it."""
        counts = Counter(position for layer in self.retained for position in layer)
        return [counts[position] / max(len(self.retained), 1) for position in positions]


@dataclass(frozen=True)
class Inspection:
    """What happened to one request; positions are those of its canvas, steps count from 1."""

    model: str
    cache_method: str
    cache_options: dict[str, Any]
    page_size: int
    num_layers: int
    prompt_tokens: list[int]
    prompt_pieces: list[str]
    """The text of each prompt token."""
    response_tokens: list[int]
    """Up to and with the end token, if there was one."""
    response_pieces: list[str]
    gen_length: int
    block_spans: list[Span]
    """All blocks of the response, also those that an end token left masked."""
    windows: list[InspectedWindow]
    """In the order in which they ran."""
    by_blocks: bool = False
    """Whether a block attends to nothing behind it."""
    num_shared: int = 0
    """Prompt tokens whose pages earlier requests had filled."""

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_tokens)

    @property
    def canvas_length(self) -> int:
        """What is computed behind the response's end counts."""
        return max(self.prompt_length + self.gen_length, self.block_spans[-1].stop)

    @property
    def passes(self) -> list[ForwardPass]:
        return [step for window in self.windows for step in window.passes]

    @property
    def updated_windows(self) -> list[InspectedWindow]:
        """Those whose steps read pages."""
        return [window for window in self.windows if window.retained]

    @cached_property
    def _unmasked_at(self) -> dict[int, int]:
        return {position: step.number for step in self.passes for position in step.unmasked}

    def steps_of(self, span: Span) -> list[int | None]:
        """The step at which each position was unmasked; None where it is still masked."""
        return [self._unmasked_at.get(position) for position in range(*span)]

    @property
    def prompt_share(self) -> list[float]:
        """For each prompt token, the share of the layers that retained it, averaged over the windows with an UPDATE."""
        windows = [window.share_of_layers(range(self.prompt_length)) for window in self.updated_windows]
        return [sum(shares) / len(windows) for shares in zip(*windows, strict=True)] if windows else []

    def seen(self, window: InspectedWindow) -> int:
        """The canvas position before which all lies that a window attends to."""
        return window.span.stop if self.by_blocks else self.canvas_length

    def outside(self, window: InspectedWindow) -> int:
        """Positions outside a window: all that a layer could retain."""
        return self.seen(window) - window.span.size

    def evicts(self, window: InspectedWindow) -> bool:
        """Whether some layer neither retained nor recomputes some position."""
        return any(len(set(layer).union(window.recomputed)) < self.seen(window) for layer in window.retained)

    def pages(self, window: InspectedWindow) -> int:
        """Pages that hold what a window's layers retained."""
        return sum(pages_for(len(layer), self.page_size) for layer in window.retained)

    def rows(self, step: ForwardPass) -> int:
        """Tokens computed by a forward pass."""
        return self.canvas_length if step.computed is None else len(step.computed)

    @property
    def settings(self) -> str:
        """The cache method and its options in words."""
        options = ", ".join(f"{name}={value}" for name, value in self.cache_options.items())
        return f"{self.cache_method} ({options})" if options else self.cache_method

    @property
    def without_retention(self) -> str:
        """What to say if no window retained anything in particular."""
        if any(step.state is RefreshState.REUSE for step in self.passes):
            return "nothing was evicted, pages held every position of the canvas"
        return "nothing was retained, every step computed the whole canvas"

    @property
    def summary(self) -> tuple[str, str]:
        """One line on the cache, one on the computation."""
        computed, uncached = sum(map(self.rows, self.passes)), self.canvas_length * len(self.passes)
        cost = (
            f"{count_of(len(self.passes), 'forward pass', 'es')} computed {computed:,} tokens, "
            f"{computed / uncached:.0%} of the {uncached:,} that computing the whole canvas in each takes"
        )
        windows = self.updated_windows
        if not windows:
            return f"{self.settings}: {self.without_retention}", cost
        retained = sum(len(layer) for window in windows for layer in window.retained)
        offered = sum(self.outside(window) * len(window.retained) for window in windows)
        cache = (
            f"{self.settings}: a layer retained {retained / offered:.0%} of the positions outside the block; at most "
            f"{count_of(max(map(self.pages, windows)), 'page')} of {self.page_size} tokens over {self.num_layers} "
            f"layers"
        )
        found = f"; {count_of(self.num_shared, 'token')} found in shared pages" if self.num_shared else ""
        return cache + found, cost

    def save(self, path: str | Path) -> None:
        """Write the page that shows it; it needs nothing but a browser.

        Raises:
            ValueError: the file is not named ``.html``, or its folder does not exist.
            OSError: the file cannot be written.
        """
        check_page_path(Path(path))
        Path(path).write_bytes(draw_page(self))


def check_page_path(path: Path) -> None:
    """Raise ``ValueError`` where a page could not be written."""
    if path.suffix != ".html":
        raise ValueError(f"{path}: an inspection is an .html page; give the file that ending")
    check_folder_of(path)


def replay(figures: DiffusionFigures, shared: Sequence[list[int]] = ()) -> list[InspectedWindow]:
    """The traced forward passes of a request, by window. ``shared``: per layer, the canvas positions that it found in
    pages when the request began."""
    updates = iter(figures.retained_positions)
    found: list[InspectedWindow] = []
    columns = figures.refresh_states, figures.computed_positions, figures.unmasked_per_step, figures.windows
    for number, (state, computed, unmasked, window) in enumerate(zip(*columns, strict=True), start=1):
        if not found or found[-1].span != tuple(window):
            found.append(InspectedWindow(Span(*window), [], [] if found else [*shared]))
        found[-1].passes.append(ForwardPass(number, RefreshState(state), computed, unmasked))
        if found[-1].passes[-1].state is RefreshState.UPDATE:
            # Methods that keep every position, or choose once, record nothing for the other updates.
            found[-1].retained = next(updates, found[-1].retained)
    return found


def pieces_of(tokens: Sequence[int], decode: Callable[[list[int]], str] | None) -> list[str]:
    """The text of each token; without a tokenizer its id.

    Where several tokens make one character, the last of them gets it and the others the empty string.
    """
    if decode is None:
        return [f"{token} " for token in tokens]
    pieces: list[str] = []
    pending: list[int] = []
    for token in tokens:
        pending.append(token)
        text = decode(pending)
        # A character of UTF-8 has at most four bytes; more tokens than that will not complete it.
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(pending) < 4:
            pieces.append("")
        else:
            pieces.append(text)
            pending = []
    return pieces
