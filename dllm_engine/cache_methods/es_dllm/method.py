"""ES-dLLM (arXiv 2603.10088): rows that neither change nor are about to be unmasked
leave the pass early.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Literal

from pydantic import field_validator

from dllm_engine.cache_methods.base import (
    CacheMethod,
    plan_on_canvas,
    with_uniform_sampler,
)
from dllm_engine.decoding.canvas_layout import Blocks, Span
from dllm_engine.decoding.option_types import NotNegative, Positive, Share
from dllm_engine.decoding.page_layout import PageCounts, PageKind, PoolGeometry
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import DecodingSpec, EvictingOptions, TunedValues
from dllm_engine.decoding.step_plan import RefreshState, Scope, StepPlan
from dllm_engine.families import ModelFamily


class ESDLLMOptions(EvictingOptions):
    """Options of ``es_dllm`` (ES-dLLM, arXiv 2603.10088). Intervals count steps over
    the response, as if each block took one step per token."""

    tuned: ClassVar[TunedValues] = {
        "block_refresh_interval": (4, 8, 16),
        "retention_ratio": (0.5, 1.0),
    }

    indicator: Literal["hidden_state", "query", "key", "value", "none"] = "hidden_state"
    """Value that tells how much a row has changed. ``none``: no row is skipped, and
    each block begins with the whole canvas (the paper's DualCache baseline)."""
    alpha: Share = 0.5
    """Weight of a row's last confidence in its importance; its change has the weight 1
    − ``alpha``.
    """
    keep_schedule: tuple[tuple[float, float], ...] = (
        (1.0, 0.0),
        (0.5, 0.125),
        (0.25, 0.25),
    )
    """Pairs of (fraction of the rows kept, relative depth from which it holds). Depths
    begin with 0 and rise; fractions do not rise."""
    block_refresh_interval: Positive = 8
    """Every so many steps, a step skips no row of the block."""
    prompt_refresh_interval: Positive = 64
    """Every so many steps, a step also computes the prompt and all decoded tokens."""
    retention_ratio: Share = 1.0
    """Share of the positions outside the block that a layer attends to, selected as
    ``sparse`` does. 1: all of them.
    """
    update_delay: NotNegative = 1
    """Steps of a block before the one that selects what is retained."""

    @field_validator("keep_schedule")
    @classmethod
    def _falling(
        cls, value: tuple[tuple[float, float], ...]
    ) -> tuple[tuple[float, float], ...]:
        fractions = [fraction for fraction, _ in value]
        depths = [depth for _, depth in value]
        if depths[:1] != [0]:
            raise ValueError("must begin with depth 0")
        if depths != sorted(set(depths)) or not depths[-1] < 1:
            raise ValueError("depths must rise within [0, 1)")
        falls = fractions == sorted(fractions, reverse=True)
        if not falls or not 0 < fractions[-1] <= fractions[0] <= 1:
            raise ValueError("fractions must fall, or stay, within (0, 1]")
        return value

    @property
    def unguided(self) -> str | None:
        if not self.skips:
            return None
        return "cache_method='es_dllm' unless its cache option indicator is 'none'"

    @property
    def skips(self) -> bool:
        return self.indicator != "none"

    @property
    def keeps_features(self) -> bool:
        """True if remembered values need separate pages. Keys and values are in pages
        already.
        """
        return self.indicator in ("hidden_state", "query") and self.alpha < 1

    def feature_width(self, geometry: PoolGeometry) -> int:
        """Length of a row's remembered value in separate pages."""
        is_query = self.indicator == "query"
        return geometry.query_size if is_query else geometry.hidden_size

    @property
    def evicts(self) -> bool:
        return self.retention_ratio < 1

    def cuts(self, num_layers: int) -> dict[int, float]:
        """Layers that drop rows, ascending, with the fraction of the step's rows that
        go on.
        """
        if not self.skips:
            return {}
        fractions = {
            int(depth * num_layers): fraction for fraction, depth in self.keep_schedule
        }
        return {
            layer: fraction for layer, fraction in fractions.items() if fraction < 1
        }


COPY_PAGES = "retained copy"
"""Kind of pages that hold keys and values of the retained copy."""


class RetainedCopy(Enum):
    """Use of the copy of retained tokens. With eviction, pages hold it beside the whole
    canvas.
    """

    NONE = "none"
    WRITE = "write"
    """Choose the tokens and copy them."""
    READ = "read"
    """Attend to the copy and the window, not to the rest of the canvas."""


@dataclass(frozen=True)
class EarlySkipStep:
    """The part of a step plan that is specific to ES-dLLM."""

    skips: bool
    """True if rows are dropped between layers."""
    from_last_unmasked: bool
    """True to begin at the row that predicted the leftmost token of the previous step,
    if it lies before the span."""
    copying: RetainedCopy
    num_copied: int
    """Number of tokens outside the window in the copy, per layer. The window follows
    them.
    """


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Plan a step. UPDATE of ALL computes the whole canvas; only these steps compute
    positions after the window. UPDATE of PROMPT computes everything up to the window's
    end. UPDATE of ACTIVE computes the window without skipping rows. Other steps REUSE
    and skip rows. The first step after a block has joined also feeds the tokens that
    the step before decoded.
    """
    options = ESDLLMOptions.of(spec)
    window_due, prompt_due = _due(options, spec, progress)
    copying = RetainedCopy.NONE
    if options.evicts and progress.step >= options.update_delay:
        copying = (
            RetainedCopy.WRITE
            if progress.step == options.update_delay
            else RetainedCopy.READ
        )
    rows = spec.layout.predicting_span(progress.running)
    skips = from_last_unmasked = False
    if progress.num_forwards == 0 or (progress.step == 0 and not options.skips):
        plan = plan_on_canvas(spec, progress, Scope.ALL, spec.layout.canvas_span)
    elif prompt_due:
        plan = plan_on_canvas(spec, progress, Scope.PROMPT, Span(0, rows.stop))
    else:
        whole = window_due or copying is RetainedCopy.WRITE
        state = RefreshState.UPDATE if whole else RefreshState.REUSE
        plan = plan_on_canvas(spec, progress, Scope.ACTIVE, rows, state=state)
        skips = options.skips and not whole
        from_last_unmasked = progress.step == 0
        if from_last_unmasked:
            plan.max_rows = (
                rows.stop - spec.layout.predicting_span(progress.before).start
            )
    num_copied = (
        0 if copying is RetainedCopy.NONE else copied_tokens(spec, progress.running)
    )
    if copying is RetainedCopy.READ:
        plan.read = num_copied + min(rows.stop, plan.read) - rows.start
    plan.own = EarlySkipStep(skips, from_last_unmasked, copying, num_copied)
    plan.quota.may_fall_short = skips
    return plan


def _due(
    options: ESDLLMOptions, spec: DecodingSpec, progress: Progress
) -> tuple[bool, bool]:
    """Return whether this step computes the whole window, and whether it computes the
    whole prompt.

    With one block at a time, a clock begins each block at the number of response tokens
    before it, as if blocks took one step per token (the authors' code). With several
    blocks there is no such clock: intervals count unmasked tokens, and the whole window
    is computed when a block has joined.
    """
    if spec.schedule.block_add_threshold is None:
        clock = progress.running.first * spec.layout.block_length + progress.step
        return (
            clock % options.block_refresh_interval == 0,
            clock % options.prompt_refresh_interval == 0,
        )
    window_due = progress.step == 0 or progress.passed_multiple_of(
        options.block_refresh_interval
    )
    return window_due, progress.passed_multiple_of(options.prompt_refresh_interval)


def copied_tokens(spec: DecodingSpec, running: Blocks) -> int:
    """Number of tokens outside the window in the retained copy."""
    return int(
        (spec.layout.canvas_length - spec.layout.span_of(running).size)
        * ESDLLMOptions.of(spec).retention_ratio
    )


def hold_canvas_and_copy(
    spec: DecodingSpec, running: Blocks, geometry: PoolGeometry
) -> PageCounts:
    """Pages for the whole canvas, for the copy of retained tokens and the window, and
    if rows are dropped for features of the rows that predict the response: steps that
    skip contain no other rows."""
    options = ESDLLMOptions.of(spec)
    counts = geometry.uniform(spec.layout.canvas_length)
    cuts = options.cuts(geometry.num_layers)
    if options.keeps_features and cuts:
        width = options.feature_width(geometry)
        pages = geometry.feature_pages(spec.layout.gen_length, width)
        counts[PageKind.FEATURES] = [
            pages if layer in cuts else 0 for layer in range(geometry.num_layers)
        ]
    if options.evicts:
        copied = copied_tokens(spec, running) + spec.layout.span_of(running).size
        counts[COPY_PAGES] = [geometry.kv_pages(copied)] * geometry.num_layers
    return counts


def _conventions(family: ModelFamily, delay_eos: bool) -> ModelFamily:
    return replace(with_uniform_sampler(family), exceeds_threshold=True)


ES_DLLM = CacheMethod(
    plan,
    hold_canvas_and_copy,
    ESDLLMOptions,
    "dllm_engine.cache_methods.es_dllm.layer_pass:EarlySkipPass",
    conventions=_conventions,
)
