"""``DiffusionParams``: vLLM's sampling parameters with the fields of diffusion decoding."""

from collections.abc import Iterable
from typing import Any, Literal

from vllm.sampling_params import SamplingParams

from dllm_engine.families import LLADA
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.options.request_options import InvalidRequestError, RequestOptions, parse_request_options
from dllm_engine.scheduler.options.resolve_unmasking import resolve_unmasking

_OWN_OPTIONS: dict[str, Any] = dict.fromkeys(RequestOptions.model_fields) | {"top_p": 1.0, "top_k": 0}
"""Fields of ``DiffusionParams`` that travel in ``extra_args``, and what they hold where they are not given."""


class DiffusionParams(SamplingParams):
    """vLLM's sampling parameters with the fields of diffusion decoding.

    A value of None means the model family's default. Lengths and steps count tokens and denoising steps of the whole
    response. Greedy (``temperature=0``) unless asked otherwise.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    """Sample from the smallest set of likeliest tokens whose probabilities reach this sum. It applies to greedy
    requests too: Dream's confidences are those of the filtered distribution."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 or -1 means all. It applies to greedy requests as ``top_p`` does."""
    extra_args: dict[str, Any] | None = None
    """Filled from the fields below; what the caller puts there as well is kept."""
    max_tokens: int | None = None
    """The same as ``gen_length``, under vLLM's name."""
    gen_length: int | None = None
    """Response tokens. Unset: the checkpoint's ``max_new_tokens``, else the default, or what fits the context if that
    is less."""
    block_length: int | None = None
    """Response tokens denoised together, at most ``gen_length``. The last block may be shorter. SDAR and LLaDA2 attend
    by blocks of this length, counted from the prompt's first token; it may be longer than the response."""
    steps: int | None = None
    """Denoising steps over the whole response, at most ``gen_length``. Blocks share them by their length; each block
    gets at least one."""
    steps_per_block: int | None = None
    """Denoising steps of each block, in place of ``steps``; a block of fewer tokens takes a step for each. With a rule
    of parallel unmasking, each step fills at least what the schedule of so many steps does. ``entropy_budget`` takes no
    such count."""
    tokens_per_step: int | None = None
    """Tokens that each step unmasks, in place of ``steps`` and of a family's schedule, or with a rule of parallel
    unmasking the least (d2Cache)."""
    unmasking: str | None = None
    """Unmasking policy: which masked positions are filled first. With a rule of parallel unmasking, the default is the
    policy that measures what the rule needs."""
    certainty_sigma: float | None = None
    """Weight the confidences by how many tokens near a position are known, with a Gaussian of this many tokens as the
    measure of near (the certainty prior of d2Cache). For policies that measure a probability or a margin."""
    threshold: float | None = None
    """Parallel unmasking (Fast-dLLM): fill every position of the block with at least this probability. For the policies
    ``low_confidence`` and ``maskgit_plus``. Other policies, if named, ignore it and keep their fixed count, as in
    Fast-dLLM's code."""
    factor: float | None = None
    """Parallel unmasking (Fast-dLLM): fill the n most probable positions, for the largest n with (n + 1) · (1 − n-th
    probability) < ``factor``. For ``low_confidence`` and ``maskgit_plus``; other policies are refused."""
    entropy_bound: float | None = None
    """Parallel unmasking (EB-Sampler): fill the lowest-entropy positions while their total, excluding the largest,
    stays within this bound (in nats). For the policies ``entropy`` and ``low_entropy``."""
    entropy_budget: float | None = None
    """Parallel unmasking (SDAR): fill the lowest-entropy positions while their total, including the last one, stays
    below this budget (in nats). For the policies ``entropy`` and ``low_entropy``."""
    margin: float | None = None
    """Parallel unmasking: fill every position whose two likeliest tokens differ in probability by at least this. For
    the policy ``topk_margin``."""
    entropy_threshold: float | None = None
    """Parallel unmasking (d3LLM): fill every position whose entropy is at most this (in nats; Dream: below it). For the
    policy ``low_entropy``."""
    slow_fast: dict[str, Any] | None = None
    """Parallel unmasking (SlowFast sampling): slow passes look how far the model is confident, fast ones fill that span
    and leave out what lies behind it. A dictionary of options; those left out are as in the authors' code for the
    family, ``{}`` is all of them. For the policy ``low_confidence``."""
    block_add_threshold: float | None = None
    """Several blocks at once (d3LLM): the next block joins the running ones once this share of the last one is decided.
    0: one more block in every step; 1 or unset: one block at a time. Needs a rule of parallel unmasking."""
    suffix_blocks: int | None = None
    """Masked blocks behind the running ones that a step computes (DPad). Unset: all of them. Cache methods that keep
    the whole canvas refuse it."""
    early_stop: bool | None = None
    """Give up everything behind the first end token as soon as it is decided, though tokens before it are masked still
    (d3LLM)."""
    retention_ratio: float | None = None
    """Share to retain for this request, at most the engine's ``retention_ratio``, for which pages are reserved. Cache
    methods that evict nothing refuse it."""
    delay_eos: bool | None = None
    """Hold back an end token while the position before it is masked and the response has no end token yet (ES-dLLM).
    Works with every cache method. Without a cache, it also selects the rest of ES-dLLM's sampler."""
    guided: bool | None = None
    """Guided Diffusion: the engine's guide model decides what a step fills. Schedules, unmasking policies and rules
    then have no effect."""
    speculation_length: int | None = None
    """Masked positions that are drafted and checked by the guide in a step, within the running block."""
    guide_top_k: int | None = None
    """A draft passes if it is among this many best tokens of the guide."""
    guide_threshold: float | None = None
    """Beside the drafts that pass, which end at the first that does not, also fill every drafted position whose token
    has a probability above this, wherever it lies. It adds to the passing ones and holds none of them back."""
    guide_fallback: str | None = None
    """Whose token fills the first position when no draft passes."""
    guide_correction: bool | None = None
    """Replace the drafts that pass by the guide's tokens."""
    stream_granularity: Literal["block", "step"] | None = None
    """What a streamed response shows: finished blocks, or also the running block after each step
    (``outputs[i].provisional``)."""
    response_template: list[int | None] | None = None
    """The response with given tokens: a token id where one is given, None where the model fills one in. ``gen_length``
    is its length then; leave it unset."""
    return_given: bool | None = None
    """False: leave the given tokens of ``response_template`` out of what is returned, and of ``gen_length``."""
    return_order: bool | None = None
    """Return for each token the forward pass that committed it and its log-probability then, as
    ``outputs[i].diffusion.committed_at`` and ``committed_logprobs``."""
    trace: bool | None = None
    """Over HTTP: return the trace, which the engine must record (``trace=True``). In Python, ``outputs[i].diffusion``
    has it whenever the engine records it."""

    def __post_init__(self) -> None:
        if self.gen_length is not None and self.max_tokens not in (None, self.gen_length):
            raise InvalidRequestError(
                f"gen_length={self.gen_length} and max_tokens={self.max_tokens} name the same length; give one"
            )
        gen_length = self.max_tokens if self.gen_length is None else self.gen_length
        own = {name: getattr(self, name) for name in _OWN_OPTIONS}
        extra_args = self.extra_args or {}
        super().__post_init__()  # which resets top_p and top_k of a greedy request
        # What the caller has put into `extra_args` himself is shown by the fields as well.
        for name, value in own.items():
            is_given = value != _OWN_OPTIONS[name]
            SamplingParams.__setattr__(self, name, value if is_given else extra_args.get(name, value))
        self.gen_length = gen_length
        self._settle()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field as if the parameters had been made with it; raises ``InvalidRequestError`` for a bad value."""
        is_length = name in ("gen_length", "max_tokens")
        if is_length and value is not None and (type(value) is not int or value < 1):
            raise InvalidRequestError(f"{name}={value!r} is out of range: it must be a whole number, at least 1")
        before = getattr(self, name)
        for field in ("gen_length", "max_tokens") if is_length else (name,):
            super().__setattr__(field, value)
        if name in _OWN_OPTIONS:
            try:
                self._settle()
            except InvalidRequestError:
                super().__setattr__(name, before)
                raise

    def _settle(self) -> None:
        """Check the options that vLLM has no field for, and put them where they travel."""
        chosen = {name: value for name, default in _OWN_OPTIONS.items() if (value := getattr(self, name)) != default}
        if chosen.get("top_k", 1) <= 0:  # -1 means all as well
            del chosen["top_k"]
        resolve_unmasking(parse_request_options(chosen), LLADA)
        others = {name: value for name, value in (self.extra_args or {}).items() if name not in _OWN_OPTIONS}
        super().__setattr__("extra_args", others | chosen or None)

    def __repr__(self) -> str:
        """What differs from the defaults, as an expression that makes the same parameters."""
        blank = DiffusionParams()
        names = dict.fromkeys(("gen_length", *_OWN_OPTIONS, *SamplingParams.__struct_fields__))
        given = {name: value for name in names if (value := getattr(self, name)) != getattr(blank, name)}
        for name in ("max_tokens", "extra_args", "output_text_buffer_length", *(n for n in given if n[0] == "_")):
            given.pop(name, None)
        if others := {name: value for name, value in (self.extra_args or {}).items() if name not in _OWN_OPTIONS}:
            given["extra_args"] = others
        return f"DiffusionParams({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def to_sampling_params(self) -> SamplingParams:
        """The same request as vLLM's own class, the only one its wire format knows.

        The wire omits fields that hold their default, and the receiver would fill in the defaults of another class.
        """
        return SamplingParams(**{name: getattr(self, name) for name in SamplingParams.__struct_fields__})


def check_place(fields: Iterable[str]) -> None:
    """Raise ``InvalidRequestError`` if a request has options of ours among these fields, which nobody reads."""
    for name in fields:
        if name in RequestOptions.model_fields:
            raise InvalidRequestError(f'{name} belongs into vllm_xargs: {{"vllm_xargs": {{"{name}": …}}}}')
        if name == "gen_length":
            raise InvalidRequestError(
                "gen_length is for DiffusionParams; over HTTP set max_tokens (max_output_tokens for /v1/responses)"
            )
        if name in EngineOptions.model_fields:
            raise InvalidRequestError(f"{name} is an option of the engine, set when it starts; leave it out")
        if name == "cfg_scale":
            raise InvalidRequestError("cfg_scale: classifier-free guidance is not supported; leave it out")
