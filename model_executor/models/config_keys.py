"""Keys of the ``config.json`` of each family: their types, and rules between them.

A key is read, or is listed as a key without effect. Any other key is refused.
``Literal`` keys must have that value.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from dllm_engine.families import FAMILIES, ExpertShape, KeysForm, ModelFamily
from dllm_engine.model_executor.loading.files import TokenIds
from dllm_engine.model_executor.models.rope_keys import (
    Rope,
    RopeBase,
    RopeShare,
    RopeWithQueryScale,
    merged,
)
from dllm_engine.model_name import has_word
from dllm_engine.text import (
    cut,
    explain,
    shortened,
)

# No model comes near these bounds. They protect memory and time from a damaged file.
Size = Annotated[int, Field(ge=1, le=1 << 24)]
Layers = Annotated[int, Field(ge=1, le=1024)]
Epsilon = Annotated[float, Field(gt=0, lt=1)]
WeightType = Annotated[
    Literal["float32", "bfloat16", "float16"],
    BeforeValidator(lambda value: str(value).removeprefix("torch.")),
]
Off = Literal[False] | None
Count = Annotated[int, Field(ge=0, le=1 << 24)]

_WITHOUT_EFFECT = (
    "name_or_path",
    "tokenizer_class",
    "attn_implementation",
    "fuse_cross_entropy",
    "attention_dropout",
    "embedding_dropout",
    "output_dropout",
    "residual_dropout",
    "initializer_range",
    "output_router_logits",
    "router_aux_loss_coef",
)
"""Keys of any family that do not affect what a model computes."""
_LONGEST_NAME = 100
"""Limit on the name of a quantization method, in characters."""
_MOST_KEYS = 10
"""Limit on the unknown keys that an error names."""


def block_size_of(family: ModelFamily, model_name: str) -> int | None:
    """Length of blocks in a model's own name."""
    if family.block_size_in_name is None:
        return None
    named = re.search(family.block_size_in_name, model_name)
    return None if named is None else int(named[1])


def kind_of(family: ModelFamily, model_name: str) -> str | None:
    """Kind of the family in a model's own name."""
    return next((kind for kind in family.kinds if has_word(model_name, kind)), None)


def rotary_dim(config: Any, head_dim: int) -> int:
    """Number of dimensions of each head that RoPE rotates, from the first on."""
    return int(head_dim * (getattr(config, "partial_rotary_factor", None) or 1))


