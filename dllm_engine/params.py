"""Per-request parameters: what a caller may ask for, and how it becomes a ``DecodingSpec``."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from dllm_engine.families import FAMILIES, LLADA, ModelFamily
from dllm_engine.model_executor.unmasking import PARALLEL_RULES, UNMASKING_POLICIES
from dllm_engine.options import OPTIONS_KEY, CacheOptions, EngineOptions, checkpoint_section, did_you_mean, explain
from dllm_engine.scheduler.decoding import DecodingSpec, Guidance, ParallelRule
from dllm_engine.scheduler.page_layout import PoolGeometry
from dllm_engine.scheduler.refresh_plan import page_demand

DEFAULT_GEN_LENGTH = 256
"""Response tokens of a request that names no length, unless the checkpoint says otherwise."""

PARALLEL_OPTIONS = ("threshold", "factor", "entropy_bound", "margin")
"""Request options that ask for parallel unmasking, each by the rule of its name; a request may set one of them."""
DEFAULTABLE_OPTIONS = ("block_length", "steps", "unmasking", *PARALLEL_OPTIONS, "retention_ratio")
"""Request options that an engine may have a default for."""
CHECKPOINT_OPTIONS = tuple(name for name in DEFAULTABLE_OPTIONS if name != "retention_ratio")
"""Request options that a checkpoint may have a default for: those that mean the same with every cache method."""
_MOST_TOKENS = (1 << 31) - 1
"""More than any model's context or vocabulary holds."""


class InvalidRequestError(VLLMValidationError, ValueError):
    """A request that cannot be served as asked. vLLM's server answers it with 400."""


class RequestOptions(BaseModel):
    """The options that vLLM's ``SamplingParams`` has no field for; they travel in ``extra_args``.

    Over HTTP a client sets them in ``vllm_xargs``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    block_length: int | None = Field(default=None, ge=1, le=_MOST_TOKENS)
    steps: int | None = Field(default=None, ge=1, le=_MOST_TOKENS)
    unmasking: str | None = None
    threshold: float | None = Field(default=None, gt=0, le=1)
    factor: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    entropy_bound: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    margin: float | None = Field(default=None, gt=0, le=1)
    retention_ratio: float | None = Field(default=None, ge=0, le=1)
    delay_eos: bool | None = None
    guided: bool | None = None
    speculation_length: int | None = Field(default=None, ge=1, le=_MOST_TOKENS)
    guide_top_k: int | None = Field(default=None, ge=1, le=_MOST_TOKENS)
    guide_threshold: float | None = Field(default=None, gt=0, lt=1)
    guide_fallback: Literal["guide", "draft"] | None = None
    guide_correction: bool | None = None
    stream_granularity: Literal["block", "step"] | None = None
    trace: bool | None = None
    # vLLM clears its own fields of these names for greedy requests; Dream's confidences depend on them there too.
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=_MOST_TOKENS)


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
    """Response tokens denoised together, at most ``gen_length``. The last block may be shorter."""
    steps: int | None = None
    """Denoising steps over the whole response, at most ``gen_length``. Blocks share them by their length; each block
    gets at least one."""
    unmasking: str | None = None
    """Unmasking policy: which masked positions are filled first. With a rule of parallel unmasking, the default is the
    policy that measures what the rule needs."""
    threshold: float | None = None
    """Parallel unmasking (Fast-dLLM): fill every position of the block with at least this probability. For the policies
    ``low_confidence`` and ``maskgit_plus``. Other policies, if named, ignore it and keep their fixed count, as in
    Fast-dLLM's code."""
    factor: float | None = None
    """Parallel unmasking (Fast-dLLM): fill the n most probable positions, for the largest n with (n + 1) · (1 − n-th
    probability) < ``factor``. For ``low_confidence`` and ``maskgit_plus``; other policies are refused."""
    entropy_bound: float | None = None
    """Parallel unmasking (EB-Sampler): fill the lowest-entropy positions while their total, excluding the largest,
    stays within this bound (in nats). For the policy ``entropy``."""
    margin: float | None = None
    """Parallel unmasking: fill every position whose two likeliest tokens differ in probability by at least this. For
    the policy ``topk_margin``."""
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
    """Drafts with a probability above this pass as well."""
    guide_fallback: str | None = None
    """Whose token fills the first position when no draft passes."""
    guide_correction: bool | None = None
    """Replace the drafts that pass by the guide's tokens."""
    stream_granularity: Literal["block", "step"] | None = None
    """What a streamed response shows: finished blocks, or also the running block after each step
    (``outputs[i].provisional``)."""
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


