"""Step plans: the vocabulary in which a refresh plan says what one denoising step computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import DecodingSpec, ParallelRule, Span
from dllm_engine.scheduler.unmasking import (
    PARALLEL_RULES,
    UNMASKING_POLICIES,
    timestep_count,
    timestep_ratio,
    uniform_count,
)


class RefreshState(Enum):
    """What a step does with a request's cache."""

    FULL = "full"
    """Compute the whole canvas; the cache is untouched."""
    UPDATE = "update"
    """Recompute a scope and write what is retained into pages."""
    REUSE = "reuse"
    """Compute the active rows only; everything else comes from pages."""


class Scope(Enum):
    """The part of the canvas that a step recomputes in every layer."""

    ALL = "all"
    PROMPT = "prompt"
    RESPONSE = "response"
    ACTIVE = "active"
    """What the plan's rows and the layer pass select; no part as a whole."""


class RowRule(Enum):
    """Which rows of ``StepPlan.span`` are fed to the model. All but ``ALL`` depend on tokens; the runner resolves
    them."""

    ALL = "all"
    MASKED_BEFORE = "masked_before"
    """The rows that predict what was masked when the previous step began: what is masked still, and what that step
    unmasked, once more as a token."""
    MASKED_BEFORE_AND_LAST = "masked_before_and_last"
    """And the canvas's last row, which predicts nothing with shifted logits."""
    FROM_LAST_UNMASKED = "from_last_unmasked"
    """From the row that predicted the leftmost position unmasked in the previous step, where it lies before ``span``,
    to the end of ``span``."""
    CHOSEN = "chosen"
    """The rows that the layer pass of the previous step chose, by what it saw and what that step unmasked."""


class RetainedCopy(Enum):
    """What a step does with a copy of retained tokens beside the whole canvas (ES-dLLM with eviction)."""

    NONE = "none"
    WRITE = "write"
    """Choose the tokens and copy them."""
    READ = "read"
    """Attend to the copy and the window, not to the rest of the canvas."""


@dataclass(slots=True)  # made for each request in each step; a frozen one takes several times as long to make
class UnmaskQuota:
    """How many of the masked positions in ``candidates`` a step unmasks."""

    candidates: Span
    count: int
    ratio: float
    """``count`` as a share of the masked candidates, for policies that draw each position by itself (``origin``)."""
    parallel: ParallelRule | None = None
    """Unmask as many candidates as this allows instead of ``count``."""
    least: int = 0
    """Unmask so many at least, where ``parallel`` allows fewer."""
    first_needed: bool = False
    """Whether the first position must be filled in this step, because no later one can predict it."""
    guaranteed: Span | None = None
    """Where at least one candidate is filled, if there is any: the most confident one where the rule allows none."""
    enough: int = 1
    """Where ``parallel`` allows fewer than so many, unmask only the most confident one."""
    observed: float | None = None
    """Report the farthest candidate of at least this confidence; None: do not."""


@dataclass(frozen=True)
class Retention:
    """Positions of which every layer retains some."""

    spans: tuple[Span, ...]
    """Of the canvas, ascending."""
    count: int
    """How many of them."""

    @property
    def num_positions(self) -> int:
        return sum(span.size for span in self.spans)

    @classmethod
    def whole(cls, *spans: Span) -> "Retention":
        """All of them."""
        return cls(spans, sum(span.size for span in spans))


@dataclass(slots=True)  # made for each request in each step; a frozen one takes several times as long to make
class StepPlan:
    """One denoising step of one request."""

    state: RefreshState
    scope: Scope
    rows: RowRule
    span: Span
    """Canvas positions that ``rows`` selects from."""
    max_rows: int
    """Upper bound on the rows computed at once; what the token budget is charged."""
    window: Span
    """Of the running blocks."""
    quota: UnmaskQuota
    forward: int
    """Number of this denoising step over the whole response, from 0; also the counter of its random numbers."""
    read: int = 0
    """Tokens per layer that the rows attend to in pages."""
    retained: int = 0
    """Tokens per layer that pages hold after the step."""
    predicts: Span | None = None
    """Masked positions that are predicted, from the quota's candidates on; None: these alone. What goes beyond them is
    not filled, but the layer pass observes it."""
    adds: tuple[Retention, ...] = ()
    """What an UPDATE step adds to pages, behind the tokens that it reads there. Methods that keep the whole canvas by
    position have no use for it."""
    num_updated: int | None = None
    """Response rows per layer that an adaptive update recomputes (dLLM-Cache, MaskKV). One of no rows still renews what
    the rows are compared by; None: no adaptive update."""
    prefills: bool = False
    """Whether it only adds to pages, as a part of a long step, and is no denoising step."""
    skips: bool = False
    """Whether layers drop rows (ES-dLLM)."""
    retained_copy: RetainedCopy = RetainedCopy.NONE
    num_copied: int = 0
    """Tokens outside the window that the copy holds per layer; the window follows them."""

    @property
    def predicted(self) -> Span:
        """Masked positions that are predicted, as far as rows that predict them are computed."""
        return self.quota.candidates if self.predicts is None else self.predicts


