"""Options of decisions, and checks of options that decisions do not have."""

from typing import Annotated

from dllm_engine.constraints.decision import unpacked_decision
from dllm_engine.decoding.option_types import Count
from dllm_engine.decoding.spec import PackedDecision
from dllm_engine.request_options.context import RequestContext, refused
from dllm_engine.request_options.facts import Facts, OptionGroup

_UNUSED = {
    "temperature": 0.0,
    "min_tokens": 0,
    "logit_bias": None,
    "structured_outputs": None,
}
"""Parameters without meaning for a decision, with their values that have no effect."""


class DecisionOptions(OptionGroup):
    passes: Annotated[Count | None, Facts(in_decisions=True)] = None
    """Decisions: the most forward passes. Each but the last commits the fields that it
    is surest of. Unset: 1.
    """


def check_no_decision(own: DecisionOptions) -> None:
    if own.passes is not None:
        raise refused(
            f"passes={own.passes} counts the passes of a decision (POST "
            f"/v1/decisions, LLM.decide); leave it unset"
        )


def resolve_decision(
    request: RequestContext, own: DecisionOptions, packed: bytes
) -> tuple[PackedDecision, tuple[int | None, ...]]:
    """The decision and its template. Refuses options that only generation has, and
    decisions without a choice.
    """
    if request.family.seeds_blocks:
        raise refused(
            f"decisions of {request.family.name} are not supported: the row before a "
            f"block predicts its first token, so that no pass predicts all fields; use "
            f"structured output"
        )
    facts = own.facts()
    named = {
        name: value
        for name, value in own.chosen.items()
        if not facts[name].in_decisions and value != facts[name].off
    }
    for name, unused in _UNUSED.items():
        value = getattr(request.params, name)
        if value not in (unused, {}):
            named[name] = value
    for name, value in named.items():
        raise refused(
            f"{name}={value}: a decision has the model's own distribution, and its "
            f"passes commit whole fields; leave {name} unset"
        )
    template = unpacked_decision(packed).template
    if None not in template:
        raise refused(
            "fields: each has a single text, so that nothing is left to decide"
        )
    return PackedDecision(packed, own.passes or 1), template
