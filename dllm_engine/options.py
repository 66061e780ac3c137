"""Engine options: what ``LLM(cache_method=…, cache_options=…, trace=…)`` and ``--additional-config`` accept."""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

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


class NoCacheOptions(BaseModel):
    """``cache_method="none"`` has no options."""

    model_config = ConfigDict(extra="forbid", frozen=True)


CACHE_OPTIONS: dict[str, type[BaseModel]] = {"none": NoCacheOptions}
"""Cache methods and the model their ``cache_options`` are validated with."""


class EngineOptions(BaseModel):
    """Options of one engine, the same in every process of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cache_method: str = "none"
    cache_options: dict[str, Any] = {}
    trace: bool = False
    """Record per forward pass which positions were unmasked and computed."""

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
        schema = CACHE_OPTIONS[options.cache_method]
        try:
            schema.model_validate(options.cache_options)
        except ValidationError as error:
            known = ", ".join(schema.model_fields) or "no options"
            raise ValueError(
                f"{explain(error, 'cache option')} (cache_method={options.cache_method!r} has {known})"
            ) from None
        return options

    @classmethod
    def from_vllm_config(cls, vllm_config: "VllmConfig") -> "EngineOptions":
        """The options in ``additional_config["dllm"]``."""
        additional = vllm_config.additional_config
        raw = additional.get(OPTIONS_KEY, {}) if isinstance(additional, dict) else {}
        if not isinstance(raw, dict):
            raise ValueError(f"additional_config[{OPTIONS_KEY!r}]={raw!r} must be a dictionary of engine options")
        return cls.parse(raw)
