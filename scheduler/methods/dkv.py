"""dKV-Cache-Decode (arXiv 2505.15781): keys and values of a token are kept one step after it was decoded."""

from pydantic import Field

from dllm_engine.scheduler.methods.base import CacheMethod, hold_canvas, plan_on_canvas
from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import CacheOptions, DecodingSpec
from dllm_engine.scheduler.step_plan import RefreshState, RowRule, Scope, StepPlan


class DKVOptions(CacheOptions):
    """Options of ``dkv`` (dKV-Cache-Decode, arXiv 2505.15781)."""

    refresh_interval: int = Field(default=8, ge=1)
    """Steps of a window from one computation of the whole canvas to the next."""


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Recompute the canvas every ``refresh_interval`` steps; between, the masked rows and those just decoded.

    LLaDA recomputes all in a window's first two steps, because the second is the first in which a decoded token's
    own K/V could be kept; Dream in the first alone.
    """
    options = DKVOptions.of(spec)
    whole = progress.step % options.refresh_interval == 0 or (progress.step == 1 and not spec.shifts_logits)
    state, scope = (RefreshState.UPDATE, Scope.ALL) if whole else (RefreshState.REUSE, Scope.ACTIVE)
    plan = plan_on_canvas(spec, progress, state, scope, spec.canvas_span)
    if whole:
        return plan
    # At most the window and all behind it was masked when the window began.
    plan.rows, plan.max_rows = RowRule.MASKED_BEFORE, plan.span.stop - plan.window.start
    if spec.shifts_logits and progress.step == 1:
        # The last row predicts no token, so nothing says when it is final; it is taken to be after the second step.
        plan.rows, plan.max_rows = RowRule.MASKED_BEFORE_AND_LAST, plan.max_rows + 1
    return plan


DKV = CacheMethod(
    plan,
    hold_canvas,
    DKVOptions,
    "passes.paged:OverwritePass",
    # The authors' interval for Dream is half of LLaDA's.
    paper_settings={"LLaDA": {"": {"refresh_interval": 8}}, "Dream": {"": {"refresh_interval": 4}}},
    tuned={"refresh_interval": (4, 8, 16)},
)
