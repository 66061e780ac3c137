"""Steps whose work is known before the steps ahead of them have run, so that a device
can get all of them at once.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from vllm.logger import init_logger

from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import DecodingSpec
from dllm_engine.decoding.step_plan import StepPlan, fills_fixed_count

logger = init_logger(f"vllm.{__name__}")


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
    max_steps = float(num_steps)
    for request_id, first in plans.items():
        request_progress = progress[request_id]
        spec = specs[request_id]
        if not _is_known_ahead(first, spec):
            return
        if not fills_fixed_count(first, spec):
            if not may_idle or not _depends_on_no_count(
                first, request_progress, spec, plan
            ):
                return
            # Half of the steps that the block would take at the pace of its last step,
            # so that few of them have nothing to do.
            max_steps = min(
                max_steps,
                request_progress.num_masked
                / (2 * max(request_progress.last_unmasked, 1)),
            )
    ahead = {request_id: replace(progress[request_id]) for request_id in plans}
    # Progress of requests whose steps may fill fewer positions than planned, if the
    # steps fill none.
    behind = {
        i: replace(progress[i])
        for i, first in plans.items()
        if first.quota.may_fall_short or specs[i].ends.delay_eos
    }
    last_plans = plans
    for _ in range(1, math.ceil(max_steps)):
        for request_id, last in last_plans.items():
            count = (
                last.quota.count if fills_fixed_count(last, specs[request_id]) else 1
            )
            if count >= ahead[request_id].num_masked:
                return
            ahead[request_id].advance(specs[request_id], count)
            if request_id in behind:
                behind[request_id].advance(specs[request_id], 0)
        try:
            last_plans = {
                request_id: plan(specs[request_id], p)
                for request_id, p in ahead.items()
            }
            for request_id, fewest in behind.items():
                most_filled = last_plans[request_id].quota.count
                last_plans[request_id] = plan(specs[request_id], fewest)
                least_filled = last_plans[request_id].quota.count
                is_fixed = most_filled == least_filled
                fills_all = (
                    most_filled == ahead[request_id].num_masked
                    and least_filled == fewest.num_masked
                )
                if not is_fixed and not fills_all:
                    return
        except Exception:
            # The step is planned again later, and then only the request with the error
            # fails.
            logger.exception(
                "a step ahead cannot be planned; the steps before it run one by one"
            )
            return
        if not all(
            does_same_work(last_plans[request_id], first)
            for request_id, first in plans.items()
        ):
            return
        yield last_plans


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
        logger.exception(
            "a step ahead cannot be planned; the steps before it run one by one"
        )
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
