"""Keys of a ``config.json`` that all model families share, and the rule for all keys.

A key is read, or is listed as one that changes nothing; any other is refused. ``Literal`` keys must have that value.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from dllm_engine.families import FAMILIES, ModelFamily
from dllm_engine.options import explain, shortened

NO_BITSANDBYTES = (
    "vLLM 0.32 has removed it; take a checkpoint in GPTQ's, AWQ's or compressed-tensors' INT4, or make one with "
    "examples/quantize.py"
)

# No model comes near these bounds; they keep a damaged file from asking for all memory.
LayerCount = Annotated[int, Field(ge=1, le=10_000)]
HeadCount = Annotated[int, Field(ge=1, le=100_000)]
ExpertCount = Annotated[int, Field(ge=1, le=100_000)]
Width = Annotated[int, Field(ge=1, le=10_000_000)]
VocabularySize = Annotated[int, Field(ge=1, le=1 << 24)]
Positions = Annotated[int, Field(ge=1, le=1 << 24)]
Epsilon = Annotated[float, Field(gt=0, lt=1)]
One = Annotated[float, Field(ge=1, le=1)]
RopeBase = Annotated[float, Field(gt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Factor = Annotated[float, Field(ge=1, le=1000)]
Positive = Annotated[float, Field(gt=0, le=1000)]
TokenId = Annotated[int, Field(ge=0)]
WeightType = Annotated[
    Literal["float32", "bfloat16", "float16"], BeforeValidator(lambda value: str(value).removeprefix("torch."))
]
Off = Literal[False] | None

_WITHOUT_EFFECT = (
    *("auto_map", "name_or_path", "tokenizer_class", "attn_implementation", "fuse_cross_entropy"),
    *("attention_dropout", "embedding_dropout", "output_dropout", "residual_dropout", "initializer_range"),
    *("output_router_logits", "router_aux_loss_coef"),
)
"""Keys of any family that say nothing about what a model computes."""
_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_KEYS_OF_TYPE: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", *_YARN),
}
_COMMON = ("rope_type", "rope_theta", "partial_rotary_factor")


class RopeKeys(BaseModel):
    """``rope_parameters`` of a config.json, or ``rope_scaling``, as older ones call it."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    rope_type: Literal["default", "linear", "dynamic", "yarn"] = "default"
    rope_theta: RopeBase | None = None
    partial_rotary_factor: Share | None = None
    factor: Factor | None = None
    original_max_position_embeddings: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, values: Any) -> Any:
        """``rope_type`` was ``type`` once."""
        if not isinstance(values, dict) or "type" not in values:
            return values
        new = {name: value for name, value in values.items() if name != "type"}
        if new.setdefault("rope_type", values["type"]) != values["type"]:
            raise ValueError(f"type={values['type']!r} and rope_type={new['rope_type']!r} differ; state one of them")
        return new

    @model_validator(mode="after")
    def _fits_its_type(self) -> Self:
        keys = _KEYS_OF_TYPE[self.rope_type]
        for name, value in self:
            if value is not None and name not in (*_COMMON, *keys):
                known = f"which has {', '.join(keys)}" if keys else "which has none"
                raise ValueError(f"{name}={value!r} is no key of rope_type={self.rope_type!r}, {known}")
        if keys and self.factor is None:
            raise ValueError(f"rope_type={self.rope_type!r} needs a factor")
        return self


def rotary_dim(config: Any, head_dim: int) -> int:
    """Numbers of each head that RoPE turns, from the first on."""
    return int(head_dim * (getattr(config, "partial_rotary_factor", None) or 1))