class CheckpointKeys(BaseModel):
    """Keys of ``config.json`` that all families share."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    family: ClassVar[ModelFamily]

    architectures: list[str] | None = None
    dtype: WeightType | None = None
    torch_dtype: WeightType | None = None
    auto_map: dict[str, str | list[str | None]] = Field(default_factory=dict)
    quantization_config: dict[str, Any] | None = None
    vocab_size: Size
    rms_norm_eps: Epsilon
    rope_theta: RopeBase
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    """Replaces the two keys above in transformers 5, which checks its values."""
    partial_rotary_factor: RopeShare | None = None
    mask_token_id: Count | None = None
    end_of_turn_token_id: TokenIds = None
    eos_token_id: TokenIds = None

    @field_validator("quantization_config")
    @classmethod
    def _named_method(cls, stated: dict[str, Any] | None) -> dict[str, Any] | None:
        if stated is None:
            return stated
        for key, value in (
            ("quant_method", stated.get("quant_method")),
            ("format", stated.get("format", "")),
        ):
            if not isinstance(value, str) or len(value) > _LONGEST_NAME:
                raise ValueError(f"{key} must be a name")
        return stated

    @model_validator(mode="after")
    def _of_the_family(self) -> Self:
        stated = self.architectures
        model_type = self.family.model_type
        if stated is not None and not {*stated} & self.family.architectures:
            families = {**FAMILIES, self.family.architecture: self.family}.values()
            known = [
                repr(family.architecture)
                for family in families
                if family.model_type == model_type
            ]
            others = [
                f", and {family.architecture!r} with {family.model_type!r}"
                for family in families
                if family.architecture in stated
            ]
            raise ValueError(
                f"architectures={shortened(stated)}: model_type={model_type!r} goes "
                f"with the architecture {' or '.join(known)}{''.join(others)}"
            )
        if self.vocab_size == type(self).model_fields["vocab_size"].default:
            for name, token in self.family.special_ids.items():
                if getattr(self, name) is None:
                    setattr(self, name, token)
        return self

    @staticmethod
    def experts_of(config: Any) -> ExpertShape | None:
        """The experts by the keys; None: all layers have a plain MLP."""
        return None

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        sizes = "hidden_size", "num_attention_heads", "num_key_value_heads"
        names = [self.family.key_names.get(size, size) for size in sizes]
        hidden, heads, kv_heads = (getattr(self, name) for name in names)
        if (getattr(self, "head_dim", None) or hidden / heads) % 2:
            raise ValueError(
                f"{names[0]}={hidden}, {names[1]}={heads}: RoPE needs heads of an even "
                f"size"
            )
        if kv_heads is None:
            setattr(self, names[2], heads)
        elif heads % kv_heads:
            raise ValueError(
                f"{names[2]}={kv_heads} does not divide {names[1]}={heads}"
            )
        if (chosen := getattr(self, "num_experts_per_tok", 0)) > (
            experts := getattr(self, "num_experts", 0)
        ):
            raise ValueError(f"num_experts_per_tok={chosen} of num_experts={experts}")
        rows = max(self.vocab_size, getattr(self, "embedding_size", None) or 0)
        if self.mask_token_id is not None and self.mask_token_id >= rows:
            raise ValueError(
                f"mask_token_id={self.mask_token_id} is outside the vocabulary of "
                f"{rows}"
            )
        return self

    @model_validator(mode="after")
    def _one_rope(self) -> Self:
        """Collect all keys about RoPE in ``rope_parameters``. Base and share also keep
        their own keys.
        """
        repeated = {"rope_theta", "partial_rotary_factor"}
        defaults = self.model_dump(include=repeated, exclude_none=True)
        stated = merged(
            self.model_dump(include=repeated, exclude_unset=True),
            self.rope_scaling or {},
            self.rope_parameters or {},
        )
        schema = RopeWithQueryScale if self.family.scales_queries else Rope
        rope = schema.checked(defaults | stated)
        share = rope.get("partial_rotary_factor")
        if share not in (None, 1) and not self.family.turns_parts:
            raise ValueError(
                f"partial_rotary_factor={share!r} is not supported, only 1"
            )
        if rope["rope_type"] == "yarn":
            name = "max_position_embeddings"
            longest = getattr(self, self.family.key_names.get(name, name))
            rope.setdefault("original_max_position_embeddings", longest)
        self.rope_theta = rope["rope_theta"]
        self.partial_rotary_factor = share
        self.rope_scaling = None
        self.rope_parameters = rope
        return self

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str, model_name: str) -> Self:
        """Validate ``values``. Raises ``ValueError`` naming ``source``, the key, its
        value and the allowed values. ``model_name``: the model's own name, which may
        state what the file leaves out."""
        for other in cls.family.unsupported:
            has_keys = any(values.get(key) is not None for key in other.keys)
            if has_keys or has_word(model_name, other.name):
                raise ValueError(
                    f"{source}: {other.name} is not supported: it {other.reason}"
                )
        if (kind := kind_of(cls.family, model_name)) is not None:
            values = {"kind": kind} | dict(values)
        if (block_size := block_size_of(cls.family, model_name)) is not None:
            values = {"block_size": block_size} | dict(values)
        ignored = {
            *_WITHOUT_EFFECT,
            *cls.family.without_effect,
        } - cls.model_fields.keys()
        stated = {
            name: value
            for name, value in values.items()
            if name not in ignored and not name.startswith("_")
        }
        try:
            keys = cls.model_validate(
                {
                    name: value
                    for name, value in stated.items()
                    if name in cls.model_fields
                }
            )
        except ValidationError as error:
            raise ValueError(f"{source}: {explain(error, '')}") from None
        # A key with value null counts as absent.
        if unknown := [
            name
            for name in sorted(stated.keys() - cls.model_fields.keys())
            if stated[name] is not None
        ]:
            shown = ", ".join(
                f"{cut(name)}={shortened(stated[name])}"
                for name in unknown[:_MOST_KEYS]
            )
            if len(unknown) > _MOST_KEYS:
                shown += f" and {len(unknown) - _MOST_KEYS} more"
            raise ValueError(
                f"{source}: {shown}: not known of {cls.family.name}. Remove what does "
                f"not change the computation; a checkpoint that needs it is not "
                f"supported"
            )
        return keys


class OlmoKeys(CheckpointKeys):
    """Keys under OLMo's names."""

    d_model: Size = 4096
    n_heads: Size = 32
    n_kv_heads: Size | None = None
    n_layers: Layers = 32
    mlp_hidden_size: Size | None = None
    mlp_ratio: Size = 4
    vocab_size: Size = 126_464
    embedding_size: Size | None = None
    max_sequence_length: Size = 4096
    rope_theta: RopeBase = 500_000.0
    rms_norm_eps: Epsilon = 1e-5
    weight_tying: bool = False
    include_qkv_bias: bool = False

    @model_validator(mode="after")
    def _with_sizes(self) -> Self:
        if self.mlp_hidden_size is None:
            self.mlp_hidden_size = self.mlp_ratio * self.d_model
        # The embedding has `embedding_size` rows. The tokenizer may use fewer.
        self.vocab_size = max(self.vocab_size, self.embedding_size or 0)
        return self


