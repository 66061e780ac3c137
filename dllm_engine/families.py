"""The table of model families: their authors' decoding conventions, and what their
checkpoints look like.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dllm_engine.model_name import own_name

ScheduleKind = Literal["uniform", "timestep", "rounded"]
Attention = Literal["full", "block_causal", "causal"]
"""Attention of a position. ``full``: the whole canvas. ``block_causal``: its own block
and the blocks before it, prompt included. ``causal``: itself and what is before, but
for positions of the running block, which attend to each other."""
BlockOrigin = Literal["canvas", "response"]
"""Where blocks that attention goes by are counted from. ``canvas``: its start, so that
the end of a prompt may lie inside a block. ``response``: its start, in both directions,
so that the first block of the prompt may be shorter."""
Shard = str | int | tuple[str, int] | None
"""Part of a fused parameter, as vLLM's layers name it; with the number of an expert;
None: the whole of a parameter.
"""
NamedModules = Mapping[str, tuple[str, Shard]]
"""Names of a checkpoint's modules in a layer: our module, and the shard of it that they
fill.
"""


@dataclass(frozen=True)
class TensorNames:
    """Names of a checkpoint's tensors. A family need not have all of the modules."""

    embedding: str
    final_norm: str
    head: str
    layers: str
    """Prefix of the layers; the number of the layer follows."""
    in_layer: NamedModules


_COMMON: NamedModules = {
    "input_layernorm": ("attn_norm", None),
    "post_attention_layernorm": ("mlp_norm", None),
    "mlp.gate_proj": ("mlp.gate_up_proj", 0),
    "mlp.up_proj": ("mlp.gate_up_proj", 1),
}
TRANSFORMERS_NAMES = TensorNames(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    layers="model.layers",
    in_layer={
        **_COMMON,
        "self_attn.q_proj": ("qkv_proj", "q"),
        "self_attn.k_proj": ("qkv_proj", "k"),
        "self_attn.v_proj": ("qkv_proj", "v"),
        "self_attn.q_norm": ("q_norm", None),
        "self_attn.k_norm": ("k_norm", None),
        "self_attn.o_proj": ("out_proj", None),
        "shared_expert.gate_proj": ("mlp.shared_expert.gate_up_proj", 0),
        "shared_expert.up_proj": ("mlp.shared_expert.gate_up_proj", 1),
        "shared_expert.down_proj": ("mlp.shared_expert.down_proj", None),
    },
)
"""Names in transformers' Llama, Qwen2 and Qwen3."""
LLADA_NAMES = TensorNames(
    embedding="model.transformer.wte",
    final_norm="model.transformer.ln_f",
    head="model.transformer.ff_out",
    layers="model.transformer.blocks",
    in_layer={
        "attn_norm": ("attn_norm", None),
        "ff_norm": ("mlp_norm", None),
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "attn_out": ("out_proj", None),
        "ff_proj": ("mlp.gate_up_proj", 0),
        "up_proj": ("mlp.gate_up_proj", 1),
        "ff_out": ("mlp.down_proj", None),
    },
)
LLADA2_NAMES = replace(
    TRANSFORMERS_NAMES,
    embedding="model.word_embeddings",
    in_layer={
        **_COMMON,
        "attention.query_key_value": ("qkv_proj", None),
        "attention.query_layernorm": ("q_norm", None),
        "attention.key_layernorm": ("k_norm", None),
        "attention.dense": ("out_proj", None),
        "mlp.shared_experts.gate_proj": ("mlp.shared_expert.gate_up_proj", 0),
        "mlp.shared_experts.up_proj": ("mlp.shared_expert.gate_up_proj", 1),
        "mlp.shared_experts.down_proj": ("mlp.shared_expert.down_proj", None),
    },
)


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
    """True if the weights of a row from the softmax of the router's logits are divided
    by their sum.
    """
    num_groups: int = 0
    """Groups that experts are chosen by, from the sigmoid of the router's logits
    (LLaDA2); 0: all are one group.
    """
    num_kept: int = 0
    """Groups that a row's experts come from."""
    scale: float = 1.0
    """Factor of a row's weights, which sum to 1 before, where experts are in groups."""
    capacity: int = 0
    """Experts that the rows of a block share (LLaDA2.2). They take the place of groups;
    0: groups count.
    """


