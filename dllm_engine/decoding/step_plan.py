"""Step plans: the work of one denoising step of one request."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import DecodingSpec, ParallelRule
from dllm_engine.decoding.unmasking_policies import (
    PARALLEL_RULES,
    SlowFastState,
    count_left,
    rounded_counts,
    timestep_count,
    timestep_ratio,
    uniform_count,
)


class RefreshState(Enum):
    """Use of a request's cache in one step."""

    FULL = "full"
    """Compute the whole canvas; the cache is untouched."""
    UPDATE = "update"
    """Recompute a scope, and write retained tokens to pages."""
    REUSE = "reuse"
    """Compute only the active rows; everything else comes from pages."""


class Scope(Enum):
    """The part of the canvas that a step recomputes in every layer."""

    ALL = "all"
    PROMPT = "prompt"
    RESPONSE = "response"
    ACTIVE = "active"
    """The rows that the plan and the layer pass select."""


# Not frozen: one is made per request and step, and a frozen one takes longer to make.
@dataclass(slots=True)
class UnmaskQuota:
    """Number of masked positions that a step unmasks."""

    candidates: Span
    count: int
    ratio: float
    """``count`` as a share of the masked candidates, for policies that draw each
    position (``origin``).
    """
    parallel: ParallelRule | None = None
    """Rule that decides how many positions are filled, in place of ``count``; None:
    ``count`` does.
    """
    least: int = 0
    """Minimum number of positions for ``parallel``."""
    first_needed: bool = False
    """True if the first position must be filled in this step, because no later step can
    predict it.
    """
    guaranteed: Span | None = None
    """Span in which at least one candidate is filled: the most confident one, if the
    rule allows none.
    """
    enough: int = 1
    """If ``parallel`` allows fewer positions than this, only the most confident one is
    unmasked.
    """
    observed: float | None = None
    """Report the farthest candidate of at least this confidence."""
    verifies: bool = False
    """True if the rows before the candidates predict them, in any family, in the pass
    that keeps these rows. Candidates are the first position of a block, or drafts and
    the position behind them. The first prediction that differs from its draft is filled
    in, and the drafts behind it are taken back."""
    left: int | None = None
    """Number of masks after the step, if decided tokens may be taken back; ``count`` is
    then the difference to the masks before. None: decided tokens stay.
    """
    may_fall_short: bool = False
    """True if rows of candidates may leave the pass early, so that fewer positions are
    filled.
    """

    @property
    def is_empty(self) -> bool:
        """True for a part of a long prompt, which only adds to pages and is not a
        denoising step.
        """
        return not self.candidates.size

    @property
    def may_take_back(self) -> bool:
        """True if decided candidates may become masks again."""
        return self.left is not None or (self.verifies and self.candidates.size > 1)


@dataclass(frozen=True)
class Retention:
    """Canvas positions, ascending. Every layer retains ``count`` of them."""

    spans: tuple[Span, ...]
    count: int

    @property
    def num_positions(self) -> int:
        return sum(span.size for span in self.spans)

    @classmethod
    def whole(cls, *spans: Span) -> "Retention":
        return cls(spans, sum(span.size for span in spans))


# Not frozen: one is made per request and step, and a frozen one takes longer to make.
@dataclass(slots=True)
class StepPlan:
    """One denoising step of one request."""

    state: RefreshState
    scope: Scope
    span: Span
    """Canvas positions whose rows are computed, unless the layer pass computes others
    (``LayerPass.positions``).
    """
    max_rows: int
    """Upper bound of the rows that are computed at once. It counts in the token budget.
    """
    window: Span
    quota: UnmaskQuota
    forward: int
    """Number of this denoising step over the whole response, from 0; also the counter
    of its random numbers.
    """
    read: int = 0
    """Tokens per layer that the rows attend to in pages."""
    num_anchored: int = 0
    """Number of tokens at the start of the prompt that ``read`` counts but this step
    computes again (``anchor_tokens``). Their rows come before those of ``span``.
    """
    retained: int = 0
    """Tokens per layer that pages hold after the step."""
    adds: tuple[Retention, ...] = ()
    """Tokens added to pages, behind those that the step reads. Empty for methods that
    keep the whole canvas.
    """
    post_step: int = 0
    """Token editing: number of the step, from 1, among the steps of its block that
    begin without a mask; 0: another step.
    """
    own: Any = None
    """The part of the plan that only the cache method and its layer pass read: a
    dataclass of the method, or None.
    """


