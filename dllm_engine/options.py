"""Engine options: what ``LLM(cache_method=…, cache_options=…, trace=…)`` and ``--additional-config`` accept."""

import difflib
import json
import math
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from dllm_engine.demo import DEMO_GUIDE_DIR, DEMO_MODEL

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTIONS_KEY = "dllm"
"""Key of ``additional_config`` under which the options travel, and of a checkpoint's config.json under which it has
defaults of its own for requests."""


def explain(error: ValidationError, what: str, known: Iterable[str] = ()) -> str:
    """What is wrong with each field: its name, its value and what it may be.

    Args:
        error: of a model that was to be validated.
        what: how the fields are called, such as ``engine option``; may be empty.
        known: all names, which are listed for an unknown one, the closest first.
    """
    known, lines = list(known), []
    for detail in error.errors():
        name, value = ".".join(str(part) for part in detail["loc"]), _shortened(detail["input"])
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            lines.append(f"unknown {what} {name!r}={value}{did_you_mean(name, known)} ({what}s: {', '.join(known)})")
        elif not name and detail["type"] == "value_error":  # of several fields together
            lines.append(message)
        else:
            lines.append(f"{what} {name or what}={value}: {message}".lstrip())
    return "; ".join(lines)


def checkpoint_section(hf_config: object) -> dict[str, Any]:
    """What a checkpoint's config.json says to us; raises ``ValueError`` where it is no object."""
    section = getattr(hf_config, OPTIONS_KEY, None)
    if section is not None and not isinstance(section, dict):
        raise ValueError(f"config.json: {OPTIONS_KEY!r}={section!r} must be an object of request options")
    return section or {}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message on an unknown name: the known one that is closest, or nothing."""
    closest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {closest[0]!r}?" if closest else ""


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


ScorerName = Literal["mask_voting", "mean_query", "snapkv", "random"]
LayerBudgetName = Literal["uniform", "boundary", "pyramid", "squeeze"]
HeadBudgetName = Literal["uniform", "prompt_preference", "adaptive"]


def read_profile(path: str) -> list[float]:
    """The layer importances in a file that ``dllm profile`` wrote; raises ``ValueError`` where it is none."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))["layer_importance"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a layer profile ({type(error).__name__}: {error}); make one with `dllm profile`"
        ) from None


def _odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("must be odd, so that the window has a middle")
    return value


WindowWidth = Annotated[int, Field(ge=1), AfterValidator(_odd)]


class CacheOptions(BaseModel):
    """Options of a cache method; the methods without any use this class itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SparseOptions(CacheOptions):
    """Options of ``sparse`` (Sparse-dLLM, arXiv 2508.02558). The defaults are the paper's."""

    retention_ratio: float = Field(default=0.5, ge=0, le=1)
    """Share of the candidates (positions outside the block) that a layer retains."""
    pool_kernel_size: WindowWidth = 3
    """Width of the max-pooling over importance scores. Odd; 1 turns it off."""
    update_delay: int = Field(default=1, ge=0)
    """FULL steps of a block before the UPDATE step, which selects what is retained."""
    scorer: ScorerName = "mean_query"
    """How the importance of a token is scored. Scores are averaged over the heads of a layer."""
    observation_window: int = Field(default=32, ge=1)
    """Number of last prompt tokens that vote, for ``scorer="snapkv"``."""
    scope: Literal["bidirectional", "prefix"] = "bidirectional"
    """``bidirectional``: candidates lie on both sides of the block (Algorithm 4). ``prefix``: they lie before the
    block, and everything behind it is retained (Algorithm 5)."""


class DKVOptions(CacheOptions):
    """Options of ``dkv`` (dKV-Cache-Decode, arXiv 2505.15781)."""

    refresh_interval: int = Field(default=8, ge=1)
    """Steps of a block from one computation of the whole canvas to the next."""


class FreeCacheOptions(CacheOptions):
    """Options of ``freecache`` (FreeCache, arXiv 2505.21467, section 3.2.1)."""

    include_suffix: bool = True
    """Compute the masked tokens behind the block in every step too. False: the block alone."""


