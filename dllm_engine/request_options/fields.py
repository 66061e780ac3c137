"""The options of a request beside vLLM's sampling parameters: what each means, and who
may have a default for it.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    create_model,
)

from dllm_engine.decoding.unmasking_policies import MOST_TOKENS, PARALLEL_RULES
from dllm_engine.options import EngineOptions
from dllm_engine.text import parsed_json

PARALLEL_OPTIONS = tuple(
    name for name, rule in PARALLEL_RULES.items() if rule.option is not None
)
"""Request options that ask for parallel unmasking, each by the rule of its name; a
request may set one of them.
"""
COUNT_OPTIONS = ("tokens_per_step", "steps_per_block", "steps")
"""Request options that say how many tokens a step unmasks; a request may set one of
them.
"""
END_OPTIONS = ("confidence_eos_eot_inf", "logits_eos_inf")
"""The switches of LLaDA's evaluation, against end tokens that come too early."""
GUIDE_OPTIONS = (
    "speculation_length",
    "guide_top_k",
    "guide_threshold",
    "guide_fallback",
    "guide_correction",
)
"""Request options about how the guide decides; the fields of ``Guidance`` have their
names without ``guide_``.
"""
CHECKPOINT_OPTIONS = (
    *(
        "block_length",
        "steps",
        "steps_per_block",
        "tokens_per_step",
        "unmasking",
        "certainty_sigma",
    ),
    *PARALLEL_OPTIONS,
    *(
        "edit_threshold",
        "max_post_steps",
        "block_add_threshold",
        "early_stop",
        *END_OPTIONS,
        "alg_temp",
    ),
)
"""Request options that a checkpoint may have a default for: those that mean the same in
every engine.
"""
DEFAULTABLE_OPTIONS = (
    *CHECKPOINT_OPTIONS,
    "suffix_blocks",
    "retention_ratio",
    "guided",
    *GUIDE_OPTIONS,
)
"""Request options that an engine may have a default for."""


