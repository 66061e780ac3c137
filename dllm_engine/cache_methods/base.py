"""Cache methods as the scheduler sees them: options, a plan for each step, and the
pages that a request holds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dllm_engine.decoding.canvas_layout import Blocks, CanvasLayout, Span
from dllm_engine.decoding.page_layout import PageCounts, PoolGeometry
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import CacheOptions, DecodingSpec, Guidance, Schedule
from dllm_engine.decoding.step_plan import (
    RefreshState,
    Retention,
    Scope,
    StepPlan,
    cut,
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
class CacheMethod:
    """A cache method: pure decisions, and the name of the layer pass that carries them
    out.

    The pass is named, not imported, so that neither the scheduler nor a command imports
    a model's layers.
    """

    plan: Callable[[DecodingSpec, Progress], StepPlan]
    """The next step of a request."""
    pages: HeldPages | None = None
    """Pages that a request holds once a step of the given running blocks has written
    them. Known before anything runs, so that they can be reserved. None: no pages."""
    options: type[CacheOptions] = CacheOptions
    """The model that validates ``cache_options``."""
    layer_pass: str = "dllm_engine.model_executor.passes.paged:RetentionPass"
    """``module:name``: ``name(batch, pages)`` makes the layer pass of a step."""
    attention: tuple[Attention, ...] = ("full",)
    """Kinds of attention that the method is for. Methods for full attention approximate
    keys and values that may change with every token."""
    trims_suffix: bool = False
    """True if steps can leave out masked blocks far behind the window
    (``suffix_blocks``).
    """
    shortened: Callable[[StepPlan, DecodingSpec, int], StepPlan | None] | None = None
    """``shortened(plan, spec, max_rows)``: a part of the step with at most ``max_rows``
    rows, or None if no part is so small. None: steps are computed as a whole."""
    keeps_for_good: bool = False
    """True if the keys and values of a token depend only on its block and the tokens
    before it, and never change. Then nothing is refreshed, requests with the same
    beginning share pages, a request that has lost its pages can fill new ones, and
    pages are reserved block by block."""
    pass_bytes: Callable[[int, int], int] = lambda rows, longest: 0
    """``pass_bytes(rows, max_model_len)``: bytes that a forward pass holds for this
    method alone.
    """
    runs: Callable[[DecodingSpec, StepPlan], int] = lambda spec, plan: 1
    """``runs(spec, plan)``: number of times that the rows of a step run through the
    layers, one after the other.
    """
    uniform_sampler: Literal["never", "with_delay_eos", "always"] = "never"
    """Requests that use ES-dLLM's sampler: equally many tokens per step in every model
    family, ordered by plain probability if greedy. ``always`` also means that a
    threshold must be exceeded, not just reached."""
    paper_settings: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(
        default_factory=dict
    )
    """Cache options of the papers: by family, then by a word of the model's name in
    lower case. The first that the name has counts; a name with none of them gets the
    last."""
    unguided: Callable[[Any], str | None] = lambda options: None
    """Settings among the options with which a step does not draft every position, as a
    guide needs; None: there are none."""
    refusal: Callable[[DecodingSpec], str | None] = lambda spec: None
    """Reason why the engine's cache options do not suit a request; None: they do."""
    tuned: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values that `dllm tune` tries for the cache options that trade speed for accuracy
    most.
    """
    largest: Callable[[Any], CacheOptions] = lambda options: options
    """Options with which a request of unknown prompt length holds the most pages."""

    def settings_for(
        self, model: str, family: ModelFamily
    ) -> tuple[bool, Mapping[str, Any]]:
        """True if a model's name selects ``paper_settings``, and the settings that the
        model gets.
        """
        by_part, name = self.paper_settings.get(family.name, {"": {}}), own_name(model)
        told = next(
            (part for part in by_part if not part or has_word(name, part)), None
        )
        return told is not None, by_part[[*by_part][-1] if told is None else told]

    def keeps(self, spec: DecodingSpec) -> bool:
        """Return True if the method serves a request. What only approximates does not
        serve decisions: each of their few passes computes the whole canvas."""
        return spec.decision is None or self.keeps_for_good

    def next_step(self, spec: DecodingSpec, progress: Progress) -> StepPlan:
        return (
            self.plan(spec, progress)
            if self.keeps(spec)
            else plan_whole(spec, progress)
        )

    def fitted(self, plan: StepPlan, spec: DecodingSpec, max_rows: int) -> StepPlan:
        """The step, or a part of it with at most ``max_rows`` rows if it has one."""
        if plan.max_rows <= max_rows or self.shortened is None:
            return plan
        return self.shortened(plan, spec, max_rows) or plan

    def steps(self, spec: DecodingSpec) -> Iterator[tuple[StepPlan, Progress]]:
        """Plans of all steps, each with the progress before it, if steps unmask the
        schedule's count. The progress is one object that advances."""
        progress = Progress.begin(spec)
        while progress.num_unmasked < spec.layout.num_masks:
            plan = self.next_step(spec, progress)
            yield plan, progress
            progress.advance(
                spec, min(plan.quota.count, progress.num_masked), retained=plan.retained
            )

    def held(
        self, spec: DecodingSpec, running: Blocks, geometry: PoolGeometry
    ) -> PageCounts:
        """Pages that a request holds while ``running`` run, including those of the
        guide.
        """
        own = (
            self.pages(spec, running, geometry)
            if self.pages is not None and self.keeps(spec)
            else {}
        )
        return own | guide_pages(spec, geometry)

    def num_held(
        self, spec: DecodingSpec, running: Blocks, geometry: PoolGeometry
    ) -> int:
        return sum(map(sum, self.held(spec, running, geometry).values()))

    def page_demand(self, spec: DecodingSpec, geometry: PoolGeometry) -> int:
        """The most pages a request holds at any time of its life."""
        # What is left out behind a window would only make it hold less.
        spec = replace(spec, layout=replace(spec.layout, suffix_blocks=None))
        return max(
            self.num_held(spec, running, geometry) for running in spec.extreme_windows
        )

    def admission_demand(
        self, spec: DecodingSpec, running: Blocks, geometry: PoolGeometry
    ) -> int:
        """Pages reserved at admission with ``running`` blocks: the most that the
        request can need. Methods that keep tokens for good reserve the pages that also
        keep the running blocks."""
        if not self.keeps_for_good:
            return self.page_demand(spec, geometry)
        following = min(running.stop, spec.layout.num_blocks - 1)
        return self.num_held(spec, Blocks(following, following + 1), geometry)

    def longest_demand(
        self, options: CacheOptions, geometry: PoolGeometry, max_model_len: int
    ) -> int:
        """The most pages that any request of ``max_model_len`` can need.

        Demand grows with the canvas, and evenly from prompt to response and with the
        window, so the extremes bound it. Raises ``ValueError`` if the pages, or a
        guide, do not suit the method.
        """
        if geometry.guide is not None and (settings := self.unguided(options)):
            raise ValueError(
                f"guide_model is not supported with {settings}: the guide needs a "
                f"draft of every position; choose another cache method, or leave "
                f"guide_model unset"
            )

        def demand(gen_length: int, block_length: int) -> int:
            spec = DecodingSpec(
                CanvasLayout(
                    prompt_length=max_model_len - gen_length,
                    gen_length=gen_length,
                    block_length=block_length,
                    shifts_logits=True,
                ),
                Schedule(steps=gen_length, block_add_threshold=0.0),
                guidance=Guidance() if geometry.guide is not None else None,
                cache=self.largest(options),
            )
            return self.page_demand(spec, geometry)

        longest = max(max_model_len - 1, 1)
        return max(demand(1, 1), demand(longest, 1), demand(longest, longest))