class CheckpointKeys(BaseModel):
    """Keys of ``config.json`` that all families share."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    family: ClassVar[ModelFamily]
    size_keys: ClassVar[tuple[str, str, str, str]]
    """The family's names of the hidden size, the attention heads, the KV heads and the longest sequence."""
    without_effect: ClassVar[tuple[str, ...]] = ()
    """Keys of the family's checkpoints that say nothing about what the model computes."""
    released_ids: ClassVar[dict[str, int]] = {}
    """Special tokens of the released vocabulary, for a config that leaves them out."""
    turns_parts: ClassVar[bool] = False
    """True if RoPE may turn a part of each head only."""
    other_kind: ClassVar[tuple[str, str] | None] = None
    """The name of checkpoints whose configs are like the family's, and why they are not supported."""

    architectures: list[str] | None = None
    dtype: WeightType | None = None
    torch_dtype: WeightType | None = None
    quantization_config: dict[str, Any] | None = None
    vocab_size: VocabularySize
    rms_norm_eps: Epsilon
    rope_theta: RopeBase
    rope_scaling: RopeKeys | None = None
    rope_parameters: RopeKeys | None = None
    """Replacement of the two keys above in transformers 5."""
    partial_rotary_factor: Share | None = None
    mask_token_id: TokenId | None = None
    end_of_turn_token_id: Any = None
    eos_token_id: Any = None

    @field_validator("architectures")
    @classmethod
    def _of_this_family(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and cls.family.architecture not in value:
            model_type = cls.family.model_type
            known = [repr(family.architecture) for family in FAMILIES.values() if family.model_type == model_type]
            raise ValueError(f"model_type={model_type!r} goes with the architecture {' or '.join(known)}")
        return value

    @field_validator("quantization_config")
    @classmethod
    def _with_a_method(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        method = "" if value is None else value.get("quant_method")
        if not isinstance(method, str):
            raise ValueError("must name a 'quant_method'")
        if method == "bitsandbytes":
            raise ValueError(f"quant_method='bitsandbytes': {NO_BITSANDBYTES}")
        return value

    @field_validator("end_of_turn_token_id", "eos_token_id")
    @classmethod
    def _token_ids(cls, value: Any) -> Any:
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in ids):
            raise ValueError("must be a token id or a list of token ids")
        return value

    @model_validator(mode="after")
    def _with_released_ids(self) -> Self:
        if self.vocab_size == type(self).model_fields["vocab_size"].default:
            for name, token in self.released_ids.items():
                if getattr(self, name) is None:
                    setattr(self, name, token)
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        names = self.size_keys
        hidden, heads, kv_heads, _ = (getattr(self, name) for name in names)
        head_dim = getattr(self, "head_dim", None)
        if head_dim is not None and head_dim % 2:
            raise ValueError(f"head_dim={head_dim} is odd; RoPE needs heads of an even size")
        if head_dim is None and (hidden % heads or hidden // heads % 2):
            raise ValueError(
                f"{names[1]}={heads} does not divide {names[0]}={hidden} into heads of an even size, which RoPE needs"
            )
        if kv_heads is None:
            setattr(self, names[2], heads)
        elif heads % kv_heads:
            raise ValueError(f"{names[2]}={kv_heads} does not divide {names[1]}={heads}")
        if (chosen := getattr(self, "num_experts_per_tok", 0)) > (experts := getattr(self, "num_experts", 0)):
            raise ValueError(f"num_experts_per_tok={chosen} of num_experts={experts}")
        rows = max(self.vocab_size, getattr(self, "embedding_size", None) or 0)
        if self.mask_token_id is not None and self.mask_token_id >= rows:
            raise ValueError(f"mask_token_id={self.mask_token_id} is outside the vocabulary of {rows}")
        return self

    @model_validator(mode="after")
    def _one_rope(self) -> Self:
        """Collect everything about RoPE in ``rope_parameters``; base and share keep keys of their own too."""
        own = {name: getattr(self, name) for name in ("rope_theta", "partial_rotary_factor")}
        rope = {name: value for name, value in own.items() if name in self.model_fields_set and value is not None}
        for place in ("rope_scaling", "rope_parameters"):
            inside = (getattr(self, place) or RopeKeys()).model_dump(exclude_unset=True, exclude_none=True)
            for name, value in inside.items():
                if rope.setdefault(name, value) != value:
                    raise ValueError(
                        f"{place}: {name}={value!r}, but {name}={rope[name]!r} elsewhere; state one of them"
                    )
        rope = own | rope
        self.rope_theta, self.partial_rotary_factor = rope["rope_theta"], rope["partial_rotary_factor"]
        self.rope_scaling, self.rope_parameters = None, (keys := RopeKeys.model_validate(rope))
        hidden, heads, _, longest = (getattr(self, name) for name in self.size_keys)
        if keys.rope_type == "yarn" and keys.original_max_position_embeddings is None:
            keys.original_max_position_embeddings = longest
        turned = rotary_dim(self, getattr(self, "head_dim", None) or hidden // heads)
        if not self.turns_parts and keys.partial_rotary_factor not in (None, 1):
            raise ValueError(f"partial_rotary_factor={keys.partial_rotary_factor!r} is not supported, only 1")
        if turned % 2 or turned < (4 if keys.rope_type == "dynamic" else 2):
            raise ValueError(f"rope_type={keys.rope_type!r} cannot turn {turned} numbers of each head")
        return self

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> Self:
        """Validate ``values``; raises ``ValueError`` naming ``source``, the key, its value and what it may be."""
        if cls.other_kind is not None and (named := re.search(cls.other_kind[0], source, re.IGNORECASE)):
            raise ValueError(f"{source}: {named[0]} {cls.other_kind[1]}")
        ignored = {*_WITHOUT_EFFECT, *cls.without_effect} - cls.model_fields.keys()
        stated = {name: value for name, value in values.items() if name not in ignored and not name.startswith("_")}
        try:
            keys = cls.model_validate({name: value for name, value in stated.items() if name in cls.model_fields})
        except ValidationError as error:
            raise ValueError(f"{source}: {explain(error, '')}") from None
        # A key that is null asks for nothing.
        if unknown := [name for name in sorted(stated.keys() - cls.model_fields.keys()) if stated[name] is not None]:
            shown = ", ".join(f"{name}={shortened(stated[name])}" for name in unknown)
            raise ValueError(
                f"{source}: {shown}: not known of {cls.family.name}. Remove what does not change the computation; a "
                f"checkpoint that needs it is not supported"
            )
        return keys
