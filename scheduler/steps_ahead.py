"""Steps whose work is known before those ahead of them have run, so that a device may get them all at once."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import DecodingSpec
from dllm_engine.scheduler.step_plan import StepPlan, fills_fixed_count


def steps_known_ahead(
    plans: dict[str, StepPlan],
    progress: Mapping[str, Progress],
    specs: Mapping[str, DecodingSpec],
    plan: Callable[[DecodingSpec, Progress], StepPlan],
    num_steps: int,
) -> list[dict[str, StepPlan]]:
    """Plans of a step and of the following steps that do the same work on other tokens: steps of a block, each of which
    unmasks a fixed number of tokens.

    Args:
        plans, progress: of the requests of the step, before it.
        specs: of these requests.
        plan: the next step of a request.
        num_steps: the most steps wanted.

    Returns:
        At least one step, ``plans``. All steps except the last leave every block unfinished.
    """
    run = [plans]
    if not all(_is_known_ahead(first, specs[request_id]) for request_id, first in plans.items()):
        return run
    ahead = {request_id: replace(progress[request_id]) for request_id in plans}
    while len(run) < num_steps:
        for request_id, last in run[-1].items():
            if last.quota.count >= ahead[request_id].num_masked:
                return run
            ahead[request_id].advance(specs[request_id], last.quota.count)
        try:
            following = {request_id: plan(specs[request_id], p) for request_id, p in ahead.items()}
        except Exception:
            return run  # the step itself will fail, and only the request whose plan it is
        if not all(does_same_work(following[request_id], first) for request_id, first in plans.items()):
            return run
        run.append(following)
    return run


def _is_known_ahead(plan: StepPlan, spec: DecodingSpec) -> bool:
    """Return True if the number of positions that a step fills is known before it runs, and the host needs no other
    result of it."""
    whole_window = plan.quota.candidates == plan.window
    asks = spec.delay_eos or spec.early_stop or spec.needs_per_step_output or spec.certainty_sigma is not None
    return whole_window and fills_fixed_count(plan, spec) and not asks and spec.constraint is None


def does_same_work(plan: StepPlan, other: StepPlan) -> bool:
    """Return True if two steps differ only in the number of positions that they fill and in their random numbers."""
    if plan.span != other.span:  # most of those that differ, and quickly told
        return False
    quota = replace(plan.quota, count=other.quota.count, ratio=other.quota.ratio)
    alike = replace(plan, quota=quota, forward=other.forward) == other
    return alike and bool(plan.quota.count) == bool(other.quota.count)
