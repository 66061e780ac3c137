"""The options of a request beside vLLM's sampling parameters: what each means, and who
may have a default for it.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dllm_engine.decoding.unmasking_policies import MOST_TOKENS, SlowFast
from dllm_engine.options import explain

PARALLEL_OPTIONS = (
    *(
        "threshold",
        "factor",
        "entropy_bound",
        "entropy_budget",
        "margin",
        "entropy_threshold",
        "slow_fast",
    ),
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


def _parsed(value: Any) -> Any:
    """Parse a value that may be JSON, since ``vllm_xargs`` takes neither null nor an
    object.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from None


def _checked_slow_fast(value: Any) -> Any:
    given = _parsed(value)
    try:
        SlowFast.model_validate({} if given is None else given)
    except ValidationError as error:
        raise ValueError(
            explain(error, "slow_fast option", SlowFast.model_fields)
        ) from None
    return given


class RequestOptions(BaseModel):
    """The options that vLLM's ``SamplingParams`` has no field for; they travel in
    ``extra_args``, over HTTP in ``vllm_xargs``."""

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
    threshold: float | None = Field(default=None, ge=0, le=1)
    """Parallel unmasking (Fast-dLLM): fill every position of the block with at least
    this probability. For the policies ``low_confidence`` and ``maskgit_plus``. Other
    policies, if named, ignore it and keep their fixed count, as in Fast-dLLM's code."""
    factor: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Parallel unmasking (Fast-dLLM): fill the n most probable positions, for the
    largest n with (n + 1) · (1 − n-th probability) < ``factor``. For ``low_confidence``
    and ``maskgit_plus``; other policies are refused."""
    entropy_bound: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Parallel unmasking (EB-Sampler): fill the lowest-entropy positions while their
    total, excluding the largest, stays within this bound (in nats). For the policies
    ``entropy`` and ``low_entropy``."""
    entropy_budget: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Parallel unmasking (SDAR): fill the lowest-entropy positions while their total,
    including the last one, stays below this budget (in nats). For the policies
    ``entropy`` and ``low_entropy``."""
    margin: float | None = Field(default=None, gt=0, le=1)
    """Parallel unmasking: fill every position whose two likeliest tokens differ in
    probability by at least this. For the policy ``topk_margin``."""
    entropy_threshold: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Parallel unmasking (d3LLM): fill every position whose entropy is at most this (in
    nats; Dream: below it). For the policy ``low_entropy``."""
    slow_fast: Annotated[dict[str, Any] | None, BeforeValidator(_checked_slow_fast)] = (
        None
    )
    """Parallel unmasking (SlowFast sampling): slow passes find the span in which the
    model is confident; fast passes fill it and do not compute what is after it. A
    dictionary of options; those left out are as in the authors' code for the family,
    and ``{}`` leaves out all. For the policy ``low_confidence``."""
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
    response_template: Annotated[list[int | None], BeforeValidator(_parsed)] | None = (
        None
    )
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
    def returned_length(self) -> int | None:
        """Tokens that come back by ``response_template``; None without one."""
        template = self.response_template
        if template is None:
            return None
        return template.count(None) if self.return_given is False else len(template)


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