class DLLMCacheOptions(CacheOptions):
    """Options of ``dllm_cache`` (dLLM-Cache, arXiv 2506.06295). Intervals count forward passes over the response; where
    the number of tokens that a pass unmasks is open (parallel unmasking, a guide), they count tokens unmasked."""

    prompt_refresh_interval: int = Field(default=50, ge=1)
    """Forward passes from one computation of the prompt to the next (Kp). With parallel unmasking or a guide: unmasked
    tokens."""
    response_refresh_interval: int = Field(default=7, ge=1)
    """Forward passes from one computation of the response to the next (Kr). With parallel unmasking or a guide:
    unmasked tokens."""
    update_ratio: float = Field(default=0.25, ge=0, le=1)
    """Share of the response rows that each layer recomputes in the passes between (ρ)."""
    similarity: Literal["value", "key"] = "value"
    """How these rows are chosen: those whose new value (or key) differs most from the cached one."""
    exclude_prompt_states: bool = True
    """Keep no features of prompt rows, because nothing reads them (MaskKV's prompt-state exclusion). False: keep them,
    as dLLM-Cache's code does. That takes more memory and changes no token."""
    refresh_first_layer: bool = True
    """Recompute the whole response in the first layer in every pass, as dLLM-Cache's code does; the paper does not say
    so. False: there, only rows that were just unmasked have changed, because a row's value in the first layer depends
    on its token alone."""


