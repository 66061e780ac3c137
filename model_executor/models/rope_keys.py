"""Keys of a ``config.json`` about RoPE, which may be in several places."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dllm_engine.text import explain, shortened

RopeBase = Annotated[float, Field(gt=1)]
RopeShare = Annotated[float, Field(gt=0, le=1)]
Number = float | None
QUERY_SCALE = "llama_4_scaling_beta"
"""RoPE key of families that scale queries by their positions."""


class Rope(BaseModel):
    """Keys of the RoPE variants that are implemented."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    rope_type: Literal["default", "linear", "dynamic", "yarn"] = "default"
    rope_theta: RopeBase
    partial_rotary_factor: RopeShare | None = None
    factor: Annotated[float, Field(gt=0)] | None = None
    original_max_position_embeddings: Number = None
    attention_factor: Number = None
    beta_fast: Number = None
    beta_slow: Number = None
    mscale: Number = None
    mscale_all_dim: Number = None
    truncate: bool | None = None

    @model_validator(mode="after")
    def _factor_has_a_use(self) -> Self:
        if self.factor is None and self.rope_type != "default":
            raise ValueError(f"rope_type={self.rope_type!r} needs a factor")
        if self.factor is not None and "rope_type" not in self.model_fields_set:
            raise ValueError(f"factor={self.factor} needs a rope_type")
        return self

    @classmethod
    def checked(cls, rope: dict[str, Any]) -> dict[str, Any]:
        """Check that keys are valid together, and add the type. Raises ``ValueError``
        naming the key, its value and the allowed values.
        """
        try:
            cls.model_validate(rope)
        except ValidationError as error:
            raise ValueError(
                f"RoPE: {explain(error, 'key', cls.model_fields)}"
            ) from None
        return {"rope_type": "default"} | rope


class RopeWithQueryScale(Rope):
    """Keys of families that scale queries by their positions."""

    llama_4_scaling_beta: Number = None


def merged(*places: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the keys of several places. A key with value null counts as absent. Raises
    ``ValueError`` if two places differ.
    """
    rope: dict[str, Any] = {}
    for place in places:
        for key, value in place.items():
            if value is None:
                continue
            name = "rope_type" if key == "type" else key
            first = rope.setdefault(name, value)
            if first is not value and first != value:
                raise ValueError(
                    f"{name}={shortened(first)}, but {name}={shortened(value)} "
                    f"elsewhere; state one of them"
                )
    return rope
