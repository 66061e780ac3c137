"""MaskKV (arXiv 2510.09309): masked positions vote, and each KV head of each layer
retains as many prompt tokens as its budget allows. Later steps follow dLLM-Cache's
schedule."""

from typing import ClassVar, Literal, Self

from dllm_engine.cache_methods.adaptive import (
    AdaptiveOptions,
    feature_pages,
    plan_adaptive,
)
from dllm_engine.cache_methods.base import CacheMethod, PassCost, ScorerName
from dllm_engine.decoding.canvas_layout import Blocks
from dllm_engine.decoding.option_types import NotNegative, Positive, Share
from dllm_engine.decoding.page_layout import (
    PageCounts,
    PageKind,
    PoolGeometry,
    pages_for,
)
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import DecodingSpec, EvictingOptions, TunedValues
from dllm_engine.decoding.step_plan import Scope, StepPlan

LayerBudgetName = Literal["uniform", "boundary", "pyramid", "squeeze"]
HeadBudgetName = Literal["uniform", "prompt_preference", "adaptive"]
"""Names in ``budgets.py``, like ``LayerBudgetName``."""
ImportanceName = Literal["layer_importance", "attention_importance"]
"""1 − mean cosine between a token's hidden states before and after a layer (MaskKV,
equation 8), or before and after its attention, with the residual (SqueezeAttention,
arXiv 2404.04793)."""
MEASURED_IMPORTANCE: dict[LayerBudgetName, ImportanceName] = {
    "boundary": "layer_importance",
    "squeeze": "attention_importance",
}
"""The importance of layers that a budget needs. Other budgets need none."""
MaskKVScorerName = Literal[
    ScorerName,
    "h2o",
    "mask_voting_first",
    "mask_voting_second",
    "mask_voting_third",
    "mask_voting_last",
]


class MaskKVOptions(AdaptiveOptions, EvictingOptions):
    """Options of ``maskkv`` (MaskKV, arXiv 2510.09309). The defaults are the paper's."""

    tuned: ClassVar[TunedValues] = {
        "kv_budget": (128, 256, 512),
        "response_refresh_interval": (3, 5, 10),
    }

    response_refresh_interval: Positive = 5
    """Forward passes, or tokens, from one computation of the response to the next (Kr).
    """
    refresh_first_layer: bool = False
    """Recompute the whole response in the first layer in every pass, as dLLM-Cache's
    code does."""
    kv_budget: NotNegative | None = 256
    """Prompt tokens that a KV head of a layer retains, on average (B̄). None:
    ``retention_ratio`` alone decides. A prompt within the budget is retained whole."""
    retention_ratio: Share = 1.0
    """The largest share of the prompt that is retained, on average."""
    scorer: MaskKVScorerName = "mask_voting"
    """Score of a prompt token's importance to a head. With ``mask_voting_first`` to
    ``_last``, a quarter of the masks votes (Table 11)."""
    layer_budget: LayerBudgetName = "boundary"
    """Split of the budget between layers. ``boundary`` and ``squeeze`` depend on the
    importance of layers, which each request measures in its first forward pass; that
    pass then runs twice."""
    beta: Share = 0.4
    """Share of the average budget that every layer gets, for
    ``layer_budget="boundary"``.
    """
    head_budget: HeadBudgetName = "prompt_preference"
    """Split of a layer's budget between its heads."""
    alpha: Share = 0.1
    """Share of a layer's budget that every head gets, for
    ``head_budget="prompt_preference"``.
    """

    @property
    def largest(self) -> Self:
        """Options with the largest share of the prompt: a share of one prompt token
        rounds to none, while the heads of a rank may retain all of a few tokens.
        """
        return self.model_copy(update={"retention_ratio": 1.0})


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Algorithm 1: dLLM-Cache's schedule on the prompt tokens that the first pass has
    retained. A pass that refreshes only the prompt reuses the response unchanged."""
    plan = plan_adaptive(spec, progress)
    plan.retained = average_budget(spec) + spec.layout.gen_length
    if plan.scope is Scope.PROMPT:
        plan.own = None
    return plan


def average_budget(spec: DecodingSpec) -> int:
    """Prompt tokens that a KV head of a layer retains on average; the whole prompt if
    nothing is evicted.
    """
    options = MaskKVOptions.of(spec)
    average = int(spec.layout.prompt_length * options.retention_ratio)
    return average if options.kv_budget is None else min(average, options.kv_budget)


def measures_layers(spec: DecodingSpec) -> bool:
    """Return True if the first forward pass of a request measures the importance of
    layers for its budgets.
    """
    return (
        MaskKVOptions.of(spec).layer_budget in MEASURED_IMPORTANCE
        and 0 < average_budget(spec) < spec.layout.prompt_length
    )


def num_runs(spec: DecodingSpec, plan: StepPlan) -> int:
    """Number of runs of a step: a first pass that measures layers runs twice."""
    return 2 if plan.forward == 0 and measures_layers(spec) else 1


def hold_budget_and_features(
    spec: DecodingSpec, running: Blocks, geometry: PoolGeometry
) -> PageCounts:
    """Pages of a request. All layers share one table, because the size of each part is
    known only after the layer has voted. A layer's whole budget may go to the heads of
    one rank, up to the whole prompt, so most pages are needed if layers have equal
    budgets."""
    heads = geometry.num_kv_heads
    prompt = min(
        spec.layout.prompt_length * heads,
        average_budget(spec) * geometry.total_kv_heads,
    )
    slots = geometry.num_layers * (prompt + spec.layout.gen_length * heads)
    return {
        PageKind.KV: [pages_for(slots, geometry.page_size * heads)],
        PageKind.FEATURES: feature_pages(spec, geometry),
    }


MASKKV = CacheMethod(
    plan,
    hold_budget_and_features,
    MaskKVOptions,
    "dllm_engine.cache_methods.maskkv.layer_pass:MaskKVPass",
    cost=PassCost(num_runs=num_runs),
)
