"""Keys of ``config.json`` by model family: types, and defaults."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dllm_engine.families import DREAM, LLADA, LLADA2, LLADA_MOE, SDAR, SDAR_MOE
from dllm_engine.model_executor.models.config_keys import (
    CheckpointKeys,
    Epsilon,
    ExpertCount,
    HeadCount,
    LayerCount,
    Off,
    One,
    Positions,
    RopeBase,
    Share,
    VocabularySize,
    Width,
    rotary_dim,
)

_WINDOW = ("sliding_window", "max_window_layers")
"""Keys that count only where ``use_sliding_window`` is true."""


class LLaDAKeys(CheckpointKeys):
    """LLaDA's keys, and what its checkpoints mean where they leave one out."""

    family = LLADA
    size_keys = ("d_model", "n_heads", "n_kv_heads", "max_sequence_length")
    without_effect = (
        *("alibi_bias_max", "attention_layer_norm_with_affine", "flash_attention", "precision", "tie_word_embeddings"),
        *("init_device", "init_fn", "init_std", "init_cutoff_factor"),
    )
    released_ids: ClassVar[dict[str, int]] = {"end_of_turn_token_id": 126_348}

    d_model: Width = 4096
    n_heads: HeadCount = 32
    n_kv_heads: HeadCount | None = None
    n_layers: LayerCount = 32
    mlp_hidden_size: Width | None = None
    mlp_ratio: HeadCount = 4
    vocab_size: VocabularySize = 126_464
    embedding_size: VocabularySize | None = None
    max_sequence_length: Positions = 4096
    rope_theta: RopeBase = 500_000.0
    rms_norm_eps: Epsilon = 1e-5
    weight_tying: bool = False
    include_qkv_bias: bool = False
    block_type: Literal["llama"] = "llama"
    block_group_size: Literal[1] = 1
    activation_type: Literal["silu", "swiglu"] = "silu"
    layer_norm_type: Literal["rms"] = "rms"
    layer_norm_with_affine: Literal[True] = True
    bias_for_layer_norm: Off = None
    rope: Literal[True] = True
    rope_full_precision: Literal[True] = True
    alibi: Off = None
    include_bias: Off = None
    multi_query_attention: Off = None
    attention_layer_norm: Off = None
    input_emb_norm: Off = None
    scale_logits: Off = None
    clip_qkv: None = None

    @model_validator(mode="after")
    def _with_sizes(self) -> Self:
        if self.mlp_hidden_size is None:
            self.mlp_hidden_size = self.mlp_ratio * self.d_model
        # The embedding has `embedding_size` rows; the tokenizer may use fewer.
        self.vocab_size = max(self.vocab_size, self.embedding_size or 0)
        return self


class TransformersKeys(CheckpointKeys):
    """Keys of all other families, by the names that transformers gives them."""

    size_keys = ("hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")

    hidden_size: Width
    num_hidden_layers: LayerCount
    num_attention_heads: HeadCount
    num_key_value_heads: HeadCount | None = None
    head_dim: Width | None = None
    max_position_embeddings: Positions
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


class DreamKeys(TransformersKeys):
    """Dream's keys, and what its checkpoints mean where they leave one out."""

    family = DREAM
    without_effect = _WINDOW
    released_ids: ClassVar[dict[str, int]] = {"end_of_turn_token_id": 151_645}
    other_kind = (
        "DreamOn",
        "expands and deletes masks while it decodes, which is not supported; take a Dream checkpoint",
    )

    vocab_size: VocabularySize = 152_064
    hidden_size: Width = 3584
    intermediate_size: Width = 18_944
    num_hidden_layers: LayerCount = 28
    num_attention_heads: HeadCount = 28
    max_position_embeddings: Positions = 131_072
    rope_theta: RopeBase = 1_000_000.0
    attention_bias: Literal[True] | None = None


