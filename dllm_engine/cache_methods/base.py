"""Interface of cache methods to the scheduler: options, a plan for each step, and the
pages that a request holds.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dllm_engine.decoding.canvas_layout import Blocks, Span
from dllm_engine.decoding.page_layout import PageCounts, PoolGeometry
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import CacheOptions, DecodingSpec
from dllm_engine.decoding.step_plan import (
    RefreshState,
    Retention,
    Scope,
    StepPlan,
    StepWork,
    fast_pass_span,
    revises,
    step_plan,
)
from dllm_engine.families import Attention, ModelFamily
from dllm_engine.model_name import has_word, own_name

HeldPages = Callable[[DecodingSpec, Blocks, PoolGeometry], PageCounts]
ScorerName = Literal[
    "mask_voting", "all_voting", "prompt_voting", "mean_query", "snapkv", "random"
]
"""Names in ``cache_methods/scorers.py``."""


@dataclass(frozen=True)
class PassCost:
    """Costs of a forward pass beside its rows and pages."""

    num_bytes: Callable[[int, int], int] = lambda rows, longest: 0
    """``num_bytes(rows, max_model_len)``: memory that the pass holds."""
    num_runs: Callable[[DecodingSpec, StepPlan], int] = lambda spec, plan: 1
    """``num_runs(spec, plan)``: times that the rows of a step run through the layers,
    one after the other."""


@dataclass(frozen=True)
class CacheMethod:
    """A cache method: pure decisions, and the name of the layer pass that executes
    them.

    The pass is named, not imported, so that the scheduler and commands do not import a
    model's layers.
    """

    plan: Callable[[DecodingSpec, Progress], StepPlan]
    """The next step of a request."""
    pages: HeldPages | None = None
    """Pages that a request holds after a step of the given running blocks. They must be
    known before the request runs, so that they can be reserved. None: no pages."""
    options: type[CacheOptions] = CacheOptions
    """The model that validates ``cache_options``."""
    layer_pass: str = "dllm_engine.model_executor.passes.paged:RetentionPass"
    """``module:name``: ``name(batch, pages)`` makes the layer pass of a step."""
    attention: tuple[Attention, ...] = ("full",)
    """Kinds of attention that the method supports. Methods for full attention
    approximate keys and values, which may change with every token."""
    trims_suffix: bool = False
    """True if steps can leave out masked blocks far behind the window
    (``suffix_blocks``).
    """
    shortened: Callable[[StepPlan, DecodingSpec, int], StepPlan | None] | None = None
    """``shortened(plan, spec, max_rows)``: a part of the step with at most ``max_rows``
    rows, or None if there is no such part. None: steps are computed as a whole."""
    keeps_for_good: bool = False
    """True if the keys and values of a token depend only on its block and the tokens
    before it, and never change. Then nothing is refreshed, requests with the same
    beginning share pages, a request that has lost its pages can fill new ones, and
    pages are reserved block by block."""
    shares_prompts: bool = False
    """True if steps can leave out the beginning of a prompt that is in pages already
    (``share_prompts``)."""
    cost: PassCost = PassCost()
    conventions: Callable[[ModelFamily, bool], ModelFamily] = lambda family, _: family
    """``conventions(family, delay_eos)``: the family with the decoding conventions of
    the method's authors, for a request with or without ``delay_eos``.
    """

    def settings_for(
        self, model: str, family: ModelFamily
    ) -> tuple[bool, Mapping[str, Any]]:
        """Return whether the model's name selects settings of papers, and the settings
        that the model gets.
        """
        papers = self.options.paper_settings
        name = own_name(model)
        settings = papers.get(family.name, {"": {}})
        word = next(
            (part for part in settings if not part or has_word(name, part)), None
        )
        return word is not None, settings[[*settings][-1] if word is None else word]

    def serves(self, spec: DecodingSpec) -> bool:
        """Return True if the method serves a request. An approximating method does not
        serve decisions: each of their few passes computes the whole canvas."""
        return spec.decision is None or self.keeps_for_good

    def next_step(self, spec: DecodingSpec, progress: Progress) -> StepPlan:
        return (
            self.plan(spec, progress)
            if self.serves(spec)
            else plan_whole(spec, progress)
        )

    def fitted(self, plan: StepPlan, spec: DecodingSpec, max_rows: int) -> StepPlan:
        """The step, or if it is too large a part of it with at most ``max_rows`` rows,
        if there is one.
        """
        if plan.max_rows <= max_rows or self.shortened is None:
            return plan
        return self.shortened(plan, spec, max_rows) or plan

    def steps(self, spec: DecodingSpec) -> Iterator[tuple[StepPlan, Progress]]:
        """Yield the plan of each step and the progress before it, assuming that steps
        unmask the schedule's count, edit no token and draft right tokens. The same
        progress object is advanced each time."""
        progress = Progress.begin(spec)
        while progress.num_unmasked < spec.layout.num_masks:
            plan = self.next_step(spec, progress)
            yield plan, progress
            filled = remaining = min(plan.quota.count, progress.num_masked)
            masked = []
            for masks in progress.masked:
                masked.append(max(masks - remaining, 0))
                remaining = max(remaining - masks, 0)
            progress.revises = revises(plan, spec, sum(masked), 0)
            progress.advance(spec, filled, masked, retained=plan.retained)


# Plans and pages that several methods share


def with_uniform_sampler(family: ModelFamily) -> ModelFamily:
    """The family with ES-dLLM's sampler: equally many tokens per step, ordered by the
    plain probability if greedy.
    """
    return replace(
        family,
        schedule="uniform",
        default_unmasking="low_confidence",
        filters_greedy=False,
    )


def plan_whole(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Plan a step that computes everything that the running blocks see, except a shared
    beginning of the prompt, which is all that pages keep.
    """
    visible = spec.layout.visible(progress.window(spec))
    start = progress.num_shared
    keep = spec.num_sharable or 0
    return plan_behind_prefix(
        spec, progress, start, visible.stop, keep, window_alone=False
    )