class TransformersKeys(CheckpointKeys):
    """Keys under transformers' names."""

    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Size
    rms_norm_eps: Epsilon = 1e-6
    tie_word_embeddings: bool = False
    hidden_act: Literal["silu"] = "silu"
    use_sliding_window: Off = None
    layer_types: list[Literal["full_attention"]] | None = None
    use_mrope: Off = None

    @model_validator(mode="after")
    def _with_head_dim(self) -> Self:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        return self


class DenseKeys(TransformersKeys):
    """Keys of models without experts."""

    intermediate_size: Size


class SoftmaxExpertKeys(TransformersKeys):
    """Keys of experts that are chosen by a softmax of the router's logits, which may
    have a bias.
    """

    qk_layernorm: bool | None = None
    num_experts: Size = 64
    num_experts_per_tok: Size = 8
    expert_intermediate_size: Size = 1024
    dense_intermediate_size: Size | None = None
    shared_expert_intermediate_size: Size | None = None
    moe_layer_freq: list[Literal[0, 1]] = Field(default_factory=list)
    moe_router_enable_expert_bias: bool | None = None
    routed_scaling_factor: Annotated[float, Field(ge=1, le=1)] | None = None

    @staticmethod
    def experts_of(config: Any) -> ExpertShape:
        return ExpertShape(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            intermediate_size=config.expert_intermediate_size,
            shared_intermediate_size=config.shared_expert_intermediate_size or 0,
            has_bias=bool(config.moe_router_enable_expert_bias),
            dense_layers=tuple(
                i
                for i, has_experts in enumerate(config.moe_layer_freq)
                if not has_experts
            ),
        )

    @model_validator(mode="after")
    def _layers_fit(self) -> Self:
        if self.moe_layer_freq and len(self.moe_layer_freq) != self.num_hidden_layers:
            raise ValueError(
                f"moe_layer_freq must hold num_hidden_layers={self.num_hidden_layers} "
                f"numbers, 0 or 1"
            )
        if 0 in self.moe_layer_freq and self.dense_intermediate_size is None:
            raise ValueError(
                "moe_layer_freq has dense layers, which need a dense_intermediate_size"
            )
        return self