def request_options(params: SamplingParams) -> RequestOptions:
    """The options in a request's ``extra_args``; raises ``InvalidRequestError`` naming what is wrong with which."""
    return parse_request_options(params.extra_args or {})


def parse_request_options(raw: dict[str, Any]) -> RequestOptions:
    """Validate request options; raises ``InvalidRequestError`` naming what is wrong with which."""
    try:
        return RequestOptions.model_validate(raw)
    except ValidationError as error:
        raise InvalidRequestError(explain(error, "request option", RequestOptions.model_fields)) from None


def check_request_defaults(engine: EngineOptions) -> None:
    """Raise ``ValueError`` if ``engine.request_defaults`` could serve no request."""
    resolve_cache(_check_defaults(engine.request_defaults, "request_defaults", DEFAULTABLE_OPTIONS), engine)


def checkpoint_defaults(hf_config: object) -> dict[str, Any]:
    """What a checkpoint's config.json says for requests that leave it open; raises ``ValueError`` where it is wrong."""
    section = checkpoint_section(hf_config)
    _check_defaults(section, f"config.json: {OPTIONS_KEY!r}", CHECKPOINT_OPTIONS)
    return section


def _check_defaults(defaults: dict[str, Any], where: str, allowed: Sequence[str]) -> RequestOptions:
    for name in defaults:
        if name not in allowed:
            raise ValueError(
                f"{where} takes no {name!r}{did_you_mean(name, allowed)} (it may hold {', '.join(allowed)})"
            )
    try:
        options = RequestOptions.model_validate(defaults)
    except ValidationError as error:
        raise ValueError(f"{where}: {explain(error, 'request default')}") from None
    for family in FAMILIES.values():
        resolve_unmasking(options, family)
    return options