class ScheduleOptions(BaseModel):
    """Blocks and schedule of a response, and the policy that ranks positions."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    block_length: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Response tokens denoised together, at most ``gen_length``. The last block may be
    shorter. SDAR and LLaDA2 attend by blocks of this length, counted from the prompt's
    first token; it may be longer than the response."""
    steps: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Denoising steps of the whole response, at most ``gen_length``. They are split
    between blocks by their length; each block gets at least one."""
    steps_per_block: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Denoising steps of each block, instead of ``steps``; at most one per token. With
    a rule of parallel unmasking, a step fills at least what this schedule would fill.
    No effect with ``entropy_budget``."""
    tokens_per_step: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Tokens that each step unmasks, instead of ``steps`` and of a family's schedule.
    With a rule of parallel unmasking, the least number (d2Cache)."""
    unmasking: str | None = None
    """Unmasking policy: which masked positions are filled first. With a rule of
    parallel unmasking, the default is the policy that measures what the rule needs."""
    certainty_sigma: float | None = Field(default=None, ge=0.01, le=1e6)
    """Multiply the confidence of a position by the share of known tokens near it,
    weighted by a Gaussian of this width in tokens (the certainty prior of d2Cache). For
    policies that measure a probability or a margin."""


def _rule_fields() -> dict[str, Any]:
    """Fields for the options that ask for rules, as the rules declare them."""
    fields = {}
    for name in PARALLEL_OPTIONS:
        rule = PARALLEL_RULES[name]
        kind, *limits = (
            get_args(rule.option)
            if get_origin(rule.option) is Annotated
            else (rule.option,)
        )
        description = Field(description=rule.meaning)
        try:
            annotation = Annotated[kind | None, *limits, description]  # type: ignore[valid-type]
            TypeAdapter(annotation)
        except Exception as error:
            raise PARALLEL_RULES.error(
                name, f"option={rule.option!r} is no type with limits: {error}"
            ) from error
        if not rule.meaning:
            raise PARALLEL_RULES.error(name, "the option needs a meaning")
        fields[name] = annotation, None
    return fields


if TYPE_CHECKING:
    RuleOptions = ScheduleOptions
else:
    RuleOptions = create_model(
        "RuleOptions", __base__=ScheduleOptions, **_rule_fields()
    )


class RequestOptions(RuleOptions):
    """The options that vLLM's ``SamplingParams`` has no field for; they travel in
    ``extra_args``, over HTTP in ``vllm_xargs``."""

    block_add_threshold: float | None = Field(default=None, ge=0, le=1)
    """Several blocks at once (d3LLM): the next block joins the running ones once this
    share of the last one is decided. 0: one more block in every step; 1 or unset: one
    block at a time. Needs a rule of parallel unmasking."""
    edit_threshold: float | None = Field(default=None, ge=0, le=1)
    """Token editing (LLaDA2.1): each step also replaces decided tokens of the running
    block for which it predicts another token with a probability above this. A block
    then ends once a step that began without masks edits nothing. 1: no token is
    replaced. For models with attention by blocks."""
    max_post_steps: int | None = Field(default=None, ge=0, le=MOST_TOKENS)
    """With ``edit_threshold``: steps that a block may take after its last mask. Unset:
    16.
    """
    suffix_blocks: int | None = Field(default=None, ge=0, le=MOST_TOKENS)
    """Masked blocks after the running ones that a step computes (DPad). Unset: all of
    them. Cache methods that keep the whole canvas refuse it."""
    early_stop: bool | None = None
    """Drop everything after the first end token as soon as it is decided, even if
    tokens before it are still masked (d3LLM)."""
    retention_ratio: float | None = Field(default=None, ge=0, le=1)
    """Share to retain for this request, at most the engine's ``retention_ratio``. Cache
    methods that evict nothing refuse it."""
    delay_eos: bool | None = None
    """Hold back an end token while the position before it is masked and the response
    has no end token yet (ES-dLLM). Works with every cache method. Without a cache, it
    also selects the rest of ES-dLLM's sampler."""
    confidence_eos_eot_inf: bool | None = None
    """Fill positions whose predicted token ends the response or a turn after all
    others, and leave these tokens out of all confidences (LLaDA's evaluation). For
    policies that measure a probability, an entropy or a margin."""
    logits_eos_inf: bool | None = None
    """Never choose an end token, the ``eos_token_id`` of config.json (LLaDA's
    evaluation). The end of a turn still ends the response."""
    alg_temp: float | None = Field(default=None, ge=0, le=1e6)
    """Draw the positions that a step fills from the softmax of their confidences at
    this temperature (Dream). For the same policies, without a rule of parallel
    unmasking. 0: take the most confident."""
    guided: bool | None = None
    """Let the engine's guide model decide what a step fills (Guided Diffusion).
    Schedules, unmasking policies and rules then have no effect."""
    speculation_length: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Masked positions that are drafted and checked by the guide in a step, within the
    running block. Unset: 32.
    """
    guide_top_k: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """A draft passes if it is among this many best tokens of the guide. Unset: 1."""
    guide_threshold: float | None = Field(default=None, gt=0, lt=1)
    """Also fill every drafted position whose token has a probability above this,
    whether it passes or not. Drafts that pass are filled in any case."""
    guide_fallback: Literal["guide", "draft"] | None = None
    """Model whose token fills the first position when no draft passes. Unset: the
    guide.
    """
    guide_correction: bool | None = None
    """Fill positions whose drafts pass with the guide's tokens."""
    stream_granularity: Literal["block", "step"] | None = None
    """Content of a streamed response: finished blocks, or also the running block after
    each step (``outputs[i].provisional``)."""
    response_template: (
        Annotated[list[int | None], BeforeValidator(parsed_json)] | None
    ) = None
    """The response with given tokens: a token id where one is given, None where the
    model fills one in. ``gen_length`` is only an upper bound then, and may stay unset.
    """
    return_given: bool | None = None
    """False: leave the given tokens of ``response_template`` out of what is returned,
    and of ``gen_length``.
    """
    return_order: bool | None = None
    """Return for each token the forward pass that committed it and its log-probability
    then, as ``outputs[i].diffusion.committed_at`` and ``committed_logprobs``."""
    passes: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Decisions: the most forward passes. Each but the last commits the fields that it
    is surest of. Unset: 1.
    """
    trace: bool | None = None
    """Over HTTP: return the trace; the engine must record it (``trace=True``). In
    Python, ``outputs[i].diffusion`` always has it if the engine records it."""
    # vLLM clears its own fields of these names for greedy requests; Dream's confidences
    # depend on them there too.
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the smallest set of likeliest tokens whose probabilities reach this
    sum. It affects greedy requests too: Dream's confidences are those of the filtered
    distribution."""
    top_k: int | None = Field(default=None, ge=-1, le=MOST_TOKENS)
    """Sample from this many likeliest tokens; 0 or -1 means all. It applies to greedy
    requests as ``top_p`` does.
    """

    @property
    def rules(self) -> dict[str, Any]:
        """The rules of parallel unmasking that the request names, with their values."""
        values = {name: getattr(self, name) for name in PARALLEL_OPTIONS}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def returned_length(self) -> int | None:
        """Tokens that come back by ``response_template``; None without one."""
        template = self.response_template
        if template is None:
            return None
        return template.count(None) if self.return_given is False else len(template)


for _name in PARALLEL_OPTIONS:
    if _name in {
        *ScheduleOptions.model_fields,
        *RequestOptions.__annotations__,
        *EngineOptions.model_fields,
    }:
        raise PARALLEL_RULES.error(
            _name, "another option has this name; give the rule another name"
        )

_OTHER_COUNTS = ("steps_per_block", "tokens_per_step", *PARALLEL_OPTIONS)
_DEFAULTS_LEFT_OUT = {
    **dict.fromkeys(COUNT_OPTIONS, (*_OTHER_COUNTS, "steps", "block_add_threshold")),
    **dict.fromkeys(PARALLEL_OPTIONS, (*_OTHER_COUNTS, "alg_temp")),
    **dict.fromkeys(GUIDE_OPTIONS, ("guided",)),
    "slow_fast": (*_OTHER_COUNTS, "alg_temp", "block_add_threshold"),
    "block_add_threshold": ("steps_per_block", "slow_fast"),
    "alg_temp": (*PARALLEL_OPTIONS, "block_add_threshold"),
}
"""By what a request names, the defaults that it does not get. Steps, tokens per step
and parallel unmasking are alternatives, and so are a rule and drawing by confidences;
who names steps, tokens per step or SlowFast sampling runs one block at a time; and who
says how the guide decides wants it."""


def with_defaults(chosen: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Request options with defaults for what they leave open."""
    named = [name for name, value in chosen.items() if (name, value) != ("alg_temp", 0)]
    left_out = {
        default for name in named for default in _DEFAULTS_LEFT_OUT.get(name, ())
    }
    return {
        name: value for name, value in defaults.items() if name not in left_out
    } | chosen