class MaskKVOptions(DLLMCacheOptions):
    """Options of ``maskkv`` (MaskKV, arXiv 2510.09309). The defaults are the paper's."""

    response_refresh_interval: int = Field(default=5, ge=1)
    refresh_first_layer: bool = False
    kv_budget: int | None = Field(default=256, ge=0)
    """Prompt tokens that a KV head of a layer retains, on average (B̄). None: ``retention_ratio`` alone decides. A
    prompt within the budget is retained whole."""
    retention_ratio: float = Field(default=1.0, ge=0, le=1)
    """The largest share of the prompt that is retained, on average."""
    scorer: ScorerName = "mask_voting"
    """How the importance of a prompt token for a head is scored."""
    observation_window: int = Field(default=32, ge=1)
    """Number of last prompt tokens that vote, for ``scorer="snapkv"``."""
    pool_kernel_size: WindowWidth = 1
    """Width of the max-pooling over a head's scores before its tokens are ranked, which retains the neighbours of
    important tokens too (from SnapKV, not in the paper). Odd; 1 turns it off. Budgets use the unpooled scores."""
    layer_budget: LayerBudgetName = "boundary"
    """How the budget is split between layers. ``boundary`` and ``squeeze`` need a ``profile``; without one all layers
    get the same."""
    beta: float = Field(default=0.4, ge=0, le=1)
    """Share of the average budget that every layer gets, for ``layer_budget="boundary"``."""
    head_budget: HeadBudgetName = "prompt_preference"
    """How a layer's budget is split between its heads."""
    alpha: float = Field(default=0.1, ge=0, le=1)
    """Share of a layer's budget that every head gets, for ``head_budget="prompt_preference"``."""
    redistribute: bool = False
    """Give what rounding down and short prompts leave of the budgets to other layers and heads (not in the paper)."""
    profile: tuple[float, ...] | None = None
    """Importance of each layer, from 0 to 2, or a file that ``dllm profile`` wrote. None: all layers are alike."""

    @field_validator("profile", mode="before")
    @classmethod
    def _read_profile(cls, value: Any) -> Any:
        return read_profile(value) if isinstance(value, str) else value

    @field_validator("profile")
    @classmethod
    def _sensible_profile(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None and (not value or not all(0 <= score <= 2 for score in value)):
            raise ValueError("needs one number from 0 to 2 per layer: 1 minus a mean cosine")
        return value


class ESDLLMOptions(CacheOptions):
    """Options of ``es_dllm`` (ES-dLLM, arXiv 2603.10088). Intervals count steps over the response, as if every block
    took a step per token."""

    indicator: Literal["hidden_state", "query", "key", "value", "none"] = "hidden_state"
    """What a row is compared by, to tell how much it has changed. ``none``: no row is skipped, and each block begins
    with the whole canvas (the paper's DualCache baseline)."""
    alpha: float = Field(default=0.5, ge=0, le=1)
    """Weight of a row's last confidence in its importance; its change has the weight 1 − ``alpha``."""
    keep_schedule: tuple[tuple[float, float], ...] = ((1.0, 0.0), (0.5, 0.125), (0.25, 0.25))
    """Pairs of (fraction of the rows kept, relative depth from which it holds). Depths begin with 0 and rise; fractions
    do not rise."""
    block_refresh_interval: int = Field(default=8, ge=1)
    """Steps from one that skips no row of the block to the next."""
    prompt_refresh_interval: int = Field(default=64, ge=1)
    """Steps from one computation of the prompt and all decoded tokens to the next."""
    retention_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the positions outside the block that a layer attends to, selected as ``sparse`` does. 1: all of them."""
    update_delay: int = Field(default=1, ge=0)
    """Steps of a block before the one that selects what is retained."""

    @field_validator("keep_schedule")
    @classmethod
    def _falling(cls, value: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        fractions, depths = [fraction for fraction, _ in value], [depth for _, depth in value]
        if not value or depths[0] != 0:
            raise ValueError("must begin with depth 0")
        if any(not 0 <= depth < 1 for depth in depths) or any(a >= b for a, b in pairwise(depths)):
            raise ValueError("depths must rise within [0, 1)")
        if any(not 0 < fraction <= 1 for fraction in fractions) or any(a < b for a, b in pairwise(fractions)):
            raise ValueError("fractions must fall, or stay, within (0, 1]")
        return value

    @property
    def skips(self) -> bool:
        return self.indicator != "none"

    @property
    def keeps_features(self) -> bool:
        """Whether rows are remembered in pages of their own; keys and values are in pages already."""
        return self.indicator in ("hidden_state", "query") and self.alpha < 1

    @property
    def evicts(self) -> bool:
        return self.retention_ratio < 1

    def cuts(self, num_layers: int) -> dict[int, float]:
        """Layers that drop rows, ascending, and the fraction of a step's rows that is left after each."""
        if not self.skips:
            return {}
        fractions = {int(depth * num_layers): fraction for fraction, depth in self.keep_schedule}
        return {layer: fraction for layer, fraction in fractions.items() if fraction < 1}


CACHE_OPTIONS: dict[str, type[CacheOptions]] = {
    "none": CacheOptions,
    "prefix": CacheOptions,
    "dual": CacheOptions,
    "sparse": SparseOptions,
    "dkv": DKVOptions,
    "dllm_cache": DLLMCacheOptions,
    "es_dllm": ESDLLMOptions,
    "maskkv": MaskKVOptions,
    "freecache": FreeCacheOptions,
}
"""Cache methods and the model their ``cache_options`` are validated with."""
RECORDABLE = ("prefix", "dual", "sparse", "freecache")
"""Cache methods whose REUSE steps do the same work on different numbers, so that ``cuda_graphs`` can record them."""
PAPER = "paper"
"""As ``cache_options``: the settings of the method's paper, which are the defaults."""


class GuideShape(BaseModel):
    """Sizes of a guide model that its pages depend on; settled at start-up from its config."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_layers: int
    num_kv_heads: int
    head_dim: int
    same_tokens: bool = True
    """Whether it has the diffusion model's own tokenizer."""
    tokens_per_token: float = 1.0
    """Its tokens that pages are reserved for, per token of the diffusion model."""

    def num_tokens(self, num_tokens: int) -> int:
        """Its tokens that pages are reserved for, of a text of so many tokens of the diffusion model."""
        return math.ceil(num_tokens * self.tokens_per_token)

    def of_rank(self, tensor_parallel_size: int) -> "GuideShape":
        """The part of one tensor-parallel rank; with more ranks than KV heads each head is on several of them."""
        return self.model_copy(update={"num_kv_heads": max(1, self.num_kv_heads // tensor_parallel_size)})


class EngineOptions(BaseModel):
    """Options of one engine, the same in every process of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cache_method: str = "none"
    """What steps compute and what they keep in pages."""
    cache_options: dict[str, Any] | Literal["paper"] = {}
    """Options of the cache method. ``"paper"``: the settings of its paper, which are the defaults."""
    page_size: int = Field(default=32, ge=1)
    """Tokens per page of one layer."""
    dense_attention: Literal["sdpa", "xformers"] = "sdpa"
    """Library for attention that reads no pages: PyTorch's, or xformers where it is installed (CUDA)."""
    refresh_ratio: float | None = Field(default=1.0, gt=0)
    """How much a long request may refresh beside short ones: rows of its FULL and UPDATE steps per row that requests of
    at most a quarter of its length compute meanwhile. None: no limit."""
    steps_per_dispatch: int = Field(default=1, ge=1)
    """Denoising steps that workers run on their own while no request waits and no block is complete."""
    guide_model: str | None = None
    """Folder or Hugging Face name of an autoregressive model (Qwen2 or Llama) that checks drafts (Guided Diffusion);
    ``"demo"`` for the demo model's. Requests are then guided unless they set ``guided=False``."""
    guide_tokens_per_token: float = Field(default=2.0, gt=0)
    """Guide tokens that pages are reserved for per token of the model, where the guide has another tokenizer."""
    guide_shape: GuideShape | None = None
    """Filled in by the engine."""
    cuda_graphs: bool = False
    """Record REUSE steps as CUDA graphs and replay them. For CUDA, and for cache methods whose REUSE steps always do
    the same work."""
    batch_invariant: bool = False
    """Compute every request on its own, so that its response is bit-identical in any batch. Slower with several
    requests."""
    trace: bool = False
    """Record for each forward pass which positions were unmasked and computed."""
    playground: bool = True
    """Whether the HTTP server has the page ``/playground``."""
    request_defaults: dict[str, Any] = {}
    """Request options for requests that do not set them."""

    def with_paper_settings(self, settings: dict[str, Any]) -> "EngineOptions":
        """The cache options that were left open filled with ``settings``; raises ``ValueError`` as ``parse``."""
        chosen = {} if isinstance(self.cache_options, str) else self.cache_options
        return self.parse(self.model_dump() | {"cache_options": settings | chosen})

    @field_validator("guide_model")
    @classmethod
    def _demo_guide(cls, value: str | None) -> str | None:
        return str(DEMO_GUIDE_DIR) if value == DEMO_MODEL else value

    @field_validator("cache_method")
    @classmethod
    def _known_method(cls, value: str) -> str:
        if value not in CACHE_OPTIONS:
            raise ValueError(f"unknown cache method; choose one of {', '.join(CACHE_OPTIONS)}")
        return value

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "EngineOptions":
        """Validate options; raises ``ValueError`` naming the option, its value and what is allowed."""
        try:
            options = cls.model_validate(raw)
        except ValidationError as error:
            known = [name for name in cls.model_fields if name != "guide_shape"]
            raise ValueError(f"{explain(error, 'engine option', known)} (engine options: {', '.join(known)})") from None
        _ = options.cache
        if options.cuda_graphs and options.cache_method not in RECORDABLE:
            raise ValueError(
                f"cuda_graphs=True records steps of the cache methods {', '.join(RECORDABLE)}, not of "
                f"cache_method={options.cache_method!r}; leave it out"
            )
        if options.request_defaults:
            # What a request may ask for is defined on top of this module, and needs vLLM.
            from dllm_engine.params import check_request_defaults

            check_request_defaults(options)
        return options

    @property
    def uses_pages(self) -> bool:
        return self.cache_method != "none" or self.guide_model is not None

    @cached_property
    def cache(self) -> CacheOptions:
        """The options of the cache method, validated."""
        schema = CACHE_OPTIONS[self.cache_method]
        try:
            return schema.model_validate({} if self.cache_options == PAPER else self.cache_options)
        except ValidationError as error:
            known = schema.model_fields or ["none"]
            raise ValueError(f"cache_method={self.cache_method!r}: {explain(error, 'cache option', known)}") from None

    @classmethod
    def from_vllm_config(cls, vllm_config: "VllmConfig") -> "EngineOptions":
        """The options in ``additional_config["dllm"]``."""
        additional = vllm_config.additional_config
        raw = additional.get(OPTIONS_KEY, {}) if isinstance(additional, dict) else {}
        if not isinstance(raw, dict):
            raise ValueError(f"additional_config[{OPTIONS_KEY!r}]={raw!r} must be a dictionary of engine options")
        return cls.parse(raw)
