"""Keys of a ``config.json``: types, and how they fit together.

A key is read, or is listed as one that changes nothing; any other is refused. ``Literal`` keys must have that value.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dllm_engine.families import FAMILIES, ModelFamily
from dllm_engine.options import explain, shortened

# No model comes near this bound; it keeps a damaged file from asking for all memory.
Size = Annotated[int, Field(ge=1, le=1 << 24)]
Epsilon = Annotated[float, Field(gt=0, lt=1)]
RopeBase = Annotated[float, Field(gt=1)]
WeightType = Annotated[
    Literal["float32", "bfloat16", "float16"], BeforeValidator(lambda value: str(value).removeprefix("torch."))
]
Off = Literal[False] | None
Count = Annotated[int, Field(ge=0, le=1 << 24)]

_WITHOUT_EFFECT = (
    *("auto_map", "name_or_path", "tokenizer_class", "attn_implementation", "fuse_cross_entropy"),
    *("attention_dropout", "embedding_dropout", "output_dropout", "residual_dropout", "initializer_range"),
    *("output_router_logits", "router_aux_loss_coef"),
)
"""Keys of any family that say nothing about what a model computes."""
_BLOCK_SIZE_IN_NAME = re.compile(r"SDAR-[^/]*-b(\d+)(?=$|[-_/])")
"""Checkpoints that were trained for longer blocks are named after them: ``JetLM/SDAR-8B-Chat-b32``."""
_ROPE_KEYS = (
    *("rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
)
"""Keys of RoPE's tables that are implemented."""
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn")


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of a mixture of experts."""

    num_experts: int
    top_k: int
    """Experts that compute a row."""
    intermediate_size: int
    """Width of each expert."""
    shared_intermediate_size: int = 0
    """Width of the expert that computes every row; 0: there is none."""
    has_bias: bool = False
    """True if a bias is added to the router's probabilities."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have a plain MLP instead."""
    renormalize: bool = False
    """True if the weights of a row from the softmax of the router's logits are divided by their sum."""
    num_groups: int = 0
    """Groups that experts are chosen by, from the sigmoid of the router's logits (LLaDA2); 0: all are one group."""
    num_kept: int = 0
    """Groups that a row's experts come from."""
    scale: float = 1.0
    """Factor of a row's weights, which sum to 1 before, where experts are in groups."""
    capacity: int = 0
    """Experts that the rows of a block share (LLaDA2.2). They take the place of groups; 0: groups count."""


def rotary_dim(config: Any, head_dim: int) -> int:
    """Numbers of each head that RoPE turns, from the first on."""
    return int(head_dim * (getattr(config, "partial_rotary_factor", None) or 1))


class CheckpointKeys(BaseModel):
    """Keys of ``config.json`` that all families share."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    family: ClassVar[ModelFamily]

    architectures: list[str] | None = None
    dtype: WeightType | None = None
    torch_dtype: WeightType | None = None
    quantization_config: dict[str, Any] | None = None
    vocab_size: Size
    rms_norm_eps: Epsilon
    rope_theta: RopeBase
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    """Replacement of the two keys above in transformers 5, which checks the values of its keys."""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    mask_token_id: Count | None = None
    end_of_turn_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None

    @model_validator(mode="after")
    def _of_the_family(self) -> Self:
        stated, model_type = self.architectures, self.family.model_type
        if stated is not None and self.family.architecture not in stated:
            known = [repr(family.architecture) for family in FAMILIES.values() if family.model_type == model_type]
            raise ValueError(
                f"architectures={shortened(stated)}: model_type={model_type!r} goes with the architecture "
                f"{' or '.join(known)}"
            )
        if self.vocab_size == type(self).model_fields["vocab_size"].default:
            for name, token in self.family.special_ids.items():
                if getattr(self, name) is None:
                    setattr(self, name, token)
        return self

    @staticmethod
    def experts_of(config: Any) -> ExpertShape | None:
        """The experts that keys state; None: all layers have a plain MLP."""
        return None

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        sizes = "hidden_size", "num_attention_heads", "num_key_value_heads"
        names = [self.family.key_names.get(size, size) for size in sizes]
        hidden, heads, kv_heads = (getattr(self, name) for name in names)
        if (getattr(self, "head_dim", None) or hidden / heads) % 2:
            raise ValueError(f"{names[0]}={hidden}, {names[1]}={heads}: RoPE needs heads of an even size")
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
        stated = {name: value for name, value in own.items() if name in self.model_fields_set}
        rope: dict[str, Any] = {}
        for place in (stated, self.rope_scaling or {}, self.rope_parameters or {}):
            for key, value in place.items():
                name = "rope_type" if key == "type" else key
                if value is not None and rope.setdefault(name, value) != value:
                    raise ValueError(f"{name}={rope[name]!r}, but {name}={value!r} elsewhere; state one of them")
        rope = {"rope_type": "default"} | own | rope
        kind, base, share = rope["rope_type"], rope["rope_theta"], rope["partial_rotary_factor"]
        if kind not in _ROPE_TYPES:
            raise ValueError(f"rope_type={kind!r} is not supported, only {', '.join(_ROPE_TYPES)}")
        if unknown := sorted(rope.keys() - {*_ROPE_KEYS}):
            raise ValueError(
                f"{unknown[0]}={rope[unknown[0]]!r} is not known of RoPE, which may have {', '.join(_ROPE_KEYS)}"
            )
        if kind != "default" and not isinstance(rope.get("factor"), int | float):
            raise ValueError(f"rope_type={kind!r} needs a number as factor")
        if not isinstance(base, int | float) or base <= 1:
            raise ValueError(f"rope_theta={base!r} must be a number above 1")
        if share not in (None, 1) and not self.family.turns_parts:
            raise ValueError(f"partial_rotary_factor={share!r} is not supported, only 1")
        if kind == "yarn":
            longest = self.family.key_names.get("max_position_embeddings", "max_position_embeddings")
            rope.setdefault("original_max_position_embeddings", getattr(self, longest))
        self.rope_theta, self.partial_rotary_factor, self.rope_scaling = base, share, None
        self.rope_parameters = {name: value for name, value in rope.items() if value is not None}
        return self

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> Self:
        """Validate ``values``; raises ``ValueError`` naming ``source``, the key, its value and what it may be."""
        other, reason = cls.family.other_kind or ("(?!)", "")
        if named := re.search(other, source, re.IGNORECASE):
            raise ValueError(f"{source}: {named[0]} {reason}")
        if "block_size" in cls.model_fields and (named := _BLOCK_SIZE_IN_NAME.search(source)):
            values = {"block_size": int(named[1])} | dict(values)
        ignored = {*_WITHOUT_EFFECT, *cls.family.without_effect} - cls.model_fields.keys()
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
