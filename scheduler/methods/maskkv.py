"""MaskKV (arXiv 2510.09309): the masked positions vote, and each KV head of each layer retains what its budget allows
of the prompt; from then on dLLM-Cache's schedule."""

import json
import logging
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from dllm_engine.scheduler.methods import dllm_cache
from dllm_engine.scheduler.methods.base import CacheMethod, ScorerName, WindowWidth
from dllm_engine.scheduler.methods.dllm_cache import DLLMCacheOptions, feature_pages
from dllm_engine.scheduler.methods.layer_budgets import layer_budgets
from dllm_engine.scheduler.page_layout import PageCounts, PageKind, PoolGeometry, pages_for
from dllm_engine.scheduler.request import Blocks, CacheOptions, DecodingSpec, Progress
from dllm_engine.scheduler.step_plan import Scope, StepPlan

logger = logging.getLogger(f"vllm.{__name__}")

LayerBudgetName = Literal["uniform", "boundary", "pyramid", "squeeze"]
HeadBudgetName = Literal["uniform", "prompt_preference", "adaptive"]


def read_profile(path: str) -> list[float]:
    """The layer importances in a file that ``dllm profile`` wrote; raises ``ValueError`` where it is none."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))["layer_importance"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a layer profile ({type(error).__name__}: {error}); make one with `dllm profile`"
        ) from None


class MaskKVOptions(DLLMCacheOptions):
    """Options of ``maskkv`` (MaskKV, arXiv 2510.09309). The defaults are the paper's."""

    response_refresh_interval: int = Field(default=5, ge=1)
    """As in ``dllm_cache``."""
    refresh_first_layer: bool = False
    """As in ``dllm_cache``."""
    kv_budget: int | None = Field(default=256, ge=0)
    """Prompt tokens that a KV head of a layer retains, on average (B̄). None: ``retention_ratio`` alone decides. A
    prompt within the budget is retained whole."""
    retention_ratio: float = Field(default=1.0, ge=0, le=1)
    """The largest share of the prompt that is retained, on average."""
    scorer: ScorerName = "mask_voting"
    """How the importance of a prompt token for a head is scored."""
    observation_window: int = Field(default=32, ge=1)
    """Number of last prompt tokens that vote, for ``scorer="snapkv"``."""
    pool_kernel_size: WindowWidth = 1
    """Width of the max-pooling over a head's scores before its tokens are ranked, which retains the neighbours of
    important tokens too (from SnapKV, not in the paper). Odd; 1 turns it off. Budgets use the unpooled scores."""
    layer_budget: LayerBudgetName = "boundary"
    """How the budget is split between layers. ``boundary`` and ``squeeze`` need a ``profile``; without one all layers
    get the same."""
    beta: float = Field(default=0.4, ge=0, le=1)
    """Share of the average budget that every layer gets, for ``layer_budget="boundary"``."""
    head_budget: HeadBudgetName = "prompt_preference"
    """How a layer's budget is split between its heads."""
    alpha: float = Field(default=0.1, ge=0, le=1)
    """Share of a layer's budget that every head gets, for ``head_budget="prompt_preference"``."""
    redistribute: bool = False
    """Give what rounding down and short prompts leave of the budgets to other layers and heads (not in the paper)."""
    profile: tuple[float, ...] | None = None
    """Importance of each layer, from 0 to 2, or a file that ``dllm profile`` wrote. None: all layers are alike."""

    @field_validator("profile", mode="before")
    @classmethod
    def _read_profile(cls, value: Any) -> Any:
        return read_profile(value) if isinstance(value, str) else value

    @field_validator("profile")
    @classmethod
    def _sensible_profile(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None and (not value or not all(0 <= score <= 2 for score in value)):
            raise ValueError("needs one number from 0 to 2 per layer: 1 minus a mean cosine")
        return value


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Algorithm 1: dLLM-Cache's schedule on what the first pass retained of the prompt. A pass that refreshes
    the prompt alone reuses the response as it is."""
    assert isinstance(spec.cache, MaskKVOptions)
    plan = dllm_cache.plan(spec, progress)
    retained = min(average_budget(spec.cache, spec.prompt_length), spec.prompt_length) + spec.gen_length
    return replace(plan, retained=retained, num_updated=None if plan.scope is Scope.PROMPT else plan.num_updated)


def average_budget(options: MaskKVOptions, prompt_length: int) -> int:
    """Prompt tokens that a KV head of a layer retains, on average; the whole prompt where nothing is evicted."""
    average = int(prompt_length * options.retention_ratio)
    return average if options.kv_budget is None else min(average, options.kv_budget)


@lru_cache(maxsize=256)
def prompt_budgets(options: MaskKVOptions, prompt_length: int, num_layers: int) -> list[int]:
    """Prompt tokens per KV head that each layer retains, on average over its heads."""
    return layer_budgets(
        options.layer_budget,
        average_budget(options, prompt_length),
        options.profile,
        num_layers,
        prompt_length,
        base_share=options.beta,
        redistribute=options.redistribute,
    )


def hold_budget_and_features(spec: DecodingSpec, running: Blocks, geometry: PoolGeometry) -> PageCounts:
    """Heads differ in what they retain, and all of a layer's budget may fall to the heads of one rank."""
    assert isinstance(spec.cache, MaskKVOptions)
    heads, slots_per_page = geometry.num_kv_heads, geometry.page_size * geometry.num_kv_heads
    kv = [
        pages_for(
            min(spec.prompt_length * heads, budget * geometry.total_kv_heads) + spec.gen_length * heads, slots_per_page
        )
        for budget in prompt_budgets(spec.cache, spec.prompt_length, geometry.num_layers)
    ]
    return {PageKind.KV: kv, PageKind.FEATURES: feature_pages(spec, geometry)}


def check(options: MaskKVOptions, num_layers: int, guided: bool) -> None:
    """The profile must be of the model; without one, layer budgets that go by it are all alike."""
    if options.profile is None:
        if options.layer_budget in ("boundary", "squeeze"):
            logger.warning(
                "maskkv has no layer profile, so layer_budget=%r gives every layer the same; make one with `dllm "
                "profile` and pass it as cache_options={'profile': FILE}",
                options.layer_budget,
            )
    elif len(options.profile) != num_layers:
        raise ValueError(
            f"cache option profile has {len(options.profile)} layers, the model has {num_layers}; make one for this "
            f"model with `dllm profile`"
        )


def largest(options: MaskKVOptions) -> CacheOptions:
    """A share of one prompt token is none, while of a few a layer, or the heads of a rank, may retain them all."""
    return options.model_copy(update={"retention_ratio": 1.0})


TUNED = {"kv_budget": (128, 256, 512), "response_refresh_interval": (3, 5, 10)}
MASKKV = CacheMethod(plan, hold_budget_and_features, MaskKVOptions, check=check, largest=largest, tuned=TUNED)
