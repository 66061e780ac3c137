"""Fast-dLLM (arXiv 2505.22618), PrefixCache: everything before the window is kept."""

from dllm_engine.cache_methods.base import (
    CacheMethod,
    hold_tokens,
    plan_behind_prefix,
)
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import DecodingSpec
from dllm_engine.decoding.step_plan import StepPlan


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """The first step of a window keeps everything before it. Other steps compute the
    window and everything behind it.
    """
    window = progress.window(spec)
    start = window.start if progress.step else progress.num_shared
    return plan_behind_prefix(
        spec, progress, start, spec.layout.visible(window).stop, keep=window.start
    )


PREFIX = CacheMethod(
    plan,
    hold_tokens(lambda spec, running: spec.layout.span_of(running).start),
    trims_suffix=True,
    shares_prompts=True,
)
