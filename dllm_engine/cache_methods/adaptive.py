"""dLLM-Cache's schedule (arXiv 2506.06295): prompt and response are refreshed at
separate intervals, and between refreshes the response rows that have changed most are
recomputed.
"""

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import model_validator

from dllm_engine.cache_methods.base import plan_on_canvas
from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.option_types import Positive, Share
from dllm_engine.decoding.page_layout import PoolGeometry
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import CacheOptions, DecodingSpec
from dllm_engine.decoding.step_plan import Scope, StepPlan


class AdaptiveOptions(CacheOptions):
    """Options of dLLM-Cache's schedule (arXiv 2506.06295). Intervals count forward
    passes over the response. If a pass may unmask any number of tokens (parallel
    unmasking, a guide), ``interval_unit`` decides what they count."""

    prompt_refresh_interval: Positive = 50
    """Forward passes, or tokens, from one computation of the prompt to the next (Kp).
    """
    response_refresh_interval: Positive = 7
    """Forward passes, or tokens, from one computation of the response to the next (Kr).
    """
    interval_unit: Literal["tokens", "passes"] = "tokens"
    """Unit of the intervals if a pass may unmask several tokens (parallel unmasking, a
    guide): unmasked tokens, or forward passes."""
    update_ratio: Share = 0.25
    """Share of the response rows that each layer recomputes in the other passes (ρ)."""
    similarity: Literal["value", "key", "random"] = "value"
    """Choice of these rows: those whose new value (or key) differs most from the cached
    one. ``random``: at random in each layer and pass, as a baseline; then only the
    chosen rows are renewed (Figure 5)."""
    similarity_metric: Literal["cosine", "l2"] = "cosine"
    """Comparison of new and cached values: by their angle, or by their L2 distance
    (appendix A.5, which finds it far worse)."""
    exclude_prompt_states: bool = True
    """Keep no features of prompt rows, because nothing reads them (MaskKV's
    prompt-state exclusion). False: keep them, as dLLM-Cache's code does. That takes
    more memory and changes no token."""
    refresh_first_layer: bool = True
    """Recompute the whole response in the first layer in every pass, as dLLM-Cache's
    code does; the paper does not say so. False: choose rows as in other layers. Only
    rows that were just unmasked have changed there, because a row's value in the first
    layer depends on its token alone."""

    @model_validator(mode="after")
    def _metric_has_a_use(self) -> Self:
        if self.similarity == "random" and self.similarity_metric != "cosine":
            raise ValueError(
                f"similarity='random' compares nothing, so "
                f"similarity_metric={self.similarity_metric!r} has no use; leave one "
                f"out"
            )
        return self


@dataclass(frozen=True)
class AdaptiveStep:
    """A step that recomputes, in each layer, the response rows that have changed most."""

    num_updated: int
    """Rows that each layer recomputes. With 0 rows, the values that rows are compared
    by are still renewed.
    """


def plan_adaptive(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Algorithm 1: prompt and response are recomputed at separate intervals, counted
    over the whole response (``_due``). In between, each layer recomputes
    ``update_ratio`` of the response rows. A ratio of 0 reuses the response unchanged. A
    ratio that amounts to less than a row recomputes no row, but still replaces all
    values.
    """
    options = AdaptiveOptions.of(spec)
    prompt_due = _due(options.prompt_refresh_interval, spec, progress)
    response_due = _due(options.response_refresh_interval, spec, progress)
    span = (
        spec.layout.canvas_span
        if prompt_due
        else Span(live_start(spec), spec.layout.canvas_length)
    )
    scope = {
        (True, True): Scope.ALL,
        (True, False): Scope.PROMPT,
        (False, True): Scope.RESPONSE,
        (False, False): Scope.ACTIVE,
    }[prompt_due, response_due]
    plan = plan_on_canvas(spec, progress, scope, span)
    if response_due or options.update_ratio == 0:
        return plan
    plan.own = AdaptiveStep(
        int((plan.span.stop - spec.layout.prompt_length) * options.update_ratio)
    )
    return plan


def _due(interval: int, spec: DecodingSpec, progress: Progress) -> bool:
    """Return True if an interval, counted over the whole response, begins with this
    forward pass.

    The paper counts forward passes (``interval_unit="passes"``). But changed tokens
    make the cache stale, so by default intervals count tokens where a pass may unmask
    any number of them.
    """
    if AdaptiveOptions.of(spec).interval_unit == "passes" or (
        spec.unmasking.parallel is None and spec.guidance is None
    ):
        return progress.num_forwards % interval == 0
    return progress.num_forwards == 0 or progress.passed_multiple_of(interval)


def live_start(spec: DecodingSpec) -> int:
    """First canvas position whose hidden state every step needs (MaskKV's prompt-state
    exclusion). Only later layers of the same row read the state of a prompt row, except
    that with shifted logits the last row predicts the response's first token."""
    if not AdaptiveOptions.of(spec).exclude_prompt_states:
        return 0
    return max(spec.layout.prompt_length - spec.layout.shifts_logits, 0)


def feature_pages(spec: DecodingSpec, geometry: PoolGeometry) -> list[int]:
    """Pages of features per layer. A layer that recomputes every live row in every step
    needs none.
    """
    features = [
        geometry.feature_pages(
            spec.layout.canvas_length - live_start(spec), geometry.hidden_size
        )
    ] * geometry.num_layers
    return (
        [0, *features[1:]] if AdaptiveOptions.of(spec).refresh_first_layer else features
    )