def fills_fixed_count(plan: StepPlan, spec: DecodingSpec) -> bool:
    """Whether a step fills a number of positions that is known before it runs."""
    return plan.quota.parallel is None and not UNMASKING_POLICIES[spec.unmasking].draws_each_position


def may_fill(plan: StepPlan, spec: DecodingSpec) -> bool:
    """Whether a step can fill a position at all."""
    return plan.quota.count > 0 or not fills_fixed_count(plan, spec)


def must_fill(plan: StepPlan, spec: DecodingSpec) -> bool:
    """Whether a step fills a position whatever the model predicts."""
    if plan.skips:
        # The row of the only position that may be filled may have been dropped; the next step keeps it.
        return False
    if plan.quota.parallel is not None or spec.guidance is not None:
        return True
    by_chance = UNMASKING_POLICIES[spec.unmasking].draws_each_position
    return plan.quota.ratio >= 1 if by_chance else plan.quota.count > 0


def unmask_quota(spec: DecodingSpec, progress: Progress, window_alone: bool) -> UnmaskQuota:
    """Tokens to unmask at this step, by the family's schedule (LLaDA's uniform, Dream's time grid), or as many in every
    step as the request asks for.

    ``window_alone``: later steps feed no row before the window. With shifted logits such a step cannot predict the
    window's first position. So Dream's first step of a block fills that one alone, outside the time grid (Fast-dLLM,
    Sparse-dLLM; without a cache wherever there are several blocks); of several running blocks it fills that one too.
    """
    window, step = spec.span_of(progress.running), progress.step
    least = spec.tokens_per_step or 0
    begins_masked = step == 0 and not spec.is_given(window.start)
    first_needed = window_alone and spec.shifts_logits and begins_masked
    if spec.guidance is not None:
        # The guide decides how many; schedules have no say.
        return UnmaskQuota(window, progress.num_masked, 1.0, first_needed=first_needed)
    if spec.block_add_threshold is not None:
        leftmost = spec.block_span(progress.leftmost)
        return UnmaskQuota(window, progress.num_masked, 1.0, spec.parallel, least, first_needed, leftmost)
    if (span := progress.span) is not None:
        threshold, enough = span.passing
        return UnmaskQuota(
            Span(span.start, window.stop if span.is_slow else span.end),
            progress.num_masked,
            1.0,
            ParallelRule("slow_fast", threshold),
            least,
            first_needed,
            enough=enough,
            observed=span.options.span_threshold if span.is_slow and not span.settled else None,
        )
    steps = spec.steps_per_block[progress.running.first]
    in_blocks = window_alone or (spec.num_blocks > 1 and spec.tokens_per_step is None)
    if spec.schedule == "timestep" and in_blocks and begins_masked and steps != 1:
        return UnmaskQuota(Span(window.start, window.start + 1), 1, 1.0)
    may_pass_none = spec.parallel is not None and PARALLEL_RULES[spec.parallel.kind].may_pass_none
    guaranteed = window if may_pass_none else None
    if spec.tokens_per_step is not None:
        count = min(spec.tokens_per_step, progress.num_masked)
        ratio = count / max(progress.num_masked, 1)
        return UnmaskQuota(window, count, ratio, spec.parallel, least, guaranteed=guaranteed)
    if step >= steps - 1:
        count, ratio = progress.num_masked, 1.0
    elif spec.schedule == "uniform":
        count = uniform_count(spec.scheduled_per_block[progress.running.first], steps, step)
        ratio = count / max(progress.num_masked, 1)
    else:
        count, ratio = timestep_count(progress.num_masked, steps, step), timestep_ratio(steps, step)
    if spec.block_steps and spec.parallel is not None:
        least = count
    return UnmaskQuota(window, count, ratio, spec.parallel, least, guaranteed=guaranteed)


def cut(progress: Progress, span: Span) -> Span:
    """``span`` without what a step leaves out as if the canvas did not have it: in the fast passes of SlowFast
    sampling, after the first, what lies behind the span that they fill."""
    state = progress.span
    return span if state is None or not state.num_fast else Span(span.start, min(span.stop, state.end))


def step_plan(
    spec: DecodingSpec,
    progress: Progress,
    state: RefreshState,
    scope: Scope,
    span: Span,
    *,
    window_alone: bool = True,
    read: int = 0,
    adds: Sequence[Retention] = (),
) -> StepPlan:
    """A step that computes all rows of ``span``, as far as the canvas is not ``cut`` unless it adds to pages;
    ``window_alone`` as in ``unmask_quota``. After it, pages hold what it reads and what it adds."""
    span = span if adds else cut(progress, span)
    return StepPlan(
        state=state,
        scope=scope,
        rows=RowRule.ALL,
        span=span,
        max_rows=span.size,
        window=spec.span_of(progress.running),
        quota=unmask_quota(spec, progress, window_alone),
        forward=progress.num_denoised,
        read=read,
        retained=read + sum(retention.count for retention in adds),
        adds=tuple(retention for retention in adds if retention.count),
    )
