"""All request options beside vLLM's sampling parameters."""

from typing import Any

from dllm_engine.decoding.unmasking_policies import PARALLEL_RULES
from dllm_engine.families import ModelFamily
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.cache import CacheChanges
from dllm_engine.request_options.context import refused
from dllm_engine.request_options.decision import DecisionOptions
from dllm_engine.request_options.ends import EndOptions
from dllm_engine.request_options.guidance import GuideOptions
from dllm_engine.request_options.layout import AutoLengthOptions, LayoutOptions
from dllm_engine.request_options.reports import ReportOptions
from dllm_engine.request_options.sampling import SamplingOptions
from dllm_engine.request_options.schedule import ScheduleOptions
from dllm_engine.request_options.unmasking import PARALLEL_OPTIONS, UnmaskingOptions
from dllm_engine.text import shortened


class RequestOptions(
    # pydantic lists the options of the last class first.
    SamplingOptions,
    DecisionOptions,
    ReportOptions,
    GuideOptions,
    CacheChanges,
    EndOptions,
    UnmaskingOptions,
    ScheduleOptions,
    LayoutOptions,
    AutoLengthOptions,
):
    """Options without a field in vLLM's ``SamplingParams``. They travel in
    ``extra_args``, and over HTTP in ``vllm_xargs``."""


FACTS = RequestOptions.facts()
COUNT_OPTIONS = tuple(name for name, facts in FACTS.items() if facts.one_of == "counts")
"""Options that say how many tokens a step unmasks."""
CHECKPOINT_OPTIONS = tuple(
    name for name, facts in FACTS.items() if facts.default_by == "checkpoint"
)
"""Options that a checkpoint may have a default for."""
DEFAULTABLE_OPTIONS = tuple(
    name for name, facts in FACTS.items() if facts.default_by is not None
)
"""Options that an engine may have a default for."""

for _name in PARALLEL_OPTIONS:
    _declared_by = [
        group
        for group in RequestOptions.__mro__
        if _name in vars(group).get("__annotations__", ())
    ]
    if len(_declared_by) > 1 or _name in EngineOptions.model_fields:
        raise PARALLEL_RULES.error(
            _name, "another option has this name; give the rule another name"
        )


def check_exclusions(options: RequestOptions) -> None:
    """Refuse combinations of options that no model supports."""
    chosen = options.chosen
    rules = {name: value for name, value in chosen.items() if name in PARALLEL_OPTIONS}
    counts = {name: value for name, value in chosen.items() if name in COUNT_OPTIONS}
    if len(rules) > 1:
        raise refused(
            f"{_joined(rules)}: a step unmasks by one rule; give one of "
            f"{', '.join(PARALLEL_OPTIONS)}"
        )
    if len(counts) > 1:
        raise refused(
            f"{_joined(counts)} both say how many tokens a step unmasks; give one"
        )
    for name, value in options.effective.items():
        for other, because in FACTS[name].excludes:
            if other in chosen:
                raise refused(
                    f"{name}={value} and {other}={chosen[other]}: {because}; leave one "
                    f"of them unset"
                )


def _joined(values: dict[str, Any]) -> str:
    return " and ".join(f"{name}={value}" for name, value in values.items())


def check_attention(options: RequestOptions, family: ModelFamily) -> None:
    """Refuse options that the family's attention does not allow."""
    by_attention = {
        "full": f"{family.name} attends to the whole canvas",
        "block_causal": f"attention of {family.name} goes by blocks",
        "causal": f"attention of {family.name} is causal, but within the running block",
    }
    others = {
        "full": "a model that attends to the whole canvas",
        "block_causal": "a model whose attention goes by blocks",
        "causal": "a model whose attention is causal",
    }
    for name, value in options.effective.items():
        need = FACTS[name].needs_attention
        if need is not None and need.attention != family.attention:
            raise refused(
                f"{name}={shortened(value)}: {by_attention[family.attention]}: "
                f"{need.because}; leave it unset, or use {others[need.attention]}"
            )


def with_defaults(chosen: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Request options with defaults filled in."""
    replaced: set[str] = set()
    for name, value in chosen.items():
        if value != FACTS[name].off:
            replaced |= _REPLACED[name]
    kept = {name: value for name, value in defaults.items() if name not in replaced}
    return kept | chosen


def _replaced_by(name: str) -> frozenset[str]:
    """Options that get no default if a request sets this one."""
    facts = FACTS[name]
    names = {*facts.replaces, facts.one_of} - {None}
    names |= {exclusion.option for exclusion in facts.excludes}
    return frozenset(
        other
        for other, others_facts in FACTS.items()
        if {other, others_facts.one_of} & names
        or name in (exclusion.option for exclusion in others_facts.excludes)
    )


_REPLACED = {name: _replaced_by(name) for name in FACTS}
