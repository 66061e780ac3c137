"""Keys of the released checkpoints' configs, none of which is refused; any other key
is, in every family.
"""

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig, Qwen2Config

from dllm_engine.checkpoints import (
    check_start,
    is_named_shape,
    load_config,
    named_shape,
)
from dllm_engine.model_executor.models.configs import CONFIG_CLASSES, parse_config
from dllm_engine.plugin import register
from dllm_engine.request_options.defaults import checkpoint_defaults
from tests.support.tiny_checkpoints import CONFIGS, write

RELEASED = {
    name: entry
    for entry in json.loads(
        Path(__file__).with_name("released_configs.json").read_text()
    )
    for name in entry["checkpoints"]
}
"""By the name of a checkpoint: its ``config``, and the block size and the mask token
where they follow from others.
"""


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs_are_read_whole(name):
    stated = RELEASED[name]["config"]
    read = parse_config(stated, name)
    assert type(read) is CONFIG_CLASSES[stated["architectures"][0]]
    assert RELEASED[name].get("block_size") in (None, read.to_dict().get("block_size"))
    for key in read.schema.model_fields.keys() & stated.keys() - {
        "auto_map",
        "torch_dtype",
        "rope_scaling",
    }:
        assert stated[key] is None or getattr(read, key) == stated[key]
    assert (
        read.mask_token_id
        == RELEASED[name].get("mask_token_id", read.mask_token_id)
        is not None
    )
    assert type(read).from_dict(read.to_dict()).to_dict() == read.to_dict()
    # As transformers 5 saves it: RoPE in a table, the type of weights by its new name.
    new = {
        key: value
        for key, value in stated.items()
        if key not in ("rope_theta", "rope_scaling", "torch_dtype")
    }
    new |= {
        "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": stated["rope_theta"]},
    }
    assert parse_config(new, name).to_dict() == read.to_dict()


@pytest.mark.parametrize("name", RELEASED)
def test_any_other_key_is_named_with_its_value(name):
    config = RELEASED[name]["config"]
    for key, value in (("xa", 1), ("x_of_the_future", True), ("xs", [])):
        with pytest.raises(ValueError, match=r"config\.json: ") as caught:
            parse_config(config | {key: value}, name)
        assert f"{key}={value!r}: not known of " in str(caught.value)
        parse_config(config | {key: None}, name)


@pytest.mark.parametrize(
    "name",
    ["Dream-org/DreamOn-v0-7B", "/data/models--Dream-org--DreamOn-v0-7B/snapshots/0a"],
)
def test_models_that_decode_otherwise_are_known_by_their_names(name):
    with pytest.raises(ValueError, match="DreamOn expands and deletes masks"):
        parse_config(CONFIGS["dream"], name)
    parse_config(CONFIGS["dream"], name.replace("DreamOn", "Dream"))


