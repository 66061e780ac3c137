"""The rules of parallel unmasking, and the request options that ask for them."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from dllm_engine.decoding.unmasking_policies import SlowFast, UnmaskingRule
from dllm_engine.text import explain, parsed_json

_SELECTION = "dllm_engine.unmasking_rules.selection:"
_Share = Annotated[float, Field(ge=0, le=1)]
_Nats = Annotated[float, Field(ge=0, allow_inf_nan=False)]

THRESHOLD = UnmaskingRule(
    "probability",
    _SELECTION + "at_least",
    _Share,
    "Parallel unmasking (Fast-dLLM): fill every position of the block with at least "
    "this probability. For the policies ``low_confidence`` and ``maskgit_plus``. Other "
    "policies, if named, ignore it and keep their fixed count, as in Fast-dLLM's code.",
    else_counted=True,
    tuned=(0.95, 0.9, 0.8, 0.65),
)
"""Rule of Fast-dLLM (arXiv 2505.22618)."""
EXCEEDED_THRESHOLD = UnmaskingRule(
    "probability", _SELECTION + "above", else_counted=True
)
"""Rule of ES-dLLM (arXiv 2603.10088) in place of ``threshold``."""
FACTOR = UnmaskingRule(
    "probability",
    _SELECTION + "within_factor",
    Annotated[float, Field(gt=0, allow_inf_nan=False)],
    "Parallel unmasking (Fast-dLLM): fill the n most probable positions, for the "
    "largest n with (n + 1) · (1 − n-th probability) < ``factor``. For "
    "``low_confidence`` and ``maskgit_plus``; other policies are refused.",
    tuned=(0.5, 1.0, 2.0),
)
"""Rule of Fast-dLLM."""
ENTROPY_BOUND = UnmaskingRule(
    "entropy",
    _SELECTION + "within_bound",
    _Nats,
    "Parallel unmasking (EB-Sampler): fill the lowest-entropy positions while their "
    "total, excluding the largest, stays within this bound (in nats). For the policies "
    "``entropy`` and ``low_entropy``.",
    tuned=(0.1, 0.5, 1.5),
)
"""Rule of EB-Sampler (arXiv 2505.24857)."""
ENTROPY_BUDGET = UnmaskingRule(
    "entropy",
    _SELECTION + "within_budget",
    _Nats,
    "Parallel unmasking (SDAR, arXiv 2510.06303): fill the lowest-entropy positions "
    "while their total, including the last one, stays below this budget (in nats). For "
    "the policies ``entropy`` and ``low_entropy``.",
    least_by_schedule=False,
    tuned=(0.1, 0.35, 1.0),
)
MARGIN = UnmaskingRule(
    "margin",
    _SELECTION + "at_least",
    Annotated[float, Field(gt=0, le=1)],
    "Parallel unmasking: fill every position whose two likeliest tokens differ in "
    "probability by at least this. For the policy ``topk_margin``.",
    tuned=(0.9, 0.75, 0.5),
)
ENTROPY_THRESHOLD = UnmaskingRule(
    "entropy",
    _SELECTION + "entropy_at_most",
    _Nats,
    "Parallel unmasking (d3LLM): fill every position whose entropy is at most this (in "
    "nats; in some families below it). For the policy ``low_entropy``.",
    untempered=True,
    tuned=(0.2, 0.5, 1.0),
)
"""Rule of d3LLM (arXiv 2601.07568)."""
STRICT_ENTROPY_THRESHOLD = UnmaskingRule(
    "entropy", _SELECTION + "entropy_below", untempered=True, may_pass_none=True
)
"""Rule of d3LLM for some families, in place of ``entropy_threshold``."""


def _checked_slow_fast(value: Any) -> Any:
    options = parsed_json(value)
    try:
        SlowFast.model_validate({} if options is None else options)
    except ValidationError as error:
        raise ValueError(
            explain(error, "slow_fast option", SlowFast.model_fields)
        ) from None
    return options


SLOW_FAST = UnmaskingRule(
    "probability",
    _SELECTION + "at_least",
    Annotated[dict[str, Any], BeforeValidator(_checked_slow_fast)],
    "Parallel unmasking (SlowFast sampling): slow passes find the span in which the "
    "model is confident; fast passes fill it and do not compute what is after it. A "
    "dictionary of options; those left out are as in the authors' code for the family, "
    "and ``{}`` leaves out all. For the policy ``low_confidence``.",
    untempered=True,
    in_spans=True,
)
"""Rule of SlowFast sampling (arXiv 2506.10848)."""
