"""dKV-Cache-Decode (arXiv 2505.15781): keys and values of a token are kept one step
after it was decoded.
"""

from dataclasses import dataclass
from typing import ClassVar

from dllm_engine.cache_methods.base import CacheMethod, hold_canvas, plan_on_canvas
from dllm_engine.decoding.option_types import Positive
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import (
    CacheOptions,
    DecodingSpec,
    PaperSettings,
    TunedValues,
)
from dllm_engine.decoding.step_plan import Scope, StepPlan


class DKVOptions(CacheOptions):
    """Options of ``dkv`` (dKV-Cache-Decode, arXiv 2505.15781)."""

    paper_settings: ClassVar[PaperSettings] = {
        "LLaDA": {"": {"refresh_interval": 8}},
        "Dream": {"": {"refresh_interval": 4}},
    }
    tuned: ClassVar[TunedValues] = {"refresh_interval": (4, 8, 16)}

    refresh_interval: Positive = 8
    """Steps of a window from one computation of the whole canvas to the next."""


@dataclass(frozen=True)
class DKVStep:
    """A step whose computed rows depend on the masks."""

    last_row: bool = False
    """Compute the last row of the canvas as well, which predicts nothing with shifted
    logits.
    """


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Plan a step: recompute the canvas every ``refresh_interval`` steps, and in
    between the masked and just decoded rows.

    The canvas is also recomputed in a window's first two steps, because K/V of a
    decoded token can be kept in the second step at the earliest; with shifted logits
    only in the first step.
    """
    options = DKVOptions.of(spec)
    whole = progress.step % options.refresh_interval == 0 or (
        progress.step == 1 and not spec.layout.shifts_logits
    )
    scope = Scope.ALL if whole else Scope.ACTIVE
    plan = plan_on_canvas(spec, progress, scope, spec.layout.canvas_span)
    if whole:
        return plan
    # When the window began, at most the window and everything behind it was masked.
    plan.max_rows = plan.span.stop - plan.window.start
    # The last row predicts no token, so nothing tells when it is final. It counts as
    # final after the second step.
    plan.own = DKVStep(last_row=spec.layout.shifts_logits and progress.step == 1)
    if plan.own.last_row:
        plan.max_rows += 1
    return plan


DKV = CacheMethod(
    plan,
    hold_canvas,
    DKVOptions,
    "dllm_engine.cache_methods.dkv.layer_pass:MaskedRowsPass",
)