A2D = {
    "architectures": ["A2DQwen3LMHeadModel"],
    "model_type": "a2d-qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "modeling_qwen3.A2DQwen3Config"},
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_types": ["full_attention"] * 28,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.0",
    "use_cache": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""As dllm-hub has it: it says neither the kind nor the mask."""


def test_what_a_config_leaves_out_is_told_by_the_name_or_the_tokenizer(tmp_path):
    mdlm = parse_config(A2D, "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1")
    bd3lm = parse_config(A2D, "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1")
    assert mdlm.family.attention == "full"
    assert bd3lm.family.attention_block == 32
    assert bd3lm.family.block_origin == "response"
    assert mdlm.mask_token_id == bd3lm.mask_token_id == 151669
    tokenizer = {"added_tokens_decoder": {"151670": {"content": "<|mask|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    unnamed = parse_config(A2D, str(tmp_path))
    assert unnamed.mask_token_id == 151670
    with pytest.raises(ValueError, match=r"which kind of a2d-Qwen3 .* 'mdlm' or 'bd3"):
        unnamed.check()
    unnamed.update({"kind": "bd3lm", "block_size": 16})
    unnamed.check()
    assert unnamed.family.attention_block == 16


def test_a_wrong_pair_of_type_and_architecture_names_the_right_one():
    config = A2D | {"architectures": ["A2DQwen2LMHeadModel"]}
    with pytest.raises(ValueError, match="goes with the architecture 'A2DQwen3LM"):
        parse_config(config, "Qwen3-0.6B-diffusion-mdlm-v0.1")


@pytest.mark.parametrize("model_type", ["wedlm", "modernbert"])
def test_what_is_not_served_is_refused_with_the_reason(model_type):
    with pytest.raises(ValueError, match=r"is not supported: (WeDLM|ModernBERT) "):
        parse_config({"model_type": model_type}, "folder")


QWEN2 = {
    key: value
    for key, value in A2D.items()
    if key not in ("head_dim", "attention_bias", "auto_map")
}
QWEN2 |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def test_a_qwen2_is_ours_only_by_its_name_or_as_it_is_told(tmp_path):
    register()
    ours = CONFIG_CLASSES["OpenDcoderForCausalLM"]
    for name, expected in {
        "open-dcoder-0.5B": ours,
        "Qwen2.5-Coder-0.5B": Qwen2Config,
        "open-dcoders": Qwen2Config,
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(QWEN2))
        assert type(AutoConfig.from_pretrained(str(folder))) is expected
    folder = tmp_path / "open-dcoders"
    with pytest.raises(ValueError, match="is not a supported diffusion"):
        check_start(str(folder), {})
    told = {"architectures": ["OpenDcoderForCausalLM"]}
    check_start(str(folder), {"hf_overrides": told})
    read = parse_config(QWEN2, "fredzzp/open-dcoder-0.5B")
    assert (type(read), read.mask_token_id) == (ours, 151665)


@pytest.mark.parametrize(
    ("name", "edits"),
    [
        ("inclusionAI/LLaDA2.1-mini", True),
        ("/data/models--inclusionAI--LLaDA2.1-flash/snapshots/0a", True),
        ("inclusionAI/LLaDA2.0-mini", False),
        ("/data/LLaDA2.1-mini", True),
        ("/data/LLaDA2.1-mini/tuned", False),
    ],
)
def test_the_own_name_tells_the_model_that_edits(name, edits):
    defaults = checkpoint_defaults(
        parse_config(RELEASED["inclusionAI/LLaDA2.0-mini"]["config"], name)
    )
    assert defaults == (
        {"threshold": 0.95, "edit_threshold": 0.9, "max_post_steps": 16}
        if edits
        else {}
    )


def test_keys_that_leave_generation_to_other_files_are_no_business_of_the_model():
    stated = {
        "temperature": 0.2,
        "top_p": 0.95,
        "max_length": 2048,
        "is_encoder_decoder": False,
    }
    plain = parse_config(CONFIGS["llada"], "folder")
    assert (
        parse_config(CONFIGS["llada"] | stated, "folder").to_dict() == plain.to_dict()
    )


@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        ("/cache/models--JetLM--SDAR-1.7B-Chat-b16/snapshots/0123abcd", 16),
        ("mine/SDAR-4B-Chat-beta", 4),
    ],
)
def test_a_block_size_in_a_name_counts_where_the_config_states_none(
    tmp_path, name, block_size
):
    config = {
        key: value for key, value in CONFIGS["sdar"].items() if key != "block_size"
    }
    assert parse_config(config, name).block_size == block_size
    assert parse_config(config | {"block_size": 8}, name).block_size == 8
    register()  # for transformers
    folder = tmp_path / name.removeprefix("/")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    assert AutoConfig.from_pretrained(str(folder)).block_size == block_size
    assert AutoConfig.from_pretrained(str(folder), block_size=2).block_size == 2


def test_llamas_config_is_transformers_own_unless_the_architecture_is_ours(tmp_path):
    register()
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is LlamaConfig
    assert type(CONFIG_MAPPING["llama"](hidden_size=64)) is LlamaConfig, (
        "as a part of another model's config"
    )
    write("stable_diffcoder", tmp_path)
    assert (
        type(AutoConfig.from_pretrained(tmp_path))
        is CONFIG_CLASSES["StableDiffcoderForCausalLM"]
    )


@pytest.mark.parametrize(
    ("name", "hidden", "heads", "kv_heads", "layers", "mlp"),
    [
        ("llada-8b/4", 1024, 8, 8, 8, 3072),
        ("dream-7b/7", 512, 4, 1, 4, 2706),
        ("llada-moe-7b/4", 512, 4, 4, 4, None),
    ],
)
def test_a_scaled_shape_keeps_the_size_of_its_heads(
    name, hidden, heads, kv_heads, layers, mlp
):
    config = load_config(name)
    assert config.hidden_size == hidden
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads, kv_heads)
    assert (config.num_hidden_layers, config.intermediate_size) == (layers, mlp)
    assert config.hidden_size // config.num_attention_heads == 128
    assert config.mask_token_id == config.vocab_size - 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (name, "divided by one of 1, 2, 4, 8, 16, 32")
            for name in ("llada-8b/3", "llada-8b/")
        ),
        ("llama-8b", "unknown"),
    ],
)
def test_heads_must_divide_and_other_names_are_no_shapes(name, message):
    with pytest.raises(ValueError, match=message):
        named_shape(name)
    assert not is_named_shape("demo")
