"""No cache: every step computes the whole canvas."""

from dllm_engine.scheduler.methods.base import CacheMethod
from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import DecodingSpec
from dllm_engine.scheduler.step_plan import RefreshState, Scope, StepPlan, step_plan


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Every step is FULL."""
    return step_plan(
        spec, progress, RefreshState.FULL, Scope.ALL, spec.visible(spec.span_of(progress.running)), window_alone=False
    )


# ES-dLLM's authors compare their cache with the same sampler without one; `delay_eos` asks for that.
NONE = CacheMethod(
    plan,
    attention=("full", "block_causal"),
    layer_pass="passes.base:DensePass",
    trims_suffix=True,
    uniform_sampler="with_delay_eos",
)
