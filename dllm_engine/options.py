"""Engine options: what ``LLM(cache_method=…, cache_options=…, trace=…)`` and ``--additional-config`` accept."""

from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTIONS_KEY = "dllm"
"""Key of ``additional_config`` under which the options travel."""


def explain(error: ValidationError, what: str) -> str:
    """One line per wrong field: its name, its value, and the range it must be in."""
    lines = []
    for detail in error.errors():
        name = ".".join(str(part) for part in detail["loc"]) or what
        if detail["type"] == "extra_forbidden":
            lines.append(f"unknown {what} {name!r}={detail['input']!r}")
        else:
            lines.append(f"{what} {name}={detail['input']!r}: {detail['msg']}")
    return "; ".join(lines)


class CacheOptions(BaseModel):
    """Options of a cache method; the methods without any use this class itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SparseOptions(CacheOptions):
    """Options of ``sparse`` (Sparse-dLLM, arXiv 2508.02558). The defaults are the paper's."""

    retention_ratio: float = Field(default=0.5, ge=0, le=1)
    """Share of the candidates (positions outside the block) that a layer retains."""
    pool_kernel_size: int = Field(default=3, ge=1)
    """Width of the max-pooling over importance scores; odd, 1 is none."""
    update_delay: int = Field(default=1, ge=0)
    """FULL steps of a block before the one that selects what is retained."""
    scope: Literal["bidirectional", "prefix"] = "bidirectional"
    """Candidates on both sides of the block (Algorithm 4), or before it only, with the suffix kept whole (5)."""

    @field_validator("pool_kernel_size")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("must be odd, so that the window has a middle")
        return value


class DKVOptions(CacheOptions):
    """Options of ``dkv`` (dKV-Cache-Decode, arXiv 2505.15781)."""

    refresh_interval: int = Field(default=8, ge=1)
    """Steps of a block from one recomputation of the whole canvas to the next."""


class DLLMCacheOptions(CacheOptions):
    """Options of ``dllm_cache`` (dLLM-Cache, arXiv 2506.06295). Intervals count forward passes over the response."""

    prompt_refresh_interval: int = Field(default=50, ge=1)
    """Forward passes from one recomputation of the prompt to the next (Kp)."""
    response_refresh_interval: int = Field(default=7, ge=1)
    """Forward passes from one recomputation of the response to the next (Kr)."""
    update_ratio: float = Field(default=0.25, ge=0, le=1)
    """Share of the response rows that the passes between recompute, per layer (ρ)."""
    similarity: Literal["value", "key"] = "value"
    """Rows whose fresh value (or key) differs most from the cached one are recomputed."""
    exclude_prompt_states: bool = True
    """Keep no features of prompt rows, which nothing reads (MaskKV's prompt-state exclusion). Off, they take the
    memory that dLLM-Cache's own code gives them; no token changes."""


CACHE_OPTIONS: dict[str, type[CacheOptions]] = {
    "none": CacheOptions,
    "prefix": CacheOptions,
    "dual": CacheOptions,
    "sparse": SparseOptions,
    "dkv": DKVOptions,
    "dllm_cache": DLLMCacheOptions,
}
"""Cache methods and the model their ``cache_options`` are validated with."""
PAPER = "paper"
"""As ``cache_options``: the settings of the method's paper, which are the defaults."""


class EngineOptions(BaseModel):
    """Options of one engine, the same in every process of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cache_method: str = "none"
    cache_options: dict[str, Any] | Literal["paper"] = {}
    page_size: int = Field(default=32, ge=1)
    """Tokens per page of one layer."""
    trace: bool = False
    """Record per forward pass which positions were unmasked and computed."""
    request_defaults: dict[str, Any] = {}
    """Request options for requests that name none; see ``params.DEFAULTABLE_OPTIONS``."""

    def with_paper_settings(self, settings: dict[str, Any]) -> "EngineOptions":
        """The cache options that were left open filled with ``settings``; raises ``ValueError`` as ``parse``."""
        chosen = {} if isinstance(self.cache_options, str) else self.cache_options
        return self.parse(self.model_dump() | {"cache_options": settings | chosen})

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
            known = ", ".join(cls.model_fields)
            raise ValueError(f"{explain(error, 'engine option')} (engine options: {known})") from None
        _ = options.cache
        if options.request_defaults:
            # What a request may ask for is defined on top of this module, and needs vLLM.
            from dllm_engine.params import check_request_defaults

            check_request_defaults(options)
        return options

    @property
    def uses_pages(self) -> bool:
        return self.cache_method != "none"

    @cached_property
    def cache(self) -> CacheOptions:
        """The options of the cache method, validated."""
        schema = CACHE_OPTIONS[self.cache_method]
        try:
            return schema.model_validate({} if self.cache_options == PAPER else self.cache_options)
        except ValidationError as error:
            known = ", ".join(schema.model_fields) or "no options"
            raise ValueError(
                f"{explain(error, 'cache option')} (cache_method={self.cache_method!r} has {known})"
            ) from None

    @classmethod
    def from_vllm_config(cls, vllm_config: "VllmConfig") -> "EngineOptions":
        """The options in ``additional_config["dllm"]``."""
        additional = vllm_config.additional_config
        raw = additional.get(OPTIONS_KEY, {}) if isinstance(additional, dict) else {}
        if not isinstance(raw, dict):
            raise ValueError(f"additional_config[{OPTIONS_KEY!r}]={raw!r} must be a dictionary of engine options")
        return cls.parse(raw)
