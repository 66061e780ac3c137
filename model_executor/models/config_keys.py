"""What a ``config.json`` may state, by model family: keys, their types, and what a missing one means."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from dllm_engine.families import DREAM, FAMILIES, LLADA, LLADA2, LLADA_MOE, SDAR, SDAR_MOE
from dllm_engine.options import explain

LLADA_RELEASED_VOCAB_SIZE = 126_464
LLADA_RELEASED_END_OF_TURN_ID = 126_348
DREAM_RELEASED_VOCAB_SIZE = 152_064
DREAM_RELEASED_END_OF_TURN_ID = 151_645
LLADA_MOE_RELEASED_VOCAB_SIZE = 157_184
LLADA_MOE_RELEASED_MASK_ID = 156_895
LLADA_MOE_RELEASED_END_ID = 156_892
"""These three are LLaDA2's as well."""
SDAR_RELEASED_VOCAB_SIZE = 151_936
SDAR_RELEASED_MASK_ID = 151_669
SDAR_RELEASED_END_ID = 151_643
SDAR_RELEASED_END_OF_TURN_ID = 151_645

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
RopeBase = Annotated[float, Field(gt=0)]
TokenId = Annotated[int, Field(ge=0)]
WeightType = Annotated[
    Literal["float32", "bfloat16", "float16"], BeforeValidator(lambda value: str(value).removeprefix("torch."))
]