def fills_fixed_count(plan: StepPlan, spec: DecodingSpec) -> bool:
    """Return True if the number of positions that a step fills is known before it runs."""
    return plan.quota.parallel is None and not spec.unmasking.policy.draws_each_position


def may_fill(plan: StepPlan, spec: DecodingSpec) -> bool:
    """Return True if a step can fill a position, or replace its token."""
    quota = plan.quota
    if quota.may_take_back:
        return True
    return quota.count > 0 or plan.post_step > 0 or not fills_fixed_count(plan, spec)


def must_fill(plan: StepPlan, spec: DecodingSpec) -> bool:
    """Return True if a step fills at least one position, whatever the model predicts."""
    quota = plan.quota
    if quota.may_fall_short or plan.post_step or quota.may_take_back:
        # The row of the only position that may be filled may have left the pass; the
        # next step keeps it. A step that begins without a mask only replaces tokens. A
        # step that takes tokens back may leave as many masks as before.
        return False
    if plan.quota.parallel is not None or spec.guidance is not None:
        return True
    by_chance = spec.unmasking.policy.draws_each_position
    return plan.quota.ratio >= 1 if by_chance else plan.quota.count > 0


def revises(
    plan: StepPlan, spec: DecodingSpec, num_masked: int, num_edited: int
) -> bool:
    """Return True if decided tokens of the running block may still change after a step
    that left ``num_masked`` masks and replaced ``num_edited`` tokens (the loop of
    LLaDA2.1, arXiv 2602.08676)."""
    if spec.layout.round_length is not None:
        return not plan.quota.verifies
    if plan.quota.left is not None:
        return num_masked > 0
    if spec.unmasking.edit_threshold is None:
        return False
    is_stable = plan.post_step > 0 and not num_edited
    return num_masked > 0 or (
        not is_stable and plan.post_step < spec.unmasking.max_post_steps
    )


def predicts_next(spec: DecodingSpec, progress: Progress) -> bool:
    """Return True if a step's rows predict the tokens behind them: only the first
    position of a block, or the positions of a drafted round.
    """
    layout = spec.layout
    if layout.round_length is not None:
        return progress.num_masked == 1
    if not layout.seeds_blocks or progress.step > 0:
        return False
    start = progress.window(spec).start
    return layout.block_start(start) == start


def unmask_quota(
    spec: DecodingSpec, progress: Progress, window: Span, window_alone: bool
) -> UnmaskQuota:
    """Unmask quota of a step in ``window``, by the family's schedule or
    ``tokens_per_step``.

    ``window_alone``: later steps feed no row before the window. With shifted logits
    they cannot predict the first position of the window. So the first step of a block
    fills only this position, outside the schedule (as in Fast-dLLM and Sparse-dLLM;
    without a cache if there are several blocks). With several running blocks it fills
    this position among others.
    """
    layout, schedule, num_masked = spec.layout, spec.schedule, progress.num_masked
    begins_masked = progress.step == 0 and not layout.is_given(window.start)
    first_position = Span(window.start, window.start + 1)
    quota = UnmaskQuota(window, num_masked, 1.0)
    quota.first_needed = window_alone and layout.shifts_logits and begins_masked
    if spec.guidance is not None or spec.decision is not None:
        # The guide, or the probabilities of fields, decide what is filled, not the
        # schedule.
        return quota
    if predicts_next(spec, progress):
        candidates = window if layout.round_length else first_position
        return UnmaskQuota(candidates, 1, 1.0, verifies=True)
    quota.parallel = spec.unmasking.parallel
    if layout.round_length is not None:
        quota.candidates = Span(window.start, window.stop - 1)
        quota.count = num_masked - 1
        return quota
    quota.least = schedule.tokens_per_step or 0
    if schedule.block_add_threshold is not None:
        quota.guaranteed = layout.block_span(progress.leftmost)
        return quota
    if (spans := progress.slow_fast) is not None:
        _fill_spans(quota, spans)
        return quota
    # From here on, such a step fills only the first position, or all of them.
    quota.first_needed = False
    block = progress.running.first
    steps = spec.steps_per_block[block]
    if spec.unmasking.policy.takes_back:
        quota.left = count_left(layout.masks_per_block[block], steps, progress.step)
        quota.count = num_masked - quota.left
        return quota
    states_count = schedule.tokens_per_step is not None
    in_blocks = window_alone or (layout.num_blocks > 1 and not states_count)
    if schedule.kind == "timestep" and in_blocks and begins_masked and steps != 1:
        return UnmaskQuota(first_position, 1, 1.0)
    _fill_by_schedule(quota, spec, progress)
    return quota


