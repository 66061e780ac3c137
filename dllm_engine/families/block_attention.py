"""Families whose attention goes by blocks or is causal: positions attend to their block
and to everything before it.
"""

from dataclasses import replace

from dllm_engine.families.family import (
    LLADA2_NAMES,
    TRANSFORMERS_NAMES,
    ModelFamily,
    Shape,
    Unsupported,
)
from dllm_engine.families.full_attention import A2D_QWEN2, ILLADA, LLADA_MOE
from dllm_engine.families.shared_keys import WINDOW_KEYS, off, sizes

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
    defaults=sizes(151_936, 4096, 12_288, 36, 32, 32_768, 1_000_000.0),
    special_ids={
        "mask_token_id": 151_669,
        "eos_token_id": 151_643,
        "end_of_turn_token_id": 151_645,
    },
    fixed=off("attention_bias"),
    without_effect=(
        *WINDOW_KEYS,
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
    defaults=sizes(
        151_936, 2048, 6144, 48, 32, 32_768, 1_000_000.0, num_key_value_heads=4
    ),
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
    without_effect=WINDOW_KEYS,
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
    defaults=sizes(
        157_184, 2048, 5120, 20, 16, 32_768, 600_000.0, partial_rotary_factor=0.5
    ),
    special_ids=LLADA_MOE.special_ids,
    fixed={
        **off(
            "use_qkv_bias",
            "use_bias",
            "using_split_qkv_in_self_attention",
            "use_linear_attention",
        ),
        **off("norm_head", "norm_softmax"),
        "use_rmsnorm": (None, True),
        "norm_topk_prob": (None, True),
        "score_function": (None, "sigmoid"),
        "router_dtype": (None, "fp32"),
    },
    without_effect=WINDOW_KEYS,
    turns_parts=True,
    barred=Unsupported(
        "LLaDA2.2",
        ("delete_token_id", "split_token_id"),
        "deletes and inserts tokens while it decodes, by a rule that is not published; "
        "here it only fills, and replaces with edit_threshold: expect worse answers",
    ),
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
    fixed=off("attention_bias", "mlp_bias"),
    without_effect=("pretraining_tp",),
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
    defaults=sizes(
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
    defaults=sizes(
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
    fixed=off("attention_bias", "mlp_bias"),
    without_effect=(
        *WINDOW_KEYS,
        "ar_loss_weight",
        "dlm_loss_weight",
        "dlm_paradigm",
        "dp_varying_mask_ratio",
    ),
)
