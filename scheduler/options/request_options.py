"""What a request may ask for beside vLLM's sampling parameters, and who may have a default for it."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from dllm_engine.options import explain
from dllm_engine.scheduler.unmasking import SlowFast

DEFAULT_GEN_LENGTH = 256
"""Response tokens of a request that names no length, unless the checkpoint says otherwise."""

PARALLEL_OPTIONS = (
    *("threshold", "factor", "entropy_bound", "entropy_budget", "margin", "entropy_threshold", "slow_fast"),
)
"""Request options that ask for parallel unmasking, each by the rule of its name; a request may set one of them."""
COUNT_OPTIONS = ("tokens_per_step", "steps_per_block", "steps")
"""Request options that say how many tokens a step unmasks; a request may set one of them."""
GUIDE_OPTIONS = ("speculation_length", "guide_top_k", "guide_threshold", "guide_fallback", "guide_correction")
"""Request options about how the guide decides; the fields of ``Guidance`` have their names without ``guide_``."""
CHECKPOINT_OPTIONS = (
    *("block_length", "steps", "steps_per_block", "tokens_per_step", "unmasking", "certainty_sigma"),
    *PARALLEL_OPTIONS,
    *("block_add_threshold", "early_stop"),
)
"""Request options that a checkpoint may have a default for: those that mean the same in every engine."""
DEFAULTABLE_OPTIONS = (*CHECKPOINT_OPTIONS, "suffix_blocks", "retention_ratio", "guided", *GUIDE_OPTIONS)
"""Request options that an engine may have a default for."""
CONSTRAINT = "constraint"
"""Where the automaton of ``structured_outputs`` travels in a request's ``extra_args``."""
_MOST_TOKENS = (1 << 31) - 1
"""More than any model's context or vocabulary holds."""


class InvalidRequestError(VLLMValidationError, ValueError):
    """A request that cannot be served as asked. vLLM's server answers it with 400."""


def _parsed(value: Any) -> Any:
    """What may come as JSON, since ``vllm_xargs`` takes neither null nor an object."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from None


def read_slow_fast(value: Any) -> Any:
    """Options of ``SlowFast``, checked, from JSON too; None stays None."""
    given = _parsed(value)
    try:
        SlowFast.model_validate({} if given is None else given)
    except ValidationError as error:
        raise ValueError(explain(error, "slow_fast option", SlowFast.model_fields)) from None
    return given


class RequestOptions(BaseModel):
    """The options that vLLM's ``SamplingParams`` has no field for; they travel in ``extra_args``.

    Over HTTP a client sets them in ``vllm_xargs``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    block_length: int | None = Field(default=None, ge=1, le=_MOST_TOKENS)
    steps: int | None = Field(default=None, ge=1, le=_MOST_TOKENS)
    steps_per_block: int | None = Field(default=None, ge=1, le=_MOST_TOKENS)
    tokens_per_step: int | None = Field(default=None, ge=1, le=_MOST_TOKENS)
    unmasking: str | None = None
    certainty_sigma: float | None = Field(default=None, ge=0.01, le=1e6)
    threshold: float | None = Field(default=None, gt=0, le=1)
    factor: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    entropy_bound: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    entropy_budget: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    margin: float | None = Field(default=None, gt=0, le=1)
    entropy_threshold: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    slow_fast: Annotated[dict[str, Any] | None, BeforeValidator(read_slow_fast)] = None
    block_add_threshold: float | None = Field(default=None, ge=0, le=1)
    suffix_blocks: int | None = Field(default=None, ge=0, le=_MOST_TOKENS)
    early_stop: bool | None = None
    retention_ratio: float | None = Field(default=None, ge=0, le=1)
    delay_eos: bool | None = None
    guided: bool | None = None
    speculation_length: int | None = Field(default=None, ge=1, le=_MOST_TOKENS)
    guide_top_k: int | None = Field(default=None, ge=1, le=_MOST_TOKENS)
    guide_threshold: float | None = Field(default=None, gt=0, lt=1)
    guide_fallback: Literal["guide", "draft"] | None = None
    guide_correction: bool | None = None
    stream_granularity: Literal["block", "step"] | None = None
    response_template: Annotated[list[int | None], BeforeValidator(_parsed)] | None = None
    return_given: bool | None = None
    return_order: bool | None = None
    trace: bool | None = None
    # vLLM clears its own fields of these names for greedy requests; Dream's confidences depend on them there too.
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=_MOST_TOKENS)

    @property
    def returned_length(self) -> int | None:
        """Tokens that come back by ``response_template``; None without one."""
        template = self.response_template
        if template is None:
            return None
        return template.count(None) if self.return_given is False else len(template)


def request_options(params: SamplingParams) -> RequestOptions:
    """The options in a request's ``extra_args``; raises ``InvalidRequestError`` naming what is wrong with which."""
    carried = {CONSTRAINT} if constraint_in(params) is not None else set()
    return parse_request_options({name: x for name, x in (params.extra_args or {}).items() if name not in carried})


def constraint_in(params: SamplingParams) -> bytes | None:
    """What a request's text must match, as ``Automaton.packed``; None: anything. Clients cannot send bytes."""
    given = (params.extra_args or {}).get(CONSTRAINT)
    return given if isinstance(given, bytes) else None


def parse_request_options(raw: dict[str, Any]) -> RequestOptions:
    """Validate request options; raises ``InvalidRequestError`` naming what is wrong with which."""
    try:
        return RequestOptions.model_validate(raw)
    except ValidationError as error:
        raise InvalidRequestError(explain(error, "request option", RequestOptions.model_fields)) from None


def with_defaults(chosen: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Request options with defaults for what they leave open. Steps, tokens per step and the rules of parallel
    unmasking are alternatives: who names one of them gets no default rule and number, and who names steps, tokens per
    step or SlowFast sampling runs one block at a time. Who says how the guide decides wants it."""
    left_out: set[str] = set()
    counts = chosen.keys() & {*COUNT_OPTIONS}
    if counts or chosen.keys() & {*PARALLEL_OPTIONS}:
        left_out.update(("steps_per_block", "tokens_per_step", *PARALLEL_OPTIONS))
    if "block_add_threshold" in chosen:
        left_out.add("steps_per_block")
    if counts:
        left_out.update(("steps", "block_add_threshold"))
    if chosen.keys() & {*GUIDE_OPTIONS}:
        left_out.add("guided")
    if "slow_fast" in chosen:
        left_out.add("block_add_threshold")
    return {name: value for name, value in defaults.items() if name not in left_out} | chosen
