"""Cache options and specs without an engine."""

import random
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from dllm_engine.cache_methods import CACHE_METHODS, methods_for
from dllm_engine.decoding.canvas_layout import CanvasLayout
from dllm_engine.decoding.spec import DecodingSpec, Schedule
from dllm_engine.families import LLADA, ModelFamily
from dllm_engine.options import EngineOptions
from dllm_engine.params import DiffusionParams
from dllm_engine.request_options.resolve import resolve_decoding

FULL_METHODS = {name: CACHE_METHODS[name] for name in methods_for("full")}
"""Cache methods for models that attend to the whole canvas."""
SHORT_INTERVALS: dict[str, dict[str, Any]] = {
    "dkv": {"refresh_interval": 3},
    "dllm_cache": {"prompt_refresh_interval": 3, "response_refresh_interval": 2},
    "maskkv": {
        "prompt_refresh_interval": 3,
        "response_refresh_interval": 2,
        "kv_budget": 8,
    },
    "es_dllm": {"retention_ratio": 0.5},
}
"""Cache options by which a short response has every kind of step of its method."""
POLICIES = ("low_confidence", "entropy", "topk_margin", "random", "origin")
WAYS: list[dict[str, Any]] = [{"unmasking": policy, "seed": 3} for policy in POLICIES]
WAYS += [
    {"threshold": 0.2},
    {"threshold": 0.2, "tokens_per_step": 2},
    {"factor": 0.5},
    {"entropy_bound": 0.5},
    {"margin": 0.3},
    {"entropy_threshold": 1.0, "block_add_threshold": 0.2},
    {"steps": 5},
    {"slow_fast": {"span_steps": 1, "span_threshold": 0.01, "fast_threshold": 0.2}},
    {"temperature": 0.5, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.4, "seed": 5, "confidence_eos_eot_inf": True, "logprobs": 1},
    {"alg_temp": 0.1, "seed": 4},
    {"logprobs": 3},
    {"delay_eos": True},
    {"return_order": True},
    {"confidence_eos_eot_inf": True},
]
"""Ways to unmask, of which a cache method may refuse some."""


EOS = 1
"""End token of ``resolved``'s models."""


def spec_of(**changes: Any) -> DecodingSpec:
    """A prompt of 10 tokens and a response of 21 in three blocks, the last of 5."""
    flat: dict[str, Any] = {
        "prompt_length": 10,
        "gen_length": 21,
        "block_length": 8,
        "steps": 11,
    }
    flat |= changes
    groups: dict[str, Any] = {
        name: group(
            **{f.name: flat.pop(f.name) for f in fields(group) if f.name in flat}
        )
        for name, group in (("layout", CanvasLayout), ("schedule", Schedule))
    }
    return DecodingSpec(**groups, **flat)


def settings_of(spec: DecodingSpec) -> dict[str, Any]:
    """All settings by the names of the request options."""
    groups = (getattr(spec, field.name) for field in fields(spec))
    settings = spec.cache.model_dump()
    for group in filter(is_dataclass, groups):
        settings |= {field.name: getattr(group, field.name) for field in fields(group)}
    return settings | {
        "unmasking": spec.unmasking.policy.name,
        "steps_per_block": spec.steps_per_block,
    }


def resolved(
    family: ModelFamily = LLADA,
    engine: EngineOptions | None = None,
    prompt_length: int = 10,
    **asked: Any,
) -> DecodingSpec:
    """What an engine makes of a request."""
    return resolve_decoding(
        DiffusionParams(**asked),
        prompt_length,
        SimpleNamespace(family=family, eos_token_id=EOS),
        engine or EngineOptions(),
    )


def draw_cache_options(draw: random.Random, method: str) -> dict[str, Any]:
    """Random values for most options of a cache method; all of them go together."""
    schemas = CACHE_METHODS[method].options.model_json_schema().get("properties", {})
    while True:
        drawn = {
            name: _draw_value(draw, schema)
            for name, schema in schemas.items()
            if draw.random() < 0.8
        }
        with suppress(ValueError):
            EngineOptions.parse({"cache_method": method, "cache_options": drawn})
            return drawn


def _draw_value(draw: random.Random, schema: dict[str, Any]) -> Any:
    schema = draw.choice(schema.get("anyOf", [schema]))
    if "enum" in schema:
        return draw.choice(schema["enum"])
    match schema["type"]:
        case "boolean":
            return draw.random() < 0.5
        case "integer":
            return schema["minimum"] + draw.choice([0, 1, draw.randrange(40)])
        case "number":
            least, most = schema["minimum"], schema["maximum"]
            return draw.choice([least, most, draw.uniform(least, most)])
    return schema.get("default")