def plan_behind_prefix(
    spec: DecodingSpec,
    progress: Progress,
    start: int,
    stop: int,
    keep: int,
    *,
    window_alone: bool = True,
) -> StepPlan:
    """Plan a step of a method that keeps the beginning of the canvas: it computes
    ``start`` … ``stop - 1``, reads everything before ``start``, and keeps everything
    before ``keep``."""
    adds = [Retention.whole(Span(start, keep))] if keep > start else []
    state = (
        RefreshState.UPDATE
        if adds
        else RefreshState.REUSE
        if start
        else RefreshState.FULL
    )
    scope = Scope.ACTIVE if start else Scope.ALL
    work = StepWork(state, scope, Span(start, stop), read=start, adds=adds)
    return step_plan(spec, progress, work, window_alone=window_alone)


def plan_on_canvas(
    spec: DecodingSpec,
    progress: Progress,
    scope: Scope,
    span: Span,
    *,
    state: RefreshState | None = None,
    window_alone: bool = False,
) -> StepPlan:
    """Plan a step of a method that keeps every position as it was last computed.
    ``state``: by default, steps on ACTIVE positions REUSE, and others UPDATE.
    """
    if state is None:
        state = RefreshState.REUSE if scope is Scope.ACTIVE else RefreshState.UPDATE
    kept = spec.layout.visible(progress.window(spec))
    work = StepWork(state, scope, span, read=fast_pass_span(progress, kept).stop)
    plan = step_plan(spec, progress, work, window_alone=window_alone)
    plan.retained = kept.stop
    return plan


def hold_tokens(retained: Callable[[DecodingSpec, Blocks], int]) -> HeldPages:
    """Pages for keys and values of ``retained(spec, running)`` tokens in every layer."""
    return lambda spec, running, geometry: geometry.uniform(retained(spec, running))


hold_canvas = hold_tokens(lambda spec, running: spec.layout.canvas_length)
