"""The table of model families."""

from dataclasses import replace
from typing import Any

from dllm_engine.families.family import (
    LLADA2_NAMES,
    LLADA_NAMES,
    TRANSFORMERS_NAMES,
    Disguise,
    ModelFamily,
    Shape,
    Unsupported,
)


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
    shapes={"llada-8b": Shape({"mlp_hidden_size": 12_288, "embedding_size": 126_464})},
    names=LLADA_NAMES,
    keys_form="olmo",
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
    shapes={"llada-moe-7b": Shape({"qk_layernorm": True})},
    keys_form="softmax_experts",
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
    shapes={
        "dream-7b": Shape(
            {"num_key_value_heads": 4},
            ("Dream-org/Dream-v0-Base-7B", "Dream-org/Dream-v0-Instruct-7B"),
        )
    },
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
    tokenizer_class="DreamTokenizer",
    fixed={"attention_bias": (None, True)},
    without_effect=_WINDOW,
    base_prompts_have_bos=True,
    unsupported=(
        Unsupported(
            "DreamOn",
            ("expand_token_id",),
            "expands and deletes masks while it decodes; take a Dream checkpoint",
        ),
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
    shapes={
        "sdar-8b": Shape({"num_key_value_heads": 8}, ("JetLM/SDAR-8B-Chat",)),
        "sdar-8b-b32": Shape(
            {"num_key_value_heads": 8, "block_size": 32}, ("JetLM/SDAR-8B-Chat-b32",)
        ),
    },
    block_size_in_name=r"SDAR-.*-b(\d+)(?=$|[-_])",
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
    keys_form="qwen3_experts",
    shapes={"sdar-30b": Shape({"head_dim": 128}, ("JetLM/SDAR-30B-A3B-Chat",))},
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
    shapes={
        "llada2-mini": Shape(
            {"num_key_value_heads": 4},
            ("inclusionAI/LLaDA2.0-mini", "inclusionAI/LLaDA2.1-mini"),
        )
    },
    attention="block_causal",
    names=LLADA2_NAMES,
    released_defaults={
        name: {"threshold": 0.95, "edit_threshold": 0.9, "max_post_steps": 16}
        for name in _LLADA21
    },
    keys_form="grouped_experts",
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
    barred=Unsupported(
        "LLaDA2.2",
        ("delete_token_id", "split_token_id"),
        "deletes and inserts tokens while it decodes, by a rule that is not published; "
        "here it only fills, and replaces with edit_threshold: expect worse answers",
    ),
)
ILLADA = ModelFamily(
    name="iLLaDA",
    model_type="illada",
    architecture="ILLaDAForCausalLM",
    checkpoints=("GSAI-ML/iLLaDA-8B-Base", "GSAI-ML/iLLaDA-8B-Instruct"),
    shapes={"illada-8b": Shape({})},
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
    shapes={"stable-diffcoder-8b": Shape({})},
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
    shapes={"dreamreasoner-8b": Shape({})},
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
    shapes={
        "qwen3-0.6b-mdlm": Shape(
            {"kind": "mdlm"}, ("dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1",)
        ),
        "qwen3-0.6b-bd3lm": Shape(
            {"kind": "bd3lm"}, ("dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1",)
        ),
    },
    schedule="rounded",
    mask_token="<|mask|>",
    template_defaults={"enable_thinking": False},
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
    shapes={
        "qwen2.5-0.5b-mdlm": Shape(
            {"kind": "mdlm"},
            ("dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1",),
        ),
        "qwen2.5-0.5b-bd3lm": Shape(
            {"kind": "bd3lm"},
            ("dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-bd3lm-v0.1",),
        ),
    },
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
    shapes={"open-dcoder-0.5b": Shape({})},
    disguise=Disguise("Qwen2ForCausalLM", "open-dcoder"),
    strict_entropy_threshold=False,
    mask_token="<M>",
    defaults=A2D_QWEN2.defaults,
    special_ids={"mask_token_id": 151_665, "eos_token_id": 151_643},
    tokenizer_class=None,
    base_prompts_have_bos=False,
    unsupported=(),
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
    shapes={
        "fast-dllm-v2-1.5b": Shape(
            {
                "hidden_size": 1536,
                "intermediate_size": 8960,
                "num_attention_heads": 12,
                "num_key_value_heads": 2,
                "tie_word_embeddings": True,
            },
            ("Efficient-Large-Model/Fast_dLLM_v2_1.5B",),
        ),
        "fast-dllm-v2-7b": Shape({}, ("Efficient-Large-Model/Fast_dLLM_v2_7B",)),
    },
    schedule="uniform",
    shifts_logits=True,
    attention="block_causal",
    seeds_blocks=True,
    mask_token="|<MASK>|",
    kinds={},
    template_defaults={},
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
    shapes={
        "nemotron-3b": Shape(
            {"hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26},
            (
                "nvidia/Nemotron-Labs-Diffusion-3B",
                "nvidia/Nemotron-Labs-Diffusion-3B-Base",
            ),
        ),
        "nemotron-8b": Shape(
            {},
            (
                "nvidia/Nemotron-Labs-Diffusion-8B",
                "nvidia/Nemotron-Labs-Diffusion-8B-Base",
            ),
        ),
        "nemotron-14b": Shape(
            {"hidden_size": 5120, "intermediate_size": 16_384, "num_hidden_layers": 40},
            (
                "nvidia/Nemotron-Labs-Diffusion-14B",
                "nvidia/Nemotron-Labs-Diffusion-14B-Base",
            ),
        ),
    },
    attention="causal",
    block_origin="response",
    whole_blocks=False,
    seeds_blocks=True,
    scales_queries=True,
    draft_rank=128,
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
        "ar_loss_weight",
        "dlm_loss_weight",
        "dlm_paradigm",
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
    "nemotron_labs_diffusion_vlm": "Nemotron-Labs-Diffusion-VLM reads pictures",
}
"""Diffusion models that are not served, by a part of ``model_type``, and why."""