def _fill_spans(quota: UnmaskQuota, spans: SlowFastState) -> None:
    """Let a step fill the span of SlowFast sampling."""
    threshold, quota.enough = spans.passing
    quota.parallel = ParallelRule("slow_fast", threshold)
    stop = spans.end
    if spans.is_slow:
        stop = quota.candidates.stop
        quota.observed = None if spans.settled else spans.options.span_threshold
    quota.candidates = Span(spans.start, stop)


def _fill_by_schedule(
    quota: UnmaskQuota, spec: DecodingSpec, progress: Progress
) -> None:
    """Let a step fill as many positions as the schedule says, or as many as pass the
    rule of parallel unmasking.
    """
    schedule, parallel = spec.schedule, spec.unmasking.parallel
    quota.count = _scheduled_count(spec, progress)
    quota.ratio = quota.count / max(progress.num_masked, 1)
    if schedule.kind == "timestep" and schedule.tokens_per_step is None:
        steps = spec.steps_per_block[progress.running.first]
        quota.ratio = timestep_ratio(steps, progress.step)
    if parallel is None:
        return
    if PARALLEL_RULES[parallel.kind].may_pass_none:
        quota.guaranteed = quota.candidates
    if schedule.block_steps:
        quota.least = quota.count


def _scheduled_count(spec: DecodingSpec, progress: Progress) -> int:
    """Number of tokens that the schedule unmasks in the next step."""
    schedule = spec.schedule
    step = progress.step
    num_masked = progress.num_masked
    block = progress.running.first
    steps = spec.steps_per_block[block]
    if schedule.tokens_per_step is not None:
        return min(schedule.tokens_per_step, num_masked)
    if step >= steps - 1:
        return num_masked
    if schedule.kind == "timestep":
        return timestep_count(num_masked, steps, step)
    scheduled = spec.scheduled_per_block[block]
    if schedule.kind == "uniform":
        return uniform_count(scheduled, steps, step)
    counts = rounded_counts(scheduled, steps)
    # Policies that draw positions may leave some for later.
    return counts[step] if step < len(counts) else num_masked


def fast_pass_span(progress: Progress, span: Span) -> Span:
    """The part of ``span`` that a step computes. After the first one, fast passes of
    SlowFast sampling end with the positions that they fill.
    """
    state = progress.slow_fast
    if state is None or not state.num_fast:
        return span
    return Span(span.start, min(span.stop, state.end))


class StepWork(NamedTuple):
    """Positions that a step computes, reads and keeps."""

    state: RefreshState
    scope: Scope
    span: Span
    """Positions to compute. ``fast_pass_span`` cuts it, unless the step adds to pages.
    """
    read: int = 0
    """Number of tokens that the step reads from pages."""
    adds: Sequence[Retention] = ()
    """Tokens that the step adds to pages."""


def step_plan(
    spec: DecodingSpec,
    progress: Progress,
    work: StepWork,
    *,
    window_alone: bool = True,
) -> StepPlan:
    """Plan of a step that does this work. ``window_alone`` as in ``unmask_quota``."""
    state, scope, span, read, adds = work
    span = span if adds else fast_pass_span(progress, span)
    window = progress.window(spec)
    return StepPlan(
        state=state,
        scope=scope,
        span=span,
        max_rows=progress.num_anchored + span.size,
        window=window,
        quota=unmask_quota(spec, progress, window, window_alone),
        forward=progress.num_denoised,
        post_step=progress.post_steps + 1
        if spec.unmasking.edit_threshold is not None and not progress.num_masked
        else 0,
        read=read,
        num_anchored=progress.num_anchored,
        retained=read + sum(retention.count for retention in adds),
        adds=tuple(retention for retention in adds if retention.count),
    )