def with_defaults(chosen: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Request options with defaults for what they leave open. Steps and the rules of parallel unmasking are
    alternatives: who names one of them gets no default rule."""
    if chosen.keys() & {"steps", *PARALLEL_OPTIONS}:
        defaults = {name: value for name, value in defaults.items() if name not in PARALLEL_OPTIONS}
    return defaults | chosen


def _fit(options: RequestOptions, own: RequestOptions, family: ModelFamily, gen_length: int) -> tuple[int, int]:
    """(block_length, steps). What the request did not name itself is fitted to its response: no block is longer, and
    each block gets a step, each token at most one."""
    block_length, steps = options.block_length, options.steps
    if own.block_length is None:
        block_length = min(block_length or family.block_length_of(gen_length), gen_length)
    assert block_length is not None
    if own.steps is None:
        num_blocks = -(-gen_length // block_length)
        steps = max(min(steps or gen_length, gen_length), num_blocks)
    assert steps is not None
    if block_length > gen_length:
        raise InvalidRequestError(
            f"block_length={block_length} is out of range: it must be 1 … gen_length (max_tokens), here {gen_length}"
        )
    if steps > gen_length:
        raise InvalidRequestError(
            f"steps={steps} is out of range: it must be 1 … gen_length (max_tokens), here {gen_length}; a step "
            f"unmasks at least one token"
        )
    return block_length, steps


def resolve_cache(options: RequestOptions, engine: EngineOptions) -> CacheOptions:
    """The engine's cache options with what the request lowers."""
    wanted = options.retention_ratio
    if wanted is None:
        return engine.cache
    allowed = getattr(engine.cache, "retention_ratio", None)
    if allowed is None:
        raise InvalidRequestError(
            f"retention_ratio={wanted}: cache_method={engine.cache_method!r} evicts nothing; leave it unset"
        )
    if wanted > allowed:
        raise InvalidRequestError(
            f"retention_ratio={wanted} is out of range: pages are sized for the engine's {allowed}, a request may "
            f"only lower it"
        )
    return engine.cache.model_copy(update={"retention_ratio": wanted})


def _uses_es_dllm_sampler(options: RequestOptions, engine: EngineOptions) -> bool:
    """ES-dLLM decodes both families alike, with its cache and without: equally many tokens per step, and where it is
    greedy by the plain probability, whatever top_p and top_k are."""
    return engine.cache_method == "es_dllm" or (engine.cache_method == "none" and bool(options.delay_eos))


def resolve_unmasking(options: RequestOptions, family: ModelFamily) -> tuple[str, ParallelRule | None]:
    """The request's unmasking policy and, with parallel unmasking, the rule that goes with it."""
    if options.unmasking is not None and options.unmasking not in UNMASKING_POLICIES:
        raise InvalidRequestError(
            f"unmasking={options.unmasking!r} is unknown; choose one of {', '.join(UNMASKING_POLICIES)}"
        )
    given = [ParallelRule(name, value) for name in PARALLEL_OPTIONS if (value := getattr(options, name)) is not None]
    if not given:
        return options.unmasking or family.default_unmasking, None
    rule, *others = given
    if others:
        named = " and ".join(f"{kind}={value}" for kind, value in given)
        raise InvalidRequestError(f"{named}: a step unmasks by one rule; give one of {', '.join(PARALLEL_OPTIONS)}")
    measure = PARALLEL_RULES[rule.kind].measures
    suited = [policy for policy in UNMASKING_POLICIES.values() if policy.measures == measure]
    if options.unmasking is None:
        default = UNMASKING_POLICIES[family.default_unmasking]
        # The family's own where it suits, else one that like it measures before or after temperature and filters.
        return max(suited, key=lambda policy: (policy is default, policy.tempered == default.tempered)).name, rule
    if UNMASKING_POLICIES[options.unmasking] in suited:
        return options.unmasking, rule
    if PARALLEL_RULES[rule.kind].else_counted:
        return options.unmasking, None
    raise InvalidRequestError(
        f"{rule.kind}={rule.value} goes by {measure}, which unmasking={options.unmasking!r} does not measure; leave "
        f"unmasking unset or choose {' or '.join(policy.name for policy in suited)}"
    )


_GUIDANCE = {
    "speculation_length": "speculation_length",
    "guide_top_k": "top_k",
    "guide_threshold": "threshold",
    "guide_fallback": "fallback",
    "guide_correction": "correction",
}
"""Request options about the guide, and their fields of ``Guidance``."""


def resolve_guidance(options: RequestOptions, engine: EngineOptions) -> Guidance | None:
    """How the guide decides for a request; None where it does not."""
    given = {name: value for name in _GUIDANCE if (value := getattr(options, name)) is not None}
    if engine.guide_model is None:
        if options.guided or given:
            named = "guided=True" if options.guided else f"{next(iter(given))}={next(iter(given.values()))}"
            raise InvalidRequestError(f"{named}: the engine has no guide; start it with guide_model")
        return None
    if options.guided is False:
        if given:
            raise InvalidRequestError(f"guided=False and {', '.join(given)} contradict each other; leave one unset")
        return None
    for name in ("unmasking", "steps", "delay_eos", *PARALLEL_OPTIONS):
        if (value := getattr(options, name)) is not None:
            raise InvalidRequestError(
                f"{name}={value}: the guide decides what a step unmasks; leave it unset, or set guided=False"
            )
    return Guidance(**{_GUIDANCE[name]: value for name, value in given.items()})


def resolve_decoding(
    params: SamplingParams, prompt_length: int, family: ModelFamily, engine: EngineOptions
) -> DecodingSpec:
    """Fill in the family's defaults; raises ``InvalidRequestError`` naming the option, its value and its range."""
    own = request_options(params)
    # What the guide has no use for it only minds where the request itself asks for it.
    guidance = resolve_guidance(own, engine)
    if own.trace and not engine.trace:
        raise InvalidRequestError(
            "trace=True: the engine records no trace; start it with trace=True (--trace), or leave it unset"
        )
    filled = with_defaults(own.model_dump(exclude_none=True), engine.request_defaults)
    options = own.model_copy(update=filled)
    gen_length = params.max_tokens
    if gen_length is None:
        raise InvalidRequestError("the response length is open; set gen_length (max_tokens)")
    block_length, steps = _fit(options, own, family, gen_length)
    of_es_dllm = _uses_es_dllm_sampler(options, engine)
    unfiltered = of_es_dllm and params.temperature == 0
    if of_es_dllm:
        family = replace(family, schedule="uniform", default_unmasking="low_confidence")
    unmasking, parallel = resolve_unmasking(options if guidance is None else own, family)
    if guidance is not None and params.logprobs is not None and (guidance.correction or guidance.fallback == "guide"):
        raise InvalidRequestError(
            f"logprobs={params.logprobs}: tokens of the guide have no log-probability of the model; leave it unset, "
            f"or set guide_fallback='draft' without guide_correction, or guided=False"
        )
    spec = DecodingSpec(
        prompt_length=prompt_length,
        gen_length=gen_length,
        block_length=block_length,
        # A rule of parallel unmasking ends a block by itself; what else counts on steps counts a token each.
        steps=steps if parallel is None else gen_length,
        schedule=family.schedule,
        shifts_logits=family.shifts_logits,
        unmasking=unmasking,
        temperature=params.temperature,
        top_p=1.0 if unfiltered else options.top_p if options.top_p is not None else params.top_p,
        top_k=0 if unfiltered else max(options.top_k if options.top_k is not None else params.top_k, 0),
        parallel=parallel,
        guidance=guidance,
        delay_eos=bool(options.delay_eos),
        cache=resolve_cache(options, engine),
        num_logprobs=params.logprobs,
        streams_steps=options.stream_granularity == "step",
    )
    if spec.parallel is None and spec.steps < spec.num_blocks:
        raise InvalidRequestError(
            f"steps={spec.steps} is out of range: each of the {spec.num_blocks} blocks of {block_length} tokens "
            f"needs at least one; raise steps or block_length"
        )
    return spec


def check_page_demand(spec: DecodingSpec, engine: EngineOptions, geometry: PoolGeometry, num_pages: int) -> None:
    """Raise ``InvalidRequestError`` with the numbers if the pool could never hold the request's pages."""
    demand = page_demand(spec, engine, geometry)
    if demand > num_pages:
        raise InvalidRequestError(
            f"the request needs {demand} pages ({geometry.num_layers} layers, page_size {engine.page_size}), the pool "
            f"has {num_pages}; shorten prompt or response, lower retention_ratio, or raise kv_cache_memory_bytes"
        )


def model_end_tokens(hf_config: object) -> list[int]:
    """The end tokens that a checkpoint's config names."""
    return _config_tokens(hf_config, "eos_token_id")


def every_end_token(hf_config: object) -> list[int]:
    """Those, and what ends a turn of a chat."""
    return [*model_end_tokens(hf_config), *_config_tokens(hf_config, "end_of_turn_token_id")]


def _config_tokens(hf_config: object, key: str) -> list[int]:
    value = getattr(hf_config, key, None)
    return value if isinstance(value, list) else [] if value is None else [value]


def end_token_ids(params: SamplingParams, hf_config: object) -> frozenset[int]:
    """Tokens that end a response: the model's (unless ``ignore_eos``) and the request's ``stop_token_ids``."""
    ends = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        ends.update(every_end_token(hf_config))
        if params.eos_token_id is not None:
            ends.add(params.eos_token_id)
    return frozenset(ends)
