"""Specs, plans and page counts without an engine: the one place where tests ask the scheduler's pure functions."""

from typing import Any

from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.methods import CACHE_METHODS, methods_for
from dllm_engine.scheduler.methods.base import CacheOptions
from dllm_engine.scheduler.page_layout import PoolGeometry
from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import DecodingSpec
from dllm_engine.scheduler.step_plan import StepPlan

FULL_METHODS = {name: CACHE_METHODS[name] for name in methods_for("full")}
"""Cache methods for models that attend to the whole canvas."""
SHORT_INTERVALS: dict[str, dict[str, Any]] = {
    "dkv": {"refresh_interval": 3},
    "dllm_cache": {"prompt_refresh_interval": 3, "response_refresh_interval": 2},
    "maskkv": {"prompt_refresh_interval": 3, "response_refresh_interval": 2, "kv_budget": 8},
    "es_dllm": {"retention_ratio": 0.5},
}
"""Cache options by which a short response has every kind of step of its method."""
GEOMETRY = PoolGeometry(page_size=4, num_layers=4, num_kv_heads=2, head_dim=8, hidden_size=32, total_kv_heads=2)
"""A page holds 4 tokens: 8 slots of one head each, or 4 rows of features."""


def engine_options(cache_method: str = "none", page_size: int = 4, **cache_options: Any) -> EngineOptions:
    options = {"cache_method": cache_method, "page_size": page_size, "cache_options": cache_options}
    return EngineOptions.parse(options)


def cache_of(cache_method: str, **cache_options: Any) -> CacheOptions:
    return engine_options(cache_method, **cache_options).cache


def spec_of(**changes: Any) -> DecodingSpec:
    """A prompt of 10 tokens and a response of 21 in three blocks, the last of 5."""
    fields = {"prompt_length": 10, "gen_length": 21, "block_length": 8, "steps": 11, "schedule": "uniform"}
    fields |= {"unmasking": "low_confidence", "temperature": 0.0, "top_p": 1.0, "top_k": 0}
    return DecodingSpec(**(fields | changes))


def plan_of(spec: DecodingSpec, method: str, progress: Progress) -> StepPlan:
    return CACHE_METHODS[method].plan(spec, progress)


def plans_of(spec: DecodingSpec, method: str) -> list[StepPlan]:
    """All plans of a request whose steps unmask exactly what is asked."""
    progress, plans = Progress.begin(spec), []
    while progress.num_unmasked < spec.num_masks:
        plans.append(plan_of(spec, method, progress))
        progress.advance(spec, plans[-1].quota.count, retained=plans[-1].retained)
    return plans