class CheckpointKeys(BaseModel):
    """Keys of ``config.json`` that all families share; keys that no schema names may hold anything."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    family: ClassVar[Any]
    size_keys: ClassVar[tuple[str, str, str]]
    """The family's names of the hidden size, the attention heads and the KV heads."""

    architectures: list[str] | None = None
    dtype: WeightType | None = None
    torch_dtype: WeightType | None = None
    quantization_config: dict[str, Any] | None = None
    vocab_size: VocabularySize
    rms_norm_eps: Epsilon
    rope_theta: RopeBase
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
    def _fits_together(self) -> Self:
        names = self.size_keys
        hidden, heads, kv_heads = (getattr(self, name) for name in names)
        head_dim = getattr(self, "head_dim", None)
        if head_dim is not None and head_dim % 2:
            raise ValueError(f"head_dim={head_dim} is odd; RoPE needs heads of an even size")
        if head_dim is None and (hidden % heads or hidden // heads % 2):
            raise ValueError(
                f"{names[1]}={heads} does not divide {names[0]}={hidden} into heads of an even size, which RoPE needs"
            )
        if kv_heads is not None and heads % kv_heads:
            raise ValueError(f"{names[2]}={kv_heads} does not divide {names[1]}={heads}")
        if (chosen := getattr(self, "num_experts_per_tok", 0)) > (experts := getattr(self, "num_experts", 0)):
            raise ValueError(f"num_experts_per_tok={chosen} of num_experts={experts}")
        rows = max(self.vocab_size, getattr(self, "embedding_size", None) or 0)
        if self.mask_token_id is not None and self.mask_token_id >= rows:
            raise ValueError(f"mask_token_id={self.mask_token_id} is outside the vocabulary of {rows}")
        return self

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> Self:
        """Validate ``values``; raises ``ValueError`` naming ``source``, the key, its value and what it may be."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ValueError(f"{source}: {explain(error, '')}") from None


class LLaDAKeys(CheckpointKeys):
    """LLaDA's keys, and what its checkpoints mean where they leave one out."""

    family = LLADA
    size_keys = ("d_model", "n_heads", "n_kv_heads")

    d_model: Width = 4096
    n_heads: HeadCount = 32
    n_kv_heads: HeadCount | None = None
    n_layers: LayerCount = 32
    mlp_hidden_size: Width | None = None
    mlp_ratio: HeadCount = 4
    vocab_size: VocabularySize = LLADA_RELEASED_VOCAB_SIZE
    embedding_size: VocabularySize | None = None
    max_sequence_length: Positions = 4096
    rope_theta: RopeBase = 500_000.0
    rms_norm_eps: Epsilon = 1e-5
    weight_tying: bool = False
    include_bias: bool = False
    include_qkv_bias: bool = False


class DreamKeys(CheckpointKeys):
    """Dream's keys, and what its checkpoints mean where they leave one out."""

    family = DREAM
    size_keys = ("hidden_size", "num_attention_heads", "num_key_value_heads")

    vocab_size: VocabularySize = DREAM_RELEASED_VOCAB_SIZE
    hidden_size: Width = 3584
    intermediate_size: Width = 18_944
    num_hidden_layers: LayerCount = 28
    num_attention_heads: HeadCount = 28
    num_key_value_heads: HeadCount | None = None
    hidden_act: str = "silu"
    max_position_embeddings: Positions = 131_072
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: RopeBase = 1_000_000.0
    rope_scaling: dict[str, Any] | None = None
    use_sliding_window: bool = False
    tie_word_embeddings: bool = False


class LLaDAMoEKeys(CheckpointKeys):
    """LLaDA-MoE's keys, and what its checkpoints mean where they leave one out."""

    family = LLADA_MOE
    size_keys = ("hidden_size", "num_attention_heads", "num_key_value_heads")

    vocab_size: VocabularySize = LLADA_MOE_RELEASED_VOCAB_SIZE
    hidden_size: Width = 2048
    num_hidden_layers: LayerCount = 16
    num_attention_heads: HeadCount = 16
    num_key_value_heads: HeadCount | None = None
    max_position_embeddings: Positions = 8192
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: RopeBase = 50_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_type: str = "default"
    tie_word_embeddings: bool = False
    qk_layernorm: bool | None = None
    num_experts: ExpertCount = 64
    num_experts_per_tok: ExpertCount = 8
    expert_intermediate_size: Width = 1024
    dense_intermediate_size: Width | None = None
    shared_expert_intermediate_size: Width | None = None
    moe_layer_freq: list[Literal[0, 1]] = []
    moe_router_enable_expert_bias: bool | None = None
    moe_router_score_function: str | None = None
    norm_topk_prob: bool | None = None
    routed_scaling_factor: float | None = None
    partial_rotary_factor: float | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    clip_qkv: float | None = None

    @model_validator(mode="after")
    def _layers_fit(self) -> Self:
        if self.moe_layer_freq and len(self.moe_layer_freq) != self.num_hidden_layers:
            raise ValueError(f"moe_layer_freq must hold num_hidden_layers={self.num_hidden_layers} numbers, 0 or 1")
        if 0 in self.moe_layer_freq and self.dense_intermediate_size is None:
            raise ValueError("moe_layer_freq has dense layers, which need a dense_intermediate_size")
        return self


class BlockModelKeys(CheckpointKeys):
    """Keys of models whose attention goes by blocks."""

    size_keys = ("hidden_size", "num_attention_heads", "num_key_value_heads")

    block_size: Positions
    """Tokens per block; released checkpoints leave it out."""
    num_key_value_heads: HeadCount | None = None
    head_dim: Width | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Epsilon = 1e-6
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False


class SDARKeys(BlockModelKeys):
    """SDAR's keys, and what its checkpoints mean where they leave one out."""

    family = SDAR

    block_size: Positions = 4
    vocab_size: VocabularySize = SDAR_RELEASED_VOCAB_SIZE
    hidden_size: Width = 4096
    intermediate_size: Width = 12_288
    num_hidden_layers: LayerCount = 36
    num_attention_heads: HeadCount = 32
    max_position_embeddings: Positions = 32_768
    rope_theta: RopeBase = 1_000_000.0
    attention_bias: bool = False

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> Self:
        """Checkpoints that were trained for longer blocks are named after them: ``JetLM/SDAR-8B-Chat-b32``."""
        named = re.search(r"SDAR-[^/]*-b(\d+)(?=$|[-_/])", source)
        return super().read({"block_size": int(named[1])} | dict(values) if named else values, source)


class SDARMoeKeys(SDARKeys):
    """SDAR-MoE's keys, and what its checkpoints mean where they leave one out."""

    family = SDAR_MOE

    hidden_size: Width = 2048
    intermediate_size: Width = 6144
    num_hidden_layers: LayerCount = 48
    num_key_value_heads: HeadCount | None = 4
    num_experts: ExpertCount = 128
    num_experts_per_tok: ExpertCount = 8
    moe_intermediate_size: Width = 768
    norm_topk_prob: bool = True  # JetEngine, the authors' engine, reads no such key and always does
    decoder_sparse_step: LayerCount = 1
    mlp_only_layers: list[Annotated[int, Field(ge=0)]] | None = None

    @model_validator(mode="after")
    def _layers_exist(self) -> Self:
        if (last := max(self.mlp_only_layers or [0])) >= self.num_hidden_layers:
            raise ValueError(f"mlp_only_layers names layer {last} of num_hidden_layers={self.num_hidden_layers}")
        return self


class LLaDA2Keys(BlockModelKeys):
    """LLaDA2's keys, and what its checkpoints mean where they leave one out."""

    family = LLADA2

    block_size: Positions = 32
    vocab_size: VocabularySize = LLADA_MOE_RELEASED_VOCAB_SIZE
    hidden_size: Width = 2048
    intermediate_size: Width = 5120
    num_hidden_layers: LayerCount = 20
    num_attention_heads: HeadCount = 16
    max_position_embeddings: Positions = 32_768
    rope_theta: RopeBase = 600_000.0
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    use_qk_norm: bool = True
    use_qkv_bias: bool = False
    use_bias: bool = False
    num_experts: ExpertCount = 256
    num_experts_per_tok: ExpertCount = 8
    moe_intermediate_size: Width = 512
    num_shared_experts: Annotated[int, Field(ge=0, le=1000)] | None = 1
    first_k_dense_replace: Annotated[int, Field(ge=0)] = 1
    n_group: ExpertCount = 8
    topk_group: ExpertCount = 4
    routed_scaling_factor: Annotated[float, Field(gt=0)] = 2.5
    moe_router_enable_expert_bias: bool = True

    @model_validator(mode="after")
    def _experts_fit(self) -> Self:
        if self.num_experts % self.n_group or self.num_experts < 2 * self.n_group:
            raise ValueError(
                f"n_group={self.n_group} does not divide num_experts={self.num_experts} into groups of two or more"
            )
        if self.topk_group > self.n_group:
            raise ValueError(f"topk_group={self.topk_group} of n_group={self.n_group}")
        if self.num_experts_per_tok > (most := self.topk_group * self.num_experts // self.n_group):
            raise ValueError(f"num_experts_per_tok={self.num_experts_per_tok} of the {most} in topk_group groups")
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise ValueError(f"first_k_dense_replace={self.first_k_dense_replace} of {self.num_hidden_layers} layers")
        return self