class Qwen3ExpertKeys(DenseKeys):
    """Keys of experts in some layers, under the names of transformers' Qwen3-MoE."""

    num_experts: Size = 128
    num_experts_per_tok: Size = 8
    moe_intermediate_size: Size = 768
    norm_topk_prob: bool = (
        True  # as in JetEngine, the authors' engine, which reads no such key
    )
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[Count] | None = None

    @staticmethod
    def experts_of(config: Any) -> ExpertShape:
        dense = config.mlp_only_layers or []
        step = config.decoder_sparse_step
        return ExpertShape(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            intermediate_size=config.moe_intermediate_size,
            dense_layers=tuple(
                i
                for i in range(config.num_hidden_layers)
                if i in dense or (i + 1) % step
            ),
            renormalize=config.norm_topk_prob,
        )


class GroupedExpertKeys(DenseKeys):
    """Keys of experts in groups, and of RoPE on a part of each head."""

    rotary_dim: Size | None = None
    use_qk_norm: bool = True
    num_experts: Size = 256
    num_experts_per_tok: Size = 8
    moe_intermediate_size: Size = 512
    num_shared_experts: Count | None = 1
    first_k_dense_replace: Annotated[int, Field(ge=0, le=1024)] = 1
    n_group: Size = 8
    topk_group: Size = 4
    routed_scaling_factor: Annotated[float, Field(gt=0)] = 2.5
    expert_capacity: Count = 0
    delete_token_id: Count | None = None
    split_token_id: Count | None = None
    moe_router_enable_expert_bias: bool = True

    @staticmethod
    def experts_of(config: Any) -> ExpertShape:
        return ExpertShape(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            intermediate_size=config.moe_intermediate_size,
            shared_intermediate_size=config.moe_intermediate_size
            * (config.num_shared_experts or 0),
            has_bias=config.moe_router_enable_expert_bias,
            dense_layers=tuple(range(config.first_k_dense_replace)),
            num_groups=config.n_group,
            num_kept=config.topk_group,
            scale=config.routed_scaling_factor,
            capacity=config.expert_capacity,
        )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (
            self.expert_capacity
            and not self.num_experts_per_tok <= self.expert_capacity <= self.num_experts
        ):
            raise ValueError(
                f"expert_capacity={self.expert_capacity} is not between "
                f"num_experts_per_tok={self.num_experts_per_tok} and "
                f"num_experts={self.num_experts}"
            )
        if self.rotary_dim not in (
            None,
            turned := rotary_dim(self, self.head_dim or 0),
        ):
            raise ValueError(
                f"rotary_dim={self.rotary_dim}, but partial_rotary_factor turns "
                f"{turned}; state one"
            )
        return self


_FORMS: dict[KeysForm, type[CheckpointKeys]] = {
    "dense": DenseKeys,
    "olmo": OlmoKeys,
    "softmax_experts": SoftmaxExpertKeys,
    "qwen3_experts": Qwen3ExpertKeys,
    "grouped_experts": GroupedExpertKeys,
}


def keys_of(family: ModelFamily) -> type[CheckpointKeys]:
    """Schema of a family's configs, with the facts of its row in the table of families."""
    base = _FORMS[family.keys_form]
    types = get_type_hints(base, include_extras=True)
    fields: dict[str, Any] = {
        name: (types[name], value) for name, value in family.defaults.items()
    }
    for name, values in family.fixed.items():
        known = tuple(value for value in values if value is not None)
        allowed: Any = Literal[known] if known else type(None)
        fields[name] = (allowed | None if None in values else allowed, values[0])
    if family.kinds:
        fields["kind"] = (Literal[tuple(family.kinds)] | None, None)
    if family.has_blocks:
        name = family.key_names.get("block_size", "block_size")
        fields[name] = (Size, family.default_block_length)
    keys = create_model(f"{family.architecture}Keys", __base__=base, **fields)
    keys.family = family
    return keys


SCHEMAS = {architecture: keys_of(family) for architecture, family in FAMILIES.items()}
"""Schemas by architecture."""
