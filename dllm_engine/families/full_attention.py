"""Families whose positions attend to the whole canvas, at least in one kind."""

from dataclasses import replace

from dllm_engine.families.family import (
    LLADA_NAMES,
    Disguise,
    ModelFamily,
    Shape,
    Unsupported,
)
from dllm_engine.families.shared_keys import WINDOW_KEYS, off, sizes

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
        **off(
            "bias_for_layer_norm",
            "alibi",
            "include_bias",
            "multi_query_attention",
            "attention_layer_norm",
        ),
        **off("input_emb_norm", "scale_logits"),
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
        **off("norm_topk_prob", "attention_bias"),
    },
    without_effect=("router_num_group", "router_topk_group"),
)
ILLADA = ModelFamily(
    name="iLLaDA",
    model_type="illada",
    architecture="ILLaDAForCausalLM",
    checkpoints=("GSAI-ML/iLLaDA-8B-Base", "GSAI-ML/iLLaDA-8B-Instruct"),
    shapes={"illada-8b": Shape({})},
    defaults=sizes(
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
    fixed=off("attention_bias", "mlp_bias") | {"layer_norm_eps": (None,)},
    without_effect=("resid_pdrop",),
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
    defaults=sizes(152_064, 3584, 18_944, 28, 28, 131_072, 1_000_000.0),
    special_ids={"end_of_turn_token_id": 151_645},
    tokenizer_class="DreamTokenizer",
    fixed={"attention_bias": (None, True)},
    without_effect=WINDOW_KEYS,
    base_prompts_have_bos=True,
    unsupported=(
        Unsupported(
            "DreamOn",
            ("expand_token_id",),
            "expands and deletes masks while it decodes; take a Dream checkpoint",
        ),
    ),
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
    defaults=sizes(
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
    fixed=off("attention_bias"),
    without_effect=WINDOW_KEYS,
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
    defaults=sizes(
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