def guide_pages(spec: DecodingSpec, geometry: PoolGeometry) -> PageCounts:
    """Pages of the guide for a request, reserved for its whole life. The guide never
    predicts beyond the last token.
    """
    return (
        geometry.guide_pages(spec.layout.canvas_length - 1)
        if spec.guidance is not None
        else {}
    )


# What several methods plan and hold


def plan_whole(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """A step that computes all that the running blocks can see, and touches no page."""
    visible = spec.layout.visible(spec.layout.span_of(progress.running))
    return step_plan(
        spec, progress, RefreshState.FULL, Scope.ALL, visible, window_alone=False
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
    """A step of a method that keeps the beginning of the canvas: it computes ``start``
    … ``stop - 1``, reads all before ``start``, and keeps what lies before ``keep``."""
    adds = [Retention.whole(Span(start, keep))] if keep > start else []
    state = (
        RefreshState.UPDATE
        if adds
        else RefreshState.REUSE
        if start
        else RefreshState.FULL
    )
    scope = Scope.ACTIVE if start else Scope.ALL
    return step_plan(
        spec,
        progress,
        state,
        scope,
        Span(start, stop),
        window_alone=window_alone,
        read=start,
        adds=adds,
    )


def plan_on_canvas(
    spec: DecodingSpec,
    progress: Progress,
    state: RefreshState,
    scope: Scope,
    span: Span,
    *,
    window_alone: bool = False,
) -> StepPlan:
    """A step of a method that keeps every position, as the last step left it that
    computed it.
    """
    kept = spec.layout.visible(spec.layout.span_of(progress.running))
    read = cut(progress, kept).stop
    plan = step_plan(
        spec, progress, state, scope, span, window_alone=window_alone, read=read
    )
    plan.retained = kept.stop
    return plan


def hold_tokens(retained: Callable[[DecodingSpec, Blocks], int]) -> HeldPages:
    """Keys and values of ``retained(spec, running)`` tokens in every layer."""
    return lambda spec, running, geometry: geometry.uniform(retained(spec, running))


hold_canvas = hold_tokens(lambda spec, running: spec.layout.canvas_length)
