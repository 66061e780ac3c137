"""Keys of the families' configs."""

from typing import Annotated, Any, Literal, Self, get_type_hints

from pydantic import Field, create_model, model_validator

from dllm_engine.families import FAMILIES, LLADA, LLADA2, LLADA_MOE, SDAR_MOE, ModelFamily
from dllm_engine.model_executor.models.config_keys import (
    CheckpointKeys,
    Count,
    Epsilon,
    ExpertShape,
    Off,
    RopeBase,
    Size,
    rotary_dim,
)


class LLaDAKeys(CheckpointKeys):
    """Keys by LLaDA's own names."""

    d_model: Size = 4096
    n_heads: Size = 32
    n_kv_heads: Size | None = None
    n_layers: Size = 32
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
        # The embedding has `embedding_size` rows; the tokenizer may use fewer.
        self.vocab_size = max(self.vocab_size, self.embedding_size or 0)
        return self


class TransformersKeys(CheckpointKeys):
    """Keys of all other families, by the names that transformers gives them."""

    hidden_size: Size
    num_hidden_layers: Size
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
    """Keys of models in which every layer may have an MLP."""

    intermediate_size: Size


class LLaDAMoEKeys(TransformersKeys):
    """LLaDA-MoE's experts."""

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
            dense_layers=tuple(i for i, has_experts in enumerate(config.moe_layer_freq) if not has_experts),
        )

    @model_validator(mode="after")
    def _layers_fit(self) -> Self:
        if self.moe_layer_freq and len(self.moe_layer_freq) != self.num_hidden_layers:
            raise ValueError(f"moe_layer_freq must hold num_hidden_layers={self.num_hidden_layers} numbers, 0 or 1")
        if 0 in self.moe_layer_freq and self.dense_intermediate_size is None:
            raise ValueError("moe_layer_freq has dense layers, which need a dense_intermediate_size")
        return self


class SDARMoeKeys(DenseKeys):
    """SDAR-MoE's experts, by Qwen3-MoE's keys."""

    num_experts: Size = 128
    num_experts_per_tok: Size = 8
    moe_intermediate_size: Size = 768
    norm_topk_prob: bool = True  # JetEngine, the authors' engine, reads no such key and always does
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[Count] | None = None

    @staticmethod
    def experts_of(config: Any) -> ExpertShape:
        dense, step = config.mlp_only_layers or [], config.decoder_sparse_step
        return ExpertShape(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            intermediate_size=config.moe_intermediate_size,
            dense_layers=tuple(i for i in range(config.num_hidden_layers) if i in dense or (i + 1) % step),
            renormalize=config.norm_topk_prob,
        )


class LLaDA2Keys(DenseKeys):
    """LLaDA2's experts, and RoPE on a part of each head."""

    rotary_dim: Size | None = None
    use_qk_norm: bool = True
    num_experts: Size = 256
    num_experts_per_tok: Size = 8
    moe_intermediate_size: Size = 512
    num_shared_experts: Count | None = 1
    first_k_dense_replace: Count = 1
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
            shared_intermediate_size=config.moe_intermediate_size * (config.num_shared_experts or 0),
            has_bias=config.moe_router_enable_expert_bias,
            dense_layers=tuple(range(config.first_k_dense_replace)),
            num_groups=config.n_group,
            num_kept=config.topk_group,
            scale=config.routed_scaling_factor,
            capacity=config.expert_capacity,
        )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.expert_capacity and not self.num_experts_per_tok <= self.expert_capacity <= self.num_experts:
            raise ValueError(
                f"expert_capacity={self.expert_capacity} is not between num_experts_per_tok="
                f"{self.num_experts_per_tok} and num_experts={self.num_experts}"
            )
        if self.rotary_dim not in (None, turned := rotary_dim(self, self.head_dim or 0)):
            raise ValueError(
                f"rotary_dim={self.rotary_dim}, but partial_rotary_factor turns {turned}; state one of them"
            )
        return self


_OWN_KEYS: dict[str, type[CheckpointKeys]] = {
    LLADA.architecture: LLaDAKeys,
    LLADA_MOE.architecture: LLaDAMoEKeys,
    SDAR_MOE.architecture: SDARMoeKeys,
    LLADA2.architecture: LLaDA2Keys,
}


def keys_of(family: ModelFamily) -> type[CheckpointKeys]:
    """The keys of a family's configs, with what its row in the table of families says of them."""
    base = _OWN_KEYS.get(family.architecture, DenseKeys)
    types = get_type_hints(base, include_extras=True)
    fields: dict[str, Any] = {name: (types[name], value) for name, value in family.defaults.items()}
    for name, values in family.fixed.items():
        known = tuple(value for value in values if value is not None)
        allowed: Any = Literal[known] if known else type(None)
        fields[name] = (allowed | None if None in values else allowed, values[0])
    if family.attention == "block_causal":
        fields["block_size"] = (Size, family.default_block_length)
    keys = create_model(f"{family.architecture}Keys", __base__=base, **fields)
    keys.family = family
    return keys


SCHEMAS = {architecture: keys_of(family) for architecture, family in FAMILIES.items()}
"""By architecture."""
