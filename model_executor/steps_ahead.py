"""Steps whose work is known before the steps ahead of them have run, so that a device
can get all of them at once.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

from vllm.logger import init_logger

from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import DecodingSpec
from dllm_engine.decoding.step_plan import StepPlan, fills_fixed_count

logger = init_logger(f"vllm.{__name__}")

_NOT_PLANNED = "a step ahead cannot be planned; the steps before it run one by one"
"""The step is planned again later, and then only the request with the error fails."""


def steps_known_ahead(
    plans: dict[str, StepPlan],
    progress: Mapping[str, Progress],
    specs: Mapping[str, DecodingSpec],
    plan: Callable[[DecodingSpec, Progress], StepPlan],
    num_steps: int,
    *,
    may_idle: bool,
) -> Iterator[dict[str, StepPlan]]:
    """Yield ``plans``, and the plans of at most ``num_steps - 1`` following steps that
    do the same work on other tokens. Each step is planned lazily, while a device runs
    the steps before it. If steps fill fixed counts, only the last one may finish a
    block. ``progress``: progress before ``plans``.

    ``may_idle``: True if a step changes only the tokens that it fills. Then requests
    with rules of parallel unmasking run ahead too, and may have nothing to do in the
    last steps.
    """
    yield plans
    limits = [float(num_steps)]
    for request_id, first in plans.items():
        spec = specs[request_id]
        if not _is_known_ahead(first, spec):
            return
        if not fills_fixed_count(first, spec):
            before = progress[request_id]
            if not may_idle or not _depends_on_no_count(first, before, spec, plan):
                return
            # Half of the steps that the block would take at the pace of its last step,
            # so that few of them have nothing to do.
            limits.append(before.num_masked / (2 * max(before.last_unmasked, 1)))
    ahead = {i: _Ahead.of(plans[i], specs[i], progress[i]) for i in plans}
    for _ in range(1, math.ceil(min(limits))):
        try:
            if not all(request.plan_next(plan) for request in ahead.values()):
                return
        except Exception:
            logger.exception(_NOT_PLANNED)
            return
        if not all(does_same_work(ahead[i].plan, first) for i, first in plans.items()):
            return
        yield {i: request.plan for i, request in ahead.items()}


@dataclass
class _Ahead:
    """A request whose steps are planned before the steps ahead of them have run."""

    spec: DecodingSpec
    plan: StepPlan
    """Its last planned step."""
    progress: Progress
    """Progress if steps fill as many positions as planned, and by a rule one."""
    fewest: Progress | None
    """Progress if steps fill no position; None: they fill as many as planned."""

    @classmethod
    def of(cls, plan: StepPlan, spec: DecodingSpec, progress: Progress) -> Self:
        may_fill_none = plan.quota.may_fall_short or spec.ends.delay_eos
        fewest = replace(progress) if may_fill_none else None
        return cls(spec, plan, replace(progress), fewest)

    def plan_next(self, plan: Callable[[DecodingSpec, Progress], StepPlan]) -> bool:
        """Plan the next step. Returns False if the last one may finish the block, or if
        the number of positions to fill depends on the steps before.
        """
        count = self.plan.quota.count if fills_fixed_count(self.plan, self.spec) else 1
        if count >= self.progress.num_masked:
            return False
        self.progress.advance(self.spec, count)
        self.plan = plan(self.spec, self.progress)
        if self.fewest is None:
            return True
        count = self.plan.quota.count
        self.fewest.advance(self.spec, 0)
        self.plan = plan(self.spec, self.fewest)
        fewest_count = self.plan.quota.count
        fills_all = (
            count == self.progress.num_masked and fewest_count == self.fewest.num_masked
        )
        return count == fewest_count or fills_all


def _is_known_ahead(plan: StepPlan, spec: DecodingSpec) -> bool:
    """Return True if the host can plan the next step without the results of this one."""
    whole_window = plan.quota.candidates == plan.window
    needs_results = (
        spec.ends.early_stop
        or spec.reports.streams_steps
        or spec.unmasking.certainty_sigma is not None
    )
    needs_results |= plan.post_step > 0  # its result decides whether the block ends
    return (
        whole_window
        and not needs_results
        and not spec.text.is_constrained
        and spec.decision is None
        and spec.guidance is None
    )


def _depends_on_no_count(
    plan: StepPlan,
    progress: Progress,
    spec: DecodingSpec,
    plan_next: Callable[[DecodingSpec, Progress], StepPlan],
) -> bool:
    """Return True if the next steps do the same work, whatever this step fills, and
    each of them fills at least one position.
    """
    by_rule = (
        plan.quota.parallel is not None
        and spec.schedule.block_add_threshold is None
        and spec.unmasking.slow_fast is None
    )
    if not by_rule or progress.num_masked < 2:
        return False
    ahead = replace(progress)
    ahead.advance(spec, progress.num_masked - 1)
    try:
        return does_same_work(plan_next(spec, ahead), plan)
    except Exception:
        logger.exception(_NOT_PLANNED)
        return False


def does_same_work(plan: StepPlan, other: StepPlan) -> bool:
    """Return True if two steps differ only in the number of positions that they fill
    and in their random numbers.
    """
    if plan.span != other.span:  # finds most differences, and is cheap
        return False
    other_quota = other.quota
    quota = replace(
        plan.quota,
        count=other_quota.count,
        ratio=other_quota.ratio,
        left=other_quota.left,
    )
    same = replace(plan, quota=quota, forward=other.forward) == other
    return same and bool(plan.quota.count) == bool(other.quota.count)
