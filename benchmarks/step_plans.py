"""The steps of a request that unmasks one token per step, as a cache method plans them."""

from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.scheduler.request import CacheOptions, DecodingSpec, Progress
from dllm_engine.scheduler.step_plan import StepPlan


def request_spec(canvas: int, gen_length: int, block_length: int, cache: CacheOptions) -> DecodingSpec:
    """A greedy request of LLaDA's family; lengths in tokens."""
    return DecodingSpec(
        prompt_length=canvas - gen_length,
        gen_length=gen_length,
        block_length=block_length,
        steps=gen_length,
        schedule="uniform",
        unmasking="low_confidence",
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        cache=cache,
    )


def plans_of(method: str, spec: DecodingSpec) -> list[StepPlan]:
    """All steps of the request under a cache method."""
    plan, progress = CACHE_METHODS[method].plan, Progress(num_masked=spec.block_span(0).size)
    plans: list[StepPlan] = []
    while len(plans) < spec.gen_length:
        plans.append(plan(spec, progress))
        progress.advance(spec, num_unmasked=1, block_done=progress.num_masked == 1)
    return plans