@dataclass(frozen=True)
class Disguise:
    """Another model's architecture in the configs of a family. Its models are known by
    a word of their own names, or by ``hf_overrides`` with the family's architecture.
    """

    architecture: str
    word: str


@dataclass(frozen=True)
class ModelFamily:
    """Facts that all checkpoints of one architecture share."""

    name: str
    model_type: str
    """``model_type`` in the checkpoint's config.json, which families may share."""
    architecture: str
    """The entry of ``architectures`` in config.json, which tells families apart, and
    under which vLLM finds the model class."""
    checkpoints: tuple[str, ...]
    disguise: "Disguise | None" = None
    """What released configs state instead; None: the two above."""

    # Decoding
    schedule: ScheduleKind = "uniform"
    """``uniform``: equal counts per step (LLaDA); ``timestep``: counts from a time grid
    (Dream); ``rounded``: the rounded share of what is left (dLLM).
    """
    shifts_logits: bool = False
    """True if position ``p`` is predicted by the hidden state of ``p - 1`` instead of
    ``p``.
    """
    default_unmasking: str = "low_confidence"
    default_block_length: int | None = 32
    """None: the whole response is one block. Where attention goes by blocks, a config
    has its own.
    """
    attention: Attention = "full"
    block_origin: BlockOrigin = "canvas"
    whole_blocks: bool = True
    """Where attention goes by blocks: True if the last one is decoded whole, steps of a
    block are counted as of a whole one, and a confidence of ``threshold`` itself is not
    enough (SDAR's loop, not Stable-DiffCoder's)."""
    seeds_blocks: bool = False
    """True if the first position of a block is predicted by the row before it, in the
    pass that keeps what is before the block (Fast-dLLM v2)."""
    scales_queries: bool = False
    """True if RoPE may state ``llama_4_scaling_beta``, by which queries grow with their
    positions."""
    experts_by_block: bool = False
    """True if the rows of a block of ``default_block_length`` share experts, so that
    blocks have no other length; by the config."""
    strict_entropy_threshold: bool = False
    """True if a position at exactly ``entropy_threshold`` does not pass, and no
    position may pass, as in d3LLM's code for Dream."""
    slow_fast: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of ``SlowFast``'s options that differ from LLaDA's, in the code of its
    authors.
    """

    # Tensors
    names: TensorNames = TRANSFORMERS_NAMES
    qkv_bias: bool = False
    """True if queries, keys and values have biases, unless a key of the
    config says so.
    """
    qk_norm: bool = False
    """True if each head of queries and keys goes through a norm before RoPE, unless a
    key of the config says so.
    """

    # config.json
    key_names: Mapping[str, str] = field(default_factory=dict)
    """The family's own names of keys, by those of transformers."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a config may leave out."""
    special_ids: Mapping[str, int] = field(default_factory=dict)
    """Special tokens of the released vocabulary, for a config that leaves them out."""
    mask_token: str | None = None
    """The mask's name in the tokenizer, for a config that leaves its id out."""
    kinds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Kinds of checkpoints that no key of a config tells apart, and what differs from
    this row. The model's own name has the word, or ``hf_overrides`` say it as ``kind``.
    """
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that would change the computation, and the values that are implemented, the
    default first.
    """
    without_effect: tuple[str, ...] = ()
    """Keys that say nothing about what the model computes."""
    turns_parts: bool = False
    """True if RoPE may turn a part of each head only."""
    released_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Defaults of requests to released checkpoints that only their names tell from
    others.
    """
    other_kind: tuple[str, str] | None = None
    """The name of checkpoints whose configs are like the family's, and why they are not
    supported.
    """

    def block_length_of(self, gen_length: int) -> int:
        """Block length of a request that names none. Attention by blocks has the same
        for responses of any length.
        """
        return self.attention_block or min(
            self.default_block_length or gen_length, gen_length
        )

    @property
    def architectures(self) -> set[str]:
        """What a config of the family may state as its architecture."""
        disguise = set() if self.disguise is None else {self.disguise.architecture}
        return {self.architecture} | disguise

    @property
    def has_blocks(self) -> bool:
        """True if attention goes by blocks, in some kind of the family."""
        kinds = [kind.get("attention", "full") for kind in self.kinds.values()]
        return any(attention != "full" for attention in (self.attention, *kinds))

    @property
    def attention_block(self) -> int | None:
        """The length of the blocks that attention goes by, unless a request names
        another; None: there are none.
        """
        return self.default_block_length if self.attention != "full" else None

    def longest_canvas(self, max_model_len: int) -> int:
        """Canvas positions of a request of at most so many tokens: the block in which
        they end is whole.
        """
        return max_model_len + -max_model_len % (self.attention_block or 1)


def _sizes(*sizes: float, **others: Any) -> dict[str, Any]:
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    return (
        dict(zip((*names, "max_position_embeddings", "rope_theta"), sizes, strict=True))
        | others
    )


def _off(*keys: str) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(keys, (None, False))


_WINDOW = ("sliding_window", "max_window_layers")
"""Keys that count only where ``use_sliding_window`` is true."""
LLADA = ModelFamily(
    name="LLaDA",
    model_type="llada",
    architecture="LLaDAModelLM",
    checkpoints=(
        "GSAI-ML/LLaDA-8B-Base",
        "GSAI-ML/LLaDA-8B-Instruct",
        "GSAI-ML/LLaDA-1.5",
    ),
    names=LLADA_NAMES,
    key_names={
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "mlp_hidden_size",
        "max_position_embeddings": "max_sequence_length",
        "tie_word_embeddings": "weight_tying",
    },
    special_ids={"end_of_turn_token_id": 126_348},
    fixed={
        "block_type": ("llama",),
        "block_group_size": (1,),
        "activation_type": ("silu", "swiglu"),
        "layer_norm_type": ("rms",),
        "rope": (True,),
        "rope_full_precision": (True,),
        "layer_norm_with_affine": (True,),
        "clip_qkv": (None,),
        **_off(
            "bias_for_layer_norm",
            "alibi",
            "include_bias",
            "multi_query_attention",
            "attention_layer_norm",
        ),
        **_off("input_emb_norm", "scale_logits"),
    },
    without_effect=(
        "alibi_bias_max",
        "attention_layer_norm_with_affine",
        "flash_attention",
        "precision",
        "tie_word_embeddings",
        "init_device",
        "init_fn",
        "init_std",
        "init_cutoff_factor",
    ),
)
LLADA_MOE = ModelFamily(
    name="LLaDA-MoE",
    model_type="llada",
    architecture="LLaDAMoEModelLM",
    checkpoints=(
        "inclusionAI/LLaDA-MoE-7B-A1B-Base",
        "inclusionAI/LLaDA-MoE-7B-A1B-Instruct",
    ),
    key_names={"intermediate_size": "dense_intermediate_size"},
    defaults={
        "vocab_size": 157_184,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50_000.0,
    },
    special_ids={"mask_token_id": 156_895, "eos_token_id": 156_892},
    fixed={
        "moe_router_score_function": (None, "softmax"),
        "clip_qkv": (None,),
        **_off("norm_topk_prob", "attention_bias"),
    },
    without_effect=("router_num_group", "router_topk_group"),
)
DREAM = ModelFamily(
    name="Dream",
    model_type="Dream",
    architecture="DreamModel",
    checkpoints=(
        "Dream-org/Dream-v0-Base-7B",
        "Dream-org/Dream-v0-Instruct-7B",
        "Dream-org/Dream-Coder-v0-Instruct-7B",
        "apple/DiffuCoder-7B-Instruct",
    ),
    schedule="timestep",
    shifts_logits=True,
    default_unmasking="entropy",
    default_block_length=None,
    strict_entropy_threshold=True,
    slow_fast={
        "span_threshold": 0.1,
        "slow_threshold": 0.8,
        "slow_minimum": 2,
        "fast_minimum": 2,
    },
    qkv_bias=True,
    defaults=_sizes(152_064, 3584, 18_944, 28, 28, 131_072, 1_000_000.0),
    special_ids={"end_of_turn_token_id": 151_645},
    fixed={"attention_bias": (None, True)},
    without_effect=_WINDOW,
    other_kind=(
        "DreamOn",
        "expands and deletes masks while it decodes, which is not supported; take a "
        "Dream checkpoint",
    ),
)
SDAR = ModelFamily(
    name="SDAR",
    model_type="sdar",
    architecture="SDARForCausalLM",
    checkpoints=(
        "JetLM/SDAR-1.7B-Chat",
        "JetLM/SDAR-4B-Chat",
        "JetLM/SDAR-8B-Chat",
        "Gen-Verse/TraDo-4B-Instruct",
        "Gen-Verse/TraDo-8B-Instruct",
        "Gen-Verse/TraDo-8B-Thinking",
    ),
    default_block_length=4,
    attention="block_causal",
    qk_norm=True,
    defaults=_sizes(151_936, 4096, 12_288, 36, 32, 32_768, 1_000_000.0),
    special_ids={
        "mask_token_id": 151_669,
        "eos_token_id": 151_643,
        "end_of_turn_token_id": 151_645,
    },
    fixed=_off("attention_bias"),
    without_effect=(
        *_WINDOW,
        "debug",
        "ep_size",
        "micro_forward",
        "skip_checkpoint",
        "use_deepep",
    ),
)
SDAR_MOE = replace(
    SDAR,
    name="SDAR-MoE",
    model_type="sdar_moe",
    architecture="SDARMoeForCausalLM",
    checkpoints=("JetLM/SDAR-30B-A3B-Chat", "JetLM/SDAR-30B-A3B-Sci"),
    defaults=_sizes(
        151_936, 2048, 6144, 48, 32, 32_768, 1_000_000.0, num_key_value_heads=4
    ),
)
_LLADA21 = ("inclusionAI/LLaDA2.1-mini", "inclusionAI/LLaDA2.1-flash")
LLADA2 = ModelFamily(
    name="LLaDA2",
    model_type="llada2_moe",
    architecture="LLaDA2MoeModelLM",
    checkpoints=("inclusionAI/LLaDA2.0-mini", "inclusionAI/LLaDA2.0-flash", *_LLADA21),
    attention="block_causal",
    names=LLADA2_NAMES,
    released_defaults={
        name: {"threshold": 0.95, "edit_threshold": 0.9, "max_post_steps": 16}
        for name in _LLADA21
    },
    key_names={"qk_layernorm": "use_qk_norm"},
    defaults=_sizes(
        157_184, 2048, 5120, 20, 16, 32_768, 600_000.0, partial_rotary_factor=0.5
    ),
    special_ids=LLADA_MOE.special_ids,
    fixed={
        **_off(
            "use_qkv_bias",
            "use_bias",
            "using_split_qkv_in_self_attention",
            "use_linear_attention",
        ),
        **_off("norm_head", "norm_softmax"),
        "use_rmsnorm": (None, True),
        "norm_topk_prob": (None, True),
        "score_function": (None, "sigmoid"),
        "router_dtype": (None, "fp32"),
    },
    without_effect=_WINDOW,
    turns_parts=True,
)
ILLADA = ModelFamily(
    name="iLLaDA",
    model_type="illada",
    architecture="ILLaDAForCausalLM",
    checkpoints=("GSAI-ML/iLLaDA-8B-Base", "GSAI-ML/iLLaDA-8B-Instruct"),
    defaults=_sizes(
        155_136,
        4096,
        14_336,
        32,
        32,
        8192,
        500_000.0,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    special_ids={"mask_token_id": 5, "eos_token_id": 2},
    fixed=_off("attention_bias", "mlp_bias") | {"layer_norm_eps": (None,)},
    without_effect=("resid_pdrop",),
)
STABLE_DIFFCODER = replace(
    ILLADA,
    name="Stable-DiffCoder",
    model_type="llama",
    architecture="StableDiffcoderForCausalLM",
    checkpoints=(
        "ByteDance-Seed/Stable-DiffCoder-8B-Base",
        "ByteDance-Seed/Stable-DiffCoder-8B-Instruct",
    ),
    default_block_length=4,
    attention="block_causal",
    whole_blocks=False,
    defaults={**ILLADA.defaults, "tie_word_embeddings": False},
    fixed=_off("attention_bias", "mlp_bias"),
    without_effect=("pretraining_tp",),
)
DREAM_REASONER = replace(
    SDAR,
    name="DreamReasoner",
    model_type="Dream",
    architecture="DreamForCausalLM",
    checkpoints=("Dream-org/DreamReasoner-8B",),
    default_block_length=32,
    defaults={**SDAR.defaults, "num_key_value_heads": 8, "head_dim": 128},
    without_effect=_WINDOW,
)
A2D_QWEN3 = ModelFamily(
    name="a2d-Qwen3",
    model_type="a2d-qwen3",
    architecture="A2DQwen3LMHeadModel",
    checkpoints=(
        "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1",
        "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1",
    ),
    schedule="rounded",
    mask_token="<|mask|>",
    kinds={
        "mdlm": {},
        "bd3lm": {
            "attention": "block_causal",
            "block_origin": "response",
            "whole_blocks": False,
        },
    },
    qk_norm=True,
    defaults=_sizes(
        151_936,
        1024,
        3072,
        28,
        16,
        40_960,
        1_000_000.0,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    special_ids={
        "mask_token_id": 151_669,
        "eos_token_id": 151_645,
        "end_of_turn_token_id": 151_645,
    },
    fixed=_off("attention_bias"),
    without_effect=_WINDOW,
)
A2D_QWEN2 = replace(
    A2D_QWEN3,
    name="a2d-Qwen2",
    model_type="a2d-qwen2",
    architecture="A2DQwen2LMHeadModel",
    checkpoints=(
        "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1",
        "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-bd3lm-v0.1",
    ),
    qkv_bias=True,
    qk_norm=False,
    defaults=_sizes(
        151_936,
        896,
        4864,
        24,
        14,
        32_768,
        1_000_000.0,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    special_ids={**A2D_QWEN3.special_ids, "mask_token_id": 151_665},
    fixed={"attention_bias": (None, True)},
)
OPEN_DCODER = replace(
    DREAM,
    name="Open-dLLM",
    model_type="qwen2",
    architecture="OpenDcoderForCausalLM",
    checkpoints=("fredzzp/open-dcoder-0.5B",),
    disguise=Disguise("Qwen2ForCausalLM", "open-dcoder"),
    strict_entropy_threshold=False,
    mask_token="<M>",
    defaults=A2D_QWEN2.defaults,
    special_ids={"mask_token_id": 151_665, "eos_token_id": 151_643},
    other_kind=None,
)
FAST_DLLM_V2 = replace(
    A2D_QWEN2,
    name="Fast-dLLM v2",
    model_type="Fast_dLLM_Qwen",
    architecture="Fast_dLLM_QwenForCausalLM",
    checkpoints=(
        "Efficient-Large-Model/Fast_dLLM_v2_1.5B",
        "Efficient-Large-Model/Fast_dLLM_v2_7B",
    ),
    schedule="uniform",
    shifts_logits=True,
    attention="block_causal",
    seeds_blocks=True,
    mask_token="|<MASK>|",
    kinds={},
    key_names={"block_size": "bd_size"},
    released_defaults={
        name: {"sub_block_length": 8, "threshold": 0.9}
        for name in (
            "Efficient-Large-Model/Fast_dLLM_v2_1.5B",
            "Efficient-Large-Model/Fast_dLLM_v2_7B",
        )
    },
    defaults=_sizes(
        151_936,
        3584,
        18_944,
        28,
        28,
        32_768,
        10_000.0,
        num_key_value_heads=4,
    ),
)
NEMOTRON_LABS = ModelFamily(
    name="Nemotron-Labs-Diffusion",
    model_type="nemotron_labs_diffusion",
    architecture="NemotronLabsDiffusionModel",
    checkpoints=(
        "nvidia/Nemotron-Labs-Diffusion-3B",
        "nvidia/Nemotron-Labs-Diffusion-3B-Base",
        "nvidia/Nemotron-Labs-Diffusion-8B",
        "nvidia/Nemotron-Labs-Diffusion-8B-Base",
        "nvidia/Nemotron-Labs-Diffusion-14B",
        "nvidia/Nemotron-Labs-Diffusion-14B-Base",
    ),
    attention="causal",
    block_origin="response",
    whole_blocks=False,
    seeds_blocks=True,
    scales_queries=True,
    names=replace(
        TRANSFORMERS_NAMES,
        embedding="encoder.embed_tokens",
        final_norm="encoder.norm",
        head="diffusion_head",
        layers="encoder.layers",
    ),
    defaults=_sizes(
        131_072,
        4096,
        14_336,
        34,
        32,
        262_144,
        1_000_000.0,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
    ),
    special_ids={"mask_token_id": 100, "eos_token_id": 11},
    fixed=_off("attention_bias", "mlp_bias"),
    without_effect=(
        *_WINDOW,
        *("ar_loss_weight", "dlm_loss_weight", "dlm_paradigm"),
        "dp_varying_mask_ratio",
    ),
)
FAMILIES: dict[str, ModelFamily] = {
    family.architecture: family
    for family in (
        LLADA,
        LLADA_MOE,
        ILLADA,
        DREAM,
        SDAR,
        SDAR_MOE,
        DREAM_REASONER,
        STABLE_DIFFCODER,
        LLADA2,
        A2D_QWEN3,
        A2D_QWEN2,
        OPEN_DCODER,
        FAST_DLLM_V2,
        NEMOTRON_LABS,
    )
}


NOT_SUPPORTED = {
    "wedlm": (
        "WeDLM attends in the order in which tokens are decided, not in that of their "
        "positions"
    ),
    "modernbert": "ModernBERT has other layers: LayerNorm, and local attention",
}
"""Diffusion models that are not served, by a part of ``model_type``, and why."""


def released_defaults(hf_config: Any) -> Mapping[str, Any]:
    """Request defaults of a released checkpoint, by its own name."""
    name = own_name(str(getattr(hf_config, "name_or_path", "")))
    by_name = {
        own_name(released): defaults
        for released, defaults in hf_config.family.released_defaults.items()
    }
    return by_name.get(name, {})


def barred_tokens(hf_config: object) -> list[int]:
    """Tokens that are never chosen: LLaDA2.2's, which delete and insert others by a
    rule that is not published.
    """
    return [
        *_config_tokens(hf_config, "delete_token_id"),
        *_config_tokens(hf_config, "split_token_id"),
    ]


def model_end_tokens(hf_config: object) -> list[int]:
    """The end tokens that a checkpoint's config names."""
    return _config_tokens(hf_config, "eos_token_id")


def every_end_token(hf_config: object) -> list[int]:
    """Those, and what ends a turn of a chat."""
    return [
        *model_end_tokens(hf_config),
        *_config_tokens(hf_config, "end_of_turn_token_id"),
    ]


def _config_tokens(hf_config: object, key: str) -> list[int]:
    value = getattr(hf_config, key, None)
    return value if isinstance(value, list) else [] if value is None else [value]