class LLaDAMoEKeys(TransformersKeys):
    """LLaDA-MoE's keys, and what its checkpoints mean where they leave one out."""

    family = LLADA_MOE
    without_effect = ("router_num_group", "router_topk_group")
    released_ids: ClassVar[dict[str, int]] = {"mask_token_id": 156_895, "eos_token_id": 156_892}

    vocab_size: VocabularySize = 157_184
    hidden_size: Width = 2048
    num_hidden_layers: LayerCount = 16
    num_attention_heads: HeadCount = 16
    max_position_embeddings: Positions = 8192
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: RopeBase = 50_000.0
    qk_layernorm: bool | None = None
    num_experts: ExpertCount = 64
    num_experts_per_tok: ExpertCount = 8
    expert_intermediate_size: Width = 1024
    dense_intermediate_size: Width | None = None
    shared_expert_intermediate_size: Width | None = None
    moe_layer_freq: list[Literal[0, 1]] = Field(default_factory=list)
    moe_router_enable_expert_bias: bool | None = None
    moe_router_score_function: Literal["softmax"] | None = None
    norm_topk_prob: Off = None
    routed_scaling_factor: One | None = None
    attention_bias: Off = None
    clip_qkv: None = None

    @model_validator(mode="after")
    def _layers_fit(self) -> Self:
        if self.moe_layer_freq and len(self.moe_layer_freq) != self.num_hidden_layers:
            raise ValueError(f"moe_layer_freq must hold num_hidden_layers={self.num_hidden_layers} numbers, 0 or 1")
        if 0 in self.moe_layer_freq and self.dense_intermediate_size is None:
            raise ValueError("moe_layer_freq has dense layers, which need a dense_intermediate_size")
        return self


class BlockModelKeys(TransformersKeys):
    """Keys of models whose attention goes by blocks."""

    block_size: Positions
    """Tokens per block; released checkpoints leave it out."""
    intermediate_size: Width


class SDARKeys(BlockModelKeys):
    """SDAR's keys, and what its checkpoints mean where they leave one out."""

    family = SDAR
    without_effect = (*_WINDOW, "debug", "ep_size", "micro_forward", "skip_checkpoint", "use_deepep")
    released_ids: ClassVar[dict[str, int]] = {
        "mask_token_id": 151_669,
        "eos_token_id": 151_643,
        "end_of_turn_token_id": 151_645,
    }

    block_size: Positions = 4
    vocab_size: VocabularySize = 151_936
    hidden_size: Width = 4096
    intermediate_size: Width = 12_288
    num_hidden_layers: LayerCount = 36
    num_attention_heads: HeadCount = 32
    max_position_embeddings: Positions = 32_768
    rope_theta: RopeBase = 1_000_000.0
    attention_bias: Off = None

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
    without_effect = _WINDOW
    released_ids = LLaDAMoEKeys.released_ids
    turns_parts = True
    # The configs of both have the same keys and values; only the name tells.
    other_kind = (
        r"LLaDA-?2\.[1-9]",
        "also replaces tokens that it has decided, which is not supported; take a LLaDA2.0 checkpoint",
    )

    block_size: Positions = 32
    vocab_size: VocabularySize = 157_184
    hidden_size: Width = 2048
    intermediate_size: Width = 5120
    num_hidden_layers: LayerCount = 20
    num_attention_heads: HeadCount = 16
    max_position_embeddings: Positions = 32_768
    rope_theta: RopeBase = 600_000.0
    partial_rotary_factor: Share | None = 0.5
    rotary_dim: Width | None = None
    use_qk_norm: bool = True
    use_qkv_bias: Off = None
    use_bias: Off = None
    using_split_qkv_in_self_attention: Off = None
    use_linear_attention: Off = None
    use_rmsnorm: Literal[True] | None = None
    norm_head: Off = None
    norm_softmax: Off = None
    num_experts: ExpertCount = 256
    num_experts_per_tok: ExpertCount = 8
    moe_intermediate_size: Width = 512
    num_shared_experts: Annotated[int, Field(ge=0, le=1000)] | None = 1
    first_k_dense_replace: Annotated[int, Field(ge=0)] = 1
    n_group: ExpertCount = 8
    topk_group: ExpertCount = 4
    routed_scaling_factor: Annotated[float, Field(gt=0)] = 2.5
    moe_router_enable_expert_bias: bool = True
    norm_topk_prob: Literal[True] | None = None
    score_function: Literal["sigmoid"] | None = None
    router_dtype: Literal["fp32"] | None = None
    expert_capacity: Literal[0] | None = None
    """Experts that the rows of a block may share (LLaDA2.2); 0: all."""

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
        if self.rotary_dim not in (None, turned := rotary_dim(self, self.head_dim or 0)):
            raise ValueError(
                f"rotary_dim={self.rotary_dim}, but partial_rotary_factor turns {turned}; state one of them"
            )
        return self
