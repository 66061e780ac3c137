"""Keys of the released checkpoints' configs, none of which is refused; any other key is, in every family."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig

from dllm_engine.model_executor.models.configs import CONFIG_CLASSES, parse_config
from dllm_engine.plugin import register
from dllm_engine.scheduler.options.resolve import checkpoint_defaults
from tests.support.tiny_checkpoints import DREAM_CONFIG, LLADA_CONFIG, write_stable_diffcoder


def auto_map(module: str, *classes: str) -> dict[str, Any]:
    return {"auto_map": {f"AutoModel{i}": f"{module}.{name}" for i, name in enumerate(classes)}}


def dropped(*names: str) -> dict[str, Any]:
    return {f"{name}_dropout": 0.0 for name in names}


COMMON = {"torch_dtype": "bfloat16", "transformers_version": "4.46.3", "use_cache": False}
LLADA = COMMON | auto_map("configuration_llada", "LLaDAConfig") | dropped("attention", "embedding", "residual")
LLADA |= {"architectures": ["LLaDAModelLM"], "model_type": "llada", "activation_type": "silu", "block_type": "llama"}
LLADA |= {"alibi": False, "alibi_bias_max": 8.0, "attention_layer_norm": False, "bias_for_layer_norm": False}
LLADA |= {"attention_layer_norm_with_affine": True, "block_group_size": 1, "flash_attention": False}
LLADA |= {"d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "n_layers": 32, "mlp_hidden_size": 12_288, "mlp_ratio": 4}
LLADA |= {"embedding_size": 126_464, "vocab_size": 126_464, "max_sequence_length": 4096, "multi_query_attention": None}
LLADA |= {"eos_token_id": 126_081, "pad_token_id": 126_081, "mask_token_id": 126_336, "weight_tying": False}
LLADA |= {"include_bias": False, "include_qkv_bias": False, "input_emb_norm": False, "scale_logits": False}
LLADA |= {"init_cutoff_factor": None, "init_device": "meta", "init_fn": "mitchell", "init_std": 0.02, "clip_qkv": None}
LLADA |= {"layer_norm_type": "rms", "layer_norm_with_affine": True, "precision": "amp_bf16", "rms_norm_eps": 1e-05}
LLADA |= {"rope": True, "rope_full_precision": True, "rope_theta": 500_000.0}

LLADA_MOE = COMMON | auto_map("configuration_lladamoe", "LLaDAConfig", "LLaDAMoEModelLM") | dropped("attention")
LLADA_MOE |= {"architectures": ["LLaDAMoEModelLM"], "model_type": "llada", "hidden_act": "silu", "hidden_size": 2048}
LLADA_MOE |= {"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 157_184}
LLADA_MOE |= {"max_position_embeddings": 8192, "initializer_range": 0.02, "rms_norm_eps": 1e-05, "clip_qkv": None}
LLADA_MOE |= {"pad_token_id": 156_892, "eos_token_id": 156_892, "bos_token_id": None, "tie_word_embeddings": False}
LLADA_MOE |= {"rope_theta": 50_000, "partial_rotary_factor": 1, "rope_scaling": None, "attention_bias": False}
LLADA_MOE |= {"num_experts": 64, "num_experts_per_tok": 8, "expert_intermediate_size": 1024, "qk_layernorm": True}
LLADA_MOE |= {"dense_intermediate_size": 8192, "shared_expert_intermediate_size": None, "moe_layer_freq": [1] * 16}
LLADA_MOE |= {"norm_topk_prob": None, "moe_router_enable_expert_bias": False, "moe_router_score_function": "softmax"}
LLADA_MOE |= {"routed_scaling_factor": 1, "router_num_group": None, "router_topk_group": None}
LLADA_MOE |= {"output_router_logits": False, "router_aux_loss_coef": 0.01}

QWEN = COMMON | dropped("attention") | {"hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-06}
QWEN |= {"rope_theta": 1_000_000.0, "rope_scaling": None, "use_sliding_window": False, "sliding_window": None}
QWEN |= {"max_window_layers": 28, "bos_token_id": 151_643, "eos_token_id": 151_643, "pad_token_id": 151_643}
DREAM = QWEN | auto_map("configuration_dream", "DreamConfig", "DreamModel")
DREAM |= {"architectures": ["DreamModel"], "model_type": "Dream", "hidden_size": 3584, "intermediate_size": 18_944}
DREAM |= {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064}
DREAM |= {"max_position_embeddings": 131_072, "mask_token_id": 151_666, "tie_word_embeddings": False}

SDAR = QWEN | auto_map("configuration_sdar", "SDARConfig", "SDARModel", "SDARForCausalLM")
SDAR |= {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "attention_bias": False, "head_dim": 128}
SDAR |= {"debug": False, "ep_size": 1, "fuse_cross_entropy": True, "micro_forward": False, "skip_checkpoint": False}
SDAR |= {"use_deepep": False, "max_position_embeddings": 32_768, "vocab_size": 151_936, "num_key_value_heads": 8}


def sdar(hidden: int, mlp: int, layers: int, heads: int, tied: bool = False) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "max_window_layers": layers}
    return SDAR | sizes | {"num_attention_heads": heads, "tie_word_embeddings": tied}


SDAR_MOE = sdar(2048, 6144, 48, 32) | {"architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe"}
SDAR_MOE |= {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
SDAR_MOE |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False}
SDAR_MOE |= {"router_aux_loss_coef": 0.001}

LLADA2 = COMMON | auto_map("configuration_llada2_moe", "LLaDA2MoeConfig", "LLaDA2MoeModelLM")
LLADA2 |= dropped("attention", "embedding", "output")
LLADA2 |= {"architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "hidden_act": "silu", "head_dim": 128}
LLADA2 |= {"eos_token_id": 156_892, "pad_token_id": 156_892, "vocab_size": 157_184, "tie_word_embeddings": False}
LLADA2 |= {"first_k_dense_replace": 1, "initializer_range": 0.02, "max_position_embeddings": 32_768}
LLADA2 |= {"max_window_layers": 20, "use_sliding_window": False, "sliding_window": 4096, "rms_norm_eps": 1e-06}
LLADA2 |= {"n_group": 8, "topk_group": 4, "norm_head": False, "norm_softmax": False, "norm_topk_prob": True}
LLADA2 |= {"num_experts": 256, "num_experts_per_tok": 8, "num_shared_experts": 1, "num_key_value_heads": 4}
LLADA2 |= {"moe_router_enable_expert_bias": True, "output_router_logits": False, "partial_rotary_factor": 0.5}
LLADA2 |= {"rope_scaling": None, "rope_theta": 600_000, "rotary_dim": 64, "routed_scaling_factor": 2.5}
LLADA2 |= {"router_dtype": "fp32", "score_function": "sigmoid", "use_bias": False, "use_qkv_bias": False}
LLADA2 |= {"use_qk_norm": True, "use_rmsnorm": True, "using_split_qkv_in_self_attention": False}
MINI = {"hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512, "num_hidden_layers": 20}
FLASH = {"hidden_size": 4096, "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_hidden_layers": 32}

DREAM_REASONER = SDAR | {"architectures": ["DreamForCausalLM"], "model_type": "Dream", "block_size": 32}
DREAM_REASONER |= {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32}
DREAM_REASONER |= {"tie_word_embeddings": False, "mask_token_id": 151_669, "eos_token_id": 151_645}
for own in ("debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint", "use_deepep"):
    del DREAM_REASONER[own]

STABLE_DIFFCODER = COMMON | dropped("attention") | {"hidden_act": "silu", "initializer_range": 0.02, "mlp_bias": False}
STABLE_DIFFCODER |= {"architectures": ["StableDiffcoderForCausalLM"], "model_type": "llama", "attention_bias": False}
STABLE_DIFFCODER |= {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "hidden_size": 4096, "head_dim": 128}
STABLE_DIFFCODER |= {"intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
STABLE_DIFFCODER |= {"num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-06}
STABLE_DIFFCODER |= {"pretraining_tp": 1, "rope_scaling": None, "rope_theta": 500_000.0, "vocab_size": 155_136}
STABLE_DIFFCODER |= {"tie_word_embeddings": False}
ILLADA = {name: value for name, value in STABLE_DIFFCODER.items() if name not in ("pretraining_tp", "head_dim")}
ILLADA |= {"architectures": ["ILLaDAForCausalLM"], "model_type": "illada", "layer_norm_eps": None, "resid_pdrop": 0.0}
ILLADA |= {"tie_word_embeddings": True}

RELEASED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-1.5"), LLADA),
    **dict.fromkeys([f"inclusionAI/LLaDA-MoE-7B-A1B-{kind}" for kind in ("Base", "Instruct")], LLADA_MOE),
    **dict.fromkeys([f"Dream-org/Dream-v0-{kind}-7B" for kind in ("Base", "Instruct")], DREAM),
    "Dream-org/Dream-Coder-v0-Instruct-7B": DREAM | {"use_mrope": False},
    "apple/DiffuCoder-7B-Instruct": DREAM | {"use_mrope": False, "sliding_window": 131_072},
    "Dream-org/DreamReasoner-8B": DREAM_REASONER,
    "ByteDance-Seed/Stable-DiffCoder-8B-Instruct": STABLE_DIFFCODER,
    "GSAI-ML/iLLaDA-8B-Base": ILLADA,
    "Gen-Verse/TraDo-4B-Instruct": sdar(2560, 9728, 36, 32, tied=True),
    "JetLM/SDAR-1.7B-Chat": sdar(2048, 6144, 28, 16, tied=True),
    "JetLM/SDAR-4B-Chat-b16": sdar(2560, 9728, 36, 32),
    "JetLM/SDAR-8B-Chat": sdar(4096, 12_288, 36, 32),
    "JetLM/SDAR-30B-A3B-Chat-b32": SDAR_MOE,
    "inclusionAI/LLaDA2.0-mini": LLADA2 | MINI | {"num_attention_heads": 16},
    "inclusionAI/LLaDA2.0-flash": LLADA2 | FLASH | {"num_attention_heads": 32},
}
BLOCK_SIZES = {"JetLM/SDAR-4B-Chat-b16": 16, "JetLM/SDAR-30B-A3B-Chat-b32": 32, "JetLM/SDAR-8B-Chat": 4}
BLOCK_SIZES |= {"Dream-org/DreamReasoner-8B": 32, "ByteDance-Seed/Stable-DiffCoder-8B-Instruct": 4}
MASKS = {"Dream-org/DreamReasoner-8B": 151_669, "ByteDance-Seed/Stable-DiffCoder-8B-Instruct": 5}
MASKS |= {"GSAI-ML/iLLaDA-8B-Base": 5, "Gen-Verse/TraDo-4B-Instruct": 151_669}


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs_are_read_whole(name):
    stated = RELEASED[name]
    read = parse_config(stated, name)
    assert type(read) is CONFIG_CLASSES[stated["architectures"][0]]
    assert getattr(read, "block_size", None) == BLOCK_SIZES.get(name, getattr(read, "block_size", None))
    for key in read.schema.model_fields.keys() & stated.keys() - {"torch_dtype", "rope_scaling"}:
        assert stated[key] is None or getattr(read, key) == stated[key]
    assert read.mask_token_id == MASKS.get(name, read.mask_token_id) is not None
    # As transformers 5 saves it: RoPE in a table, the type of weights by its new name.
    new = {key: value for key, value in stated.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": stated["rope_theta"]}}
    assert parse_config(new, name).to_dict() == read.to_dict()


@pytest.mark.parametrize("name", RELEASED)
def test_any_other_key_is_named_with_its_value(name):
    @given(
        key=st.text("abcdefgh_", min_size=3, max_size=12), value=st.one_of(st.integers(), st.booleans(), st.just([]))
    )
    @settings(max_examples=20, deadline=None)
    def check(key, value):
        key = f"x{key}"
        with pytest.raises(ValueError, match=r"config\.json: ") as caught:
            parse_config(RELEASED[name] | {key: value}, name)
        assert f"{key}={value!r}: not known of " in str(caught.value)
        parse_config(RELEASED[name] | {key: None}, name)

    check()


@pytest.mark.parametrize(
    ("config", "name", "message"),
    [
        (DREAM_CONFIG, "Dream-org/DreamOn-v0-7B", "DreamOn expands and deletes masks"),
        (DREAM_CONFIG, "/data/models--Dream-org--DreamOn-v0-7B/snapshots/0a", "DreamOn expands and deletes masks"),
    ],
)
def test_models_that_decode_otherwise_are_known_by_their_names(config, name, message):
    with pytest.raises(ValueError, match=message):
        parse_config(config, name)
    parse_config(config, name.replace("DreamOn", "Dream"))


@pytest.mark.parametrize(
    ("name", "edits"),
    [
        ("inclusionAI/LLaDA2.1-mini", True),
        ("/data/models--inclusionAI--LLaDA2.1-flash/snapshots/0a", True),
        ("inclusionAI/LLaDA2.0-mini", False),
        ("/data/LLaDA2.1-mini", False),
    ],
)
def test_only_the_released_name_tells_the_model_that_edits(name, edits):
    defaults = checkpoint_defaults(parse_config(RELEASED["inclusionAI/LLaDA2.0-mini"], name))
    assert defaults == ({"threshold": 0.95, "edit_threshold": 0.9, "max_post_steps": 16} if edits else {})


def test_keys_that_leave_generation_to_other_files_are_no_business_of_the_model():
    stated = {"temperature": 0.2, "top_p": 0.95, "max_length": 2048, "is_encoder_decoder": False}
    assert parse_config(LLADA_CONFIG | stated, "folder").to_dict() == parse_config(LLADA_CONFIG, "folder").to_dict()


def test_llamas_config_is_transformers_own_unless_the_architecture_is_ours(tmp_path):
    register()
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is LlamaConfig
    assert type(CONFIG_MAPPING["llama"](hidden_size=64)) is LlamaConfig, "as a part of another model's config"
    write_stable_diffcoder(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is CONFIG_CLASSES["StableDiffcoderForCausalLM"]
