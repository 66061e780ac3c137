"""Per-request parameters: what a caller may ask for, and how it becomes a ``DecodingSpec``."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from dllm_engine.families import ModelFamily
from dllm_engine.model_executor.unmasking import UNMASKING_POLICIES
from dllm_engine.options import CacheOptions, EngineOptions, explain
from dllm_engine.scheduler.decoding import DecodingSpec
from dllm_engine.scheduler.page_layout import PoolGeometry
from dllm_engine.scheduler.refresh_plan import page_demand

DEFAULT_GEN_LENGTH = 256
"""Response tokens of a request that names no length."""

# Keys of extra_args that belong to vLLM itself.
_VLLM_EXTRA_ARGS = frozenset({"kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"})


class InvalidRequestError(VLLMValidationError, ValueError):
    """A request that cannot be served as asked. vLLM's server answers it with 400."""


class RequestOptions(BaseModel):
    """The options that vLLM's ``SamplingParams`` has no field for; they travel in ``extra_args``.

    Over HTTP a client sets them in ``vllm_xargs``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    block_length: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    unmasking: str | None = None
    threshold: float | None = Field(default=None, gt=0, le=1)
    retention_ratio: float | None = Field(default=None, ge=0, le=1)
    # vLLM clears its own fields of these names for greedy requests; Dream's confidences depend on them there too.
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)


class DiffusionParams(SamplingParams):
    """vLLM's sampling parameters with the fields of diffusion decoding.

    A value of None means the model family's default. Lengths and steps count tokens and denoising steps of the whole
    response. Greedy (``temperature=0``) unless asked otherwise.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    """Applied to greedy requests too: Dream's confidences are those of the filtered distribution."""
    top_k: int = 0
    """As ``top_p``; 0 keeps all tokens."""
    extra_args: dict[str, Any] | None = None
    """Filled from the fields below; what the caller puts there as well is kept."""
    max_tokens: int | None = None
    """The same as ``gen_length``, under vLLM's name."""
    gen_length: int | None = None
    """Response tokens; None: 256, or what fits where that is less."""
    block_length: int | None = None
    """Response tokens denoised together; default 32 for LLaDA, the whole response for Dream."""
    steps: int | None = None
    """Denoising steps over the whole response; default one per token."""
    unmasking: str | None = None
    """Unmasking policy; default ``low_confidence`` for LLaDA, ``entropy`` for Dream."""
    threshold: float | None = None
    """Parallel unmasking (Fast-dLLM): each step unmasks every position of the block whose probability reaches this,
    and at least the best one, until none is left; ``steps`` is ignored. Policies that do not measure a probability
    (``entropy``, ``topk_margin``, ``random``, ``origin``) keep to their fixed count, as Fast-dLLM's own code does."""
    retention_ratio: float | None = None
    """Retain less than the engine's ``retention_ratio`` for this request."""

    def __post_init__(self) -> None:
        if self.gen_length is not None and self.max_tokens not in (None, self.gen_length):
            raise InvalidRequestError(
                f"gen_length={self.gen_length} and max_tokens={self.max_tokens} name the same length; give one"
            )
        if self.gen_length is None:
            self.gen_length = self.max_tokens
        if self.gen_length is not None and self.gen_length < 1:
            raise InvalidRequestError(f"gen_length={self.gen_length} is out of range: it must be at least 1")
        self.max_tokens = self.gen_length
        top_p, top_k = self.top_p, self.top_k
        super().__post_init__()
        self.top_p, self.top_k = top_p, top_k
        own = ("block_length", "steps", "unmasking", "threshold", "retention_ratio")
        chosen: dict[str, Any] = {name: getattr(self, name) for name in own}
        if top_p != 1.0:
            chosen["top_p"] = top_p
        if top_k > 0:
            chosen["top_k"] = top_k
        self.extra_args = (self.extra_args or {}) | {k: v for k, v in chosen.items() if v is not None} or None

    def to_sampling_params(self) -> SamplingParams:
        """The same request as vLLM's own class, the only one its wire format knows.

        The wire omits fields that hold their default, and the receiver would fill in the defaults of another class.
        """
        return SamplingParams(**{name: getattr(self, name) for name in SamplingParams.__struct_fields__})


def request_options(params: SamplingParams) -> RequestOptions:
    """The options in a request's ``extra_args``; raises ``InvalidRequestError`` naming what is wrong with which."""
    raw: dict[str, Any] = {k: v for k, v in (params.extra_args or {}).items() if k not in _VLLM_EXTRA_ARGS}
    try:
        return RequestOptions.model_validate(raw)
    except ValidationError as error:
        known = ", ".join(RequestOptions.model_fields)
        raise InvalidRequestError(f"{explain(error, 'request option')} (request options: {known})") from None


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


def resolve_decoding(
    params: SamplingParams, prompt_length: int, family: ModelFamily, engine: EngineOptions
) -> DecodingSpec:
    """Fill in the family's defaults; raises ``InvalidRequestError`` naming the option, its value and its range."""
    options = request_options(params)
    gen_length = params.max_tokens
    if gen_length is None:
        raise InvalidRequestError("the response length is open; set gen_length (max_tokens)")
    block_length = options.block_length
    if block_length is None:
        block_length = family.block_length_of(gen_length)
    elif block_length > gen_length:
        raise InvalidRequestError(
            f"block_length={block_length} is out of range: it must be 1 … gen_length (max_tokens), here {gen_length}"
        )
    spec = DecodingSpec(
        prompt_length=prompt_length,
        gen_length=gen_length,
        block_length=block_length,
        steps=options.steps if options.steps is not None else gen_length,
        schedule=family.schedule,
        shifts_logits=family.shifts_logits,
        unmasking=options.unmasking if options.unmasking is not None else family.default_unmasking,
        temperature=params.temperature,
        top_p=options.top_p if options.top_p is not None else params.top_p,
        top_k=max(options.top_k if options.top_k is not None else params.top_k, 0),
        threshold=options.threshold,
        cache=resolve_cache(options, engine),
    )
    if spec.threshold is None and spec.steps < spec.num_blocks:
        raise InvalidRequestError(
            f"steps={spec.steps} is out of range: each of the {spec.num_blocks} blocks of {block_length} tokens "
            f"needs at least one; raise steps or block_length"
        )
    if spec.unmasking not in UNMASKING_POLICIES:
        raise InvalidRequestError(
            f"unmasking={spec.unmasking!r} is unknown; choose one of {', '.join(UNMASKING_POLICIES)}"
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


def end_token_ids(params: SamplingParams, hf_config: object) -> frozenset[int]:
    """Tokens that end a response: the model's (unless ``ignore_eos``) and the request's ``stop_token_ids``."""
    ends = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        for key in ("eos_token_id", "end_of_turn_token_id"):
            value = getattr(hf_config, key, None)
            ends.update(value if isinstance(value, list) else [] if value is None else [value])
        if params.eos_token_id is not None:
            ends.add(params.eos_token_id)
    return frozenset(ends)
