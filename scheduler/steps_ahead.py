"""Steps whose work is known before those ahead of them have run, so that a device may get them all at once."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from dllm_engine.model_executor.step_batch import Canvas
from dllm_engine.model_executor.unmasking import UNMASKING_POLICIES
from dllm_engine.scheduler.request import DecodingSpec, Progress
from dllm_engine.scheduler.step_plan import StepPlan


def foreseen(
    plans: dict[str, StepPlan],
    progress: Mapping[str, Progress],
    canvases: Mapping[str, Canvas],
    plan: Callable[[DecodingSpec, Progress], StepPlan],
    num_steps: int,
) -> list[dict[str, StepPlan]]:
    """The plans of a step and of those after it that do the same work on other tokens: steps of a block that unmask a
    fixed number each, of no matter which positions.

    Args:
        plans, progress: of the requests of the step, before it.
        canvases: of all requests.
        plan: the next step of a request.
        num_steps: the most steps wanted.

    Returns:
        One step at least, ``plans``; all but the last leave every block unfinished.
    """
    run = [plans]
    if not all(_is_foreseeable(of_request, canvases[i]) for i, of_request in plans.items()):
        return run
    ahead = {request_id: replace(progress[request_id]) for request_id in plans}
    while len(run) < num_steps:
        for request_id, of_request in run[-1].items():
            if of_request.quota.count >= ahead[request_id].num_masked:
                return run
            ahead[request_id].advance(canvases[request_id].spec, of_request.quota.count, block_done=False)
        following = {request_id: plan(canvases[request_id].spec, p) for request_id, p in ahead.items()}
        if not all(_is_like(following[request_id], of_request) for request_id, of_request in plans.items()):
            return run
        run.append(following)
    return run


def is_watched(canvas: Canvas) -> bool:
    """Whether more is wanted of a request's predictions than to unmask the best of them."""
    return canvas.confidences is not None or canvas.logprobs is not None or canvas.spec.guidance is not None


def _is_foreseeable(plan: StepPlan, canvas: Canvas) -> bool:
    """Whether a step fills a number of positions that the host knows before, and nobody asks which of them."""
    spec, quota = canvas.spec, plan.quota
    by_count = quota.parallel is None and not UNMASKING_POLICIES[spec.unmasking].draws_each_position
    return by_count and quota.candidates == plan.block and not spec.delay_eos and not is_watched(canvas)


def _is_like(plan: StepPlan, other: StepPlan) -> bool:
    """Whether steps differ in nothing but how many positions they fill, if any, and with which random numbers."""
    quota = replace(plan.quota, count=other.quota.count, ratio=other.quota.ratio)
    alike = replace(plan, quota=quota, forward=other.forward) == other
    return alike and bool(plan.quota.count) == bool(other.quota.count)
