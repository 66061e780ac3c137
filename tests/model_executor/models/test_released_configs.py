"""Keys of the released checkpoints' configs, none of which is refused; any other key
is, in every family.
"""

import json

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig, Qwen2Config

from dllm_engine.checkpoints import (
    check_start,
    is_named_shape,
    load_config,
    named_shape,
)
from dllm_engine.families import barred_tokens
from dllm_engine.model_executor.models.configs import CONFIG_CLASSES, parse_config
from dllm_engine.plugin import register
from tests.support.released_checkpoints import RELEASED
from tests.support.tiny_checkpoints import CONFIGS, write

A2D = RELEASED["dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1"]["config"]
"""It says neither the kind nor the mask."""
QWEN2 = RELEASED["fredzzp/open-dcoder-0.5B"]["config"]


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs_are_read_whole(name):
    stated = RELEASED[name]["config"]
    read = parse_config(stated, name)
    assert stated["architectures"][0] in read.family.architectures
    assert RELEASED[name].get("block_size") in (None, read.to_dict().get("block_size"))
    for key in read.schema.model_fields.keys() & stated.keys() - {
        "architectures",
        "auto_map",
        "dtype",
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
        "rope_parameters": stated.get("rope_parameters")
        or {"rope_type": "default", "rope_theta": stated["rope_theta"]},
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


def test_what_a_config_leaves_out_is_told_by_the_name_or_the_tokenizer(tmp_path):
    mdlm = parse_config(A2D, "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1")
    bd3lm = parse_config(A2D, "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1")
    assert mdlm.family.attention == "full"
    assert bd3lm.family.attention_block == 32
    assert bd3lm.family.block_origin == "response"
    assert mdlm.mask_token_id == bd3lm.mask_token_id == 151669
    tokenizer = {"added_tokens_decoder": {"151670": {"content": "<|mask|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert parse_config(A2D, str(tmp_path)).mask_token_id == 151670
    tokenizer = {
        "mask_token": "<|MASK|>",
        "added_tokens_decoder": {"151671": {"content": "<|MASK|>"}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    unnamed = parse_config(A2D, str(tmp_path))
    assert unnamed.mask_token_id == 151671
    with pytest.raises(ValueError, match=r"which kind of a2d-Qwen3 .* 'mdlm' or 'bd3"):
        unnamed.check()
    unnamed.update({"kind": "bd3lm", "block_size": 16})
    unnamed.check()
    assert unnamed.family.attention_block == 16


def test_a_wrong_pair_of_type_and_architecture_names_the_right_one():
    config = A2D | {"architectures": ["A2DQwen2LMHeadModel"]}
    with pytest.raises(ValueError) as caught:
        parse_config(config, "Qwen3-0.6B-diffusion-mdlm-v0.1")
    assert str(caught.value).endswith(
        "model_type='a2d-qwen3' goes with the architecture 'A2DQwen3LMHeadModel', "
        "and 'A2DQwen2LMHeadModel' with 'a2d-qwen2'"
    )


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ({"model_type": "wedlm"}, "not supported: WeDLM attends in the order in which"),
        ({"model_type": "modernbert"}, "not supported: ModernBERT has other layers"),
        (
            {"model_type": "nemotron_labs_diffusion_vlm"},
            "not supported: Nemotron-Labs-Diffusion-VLM reads pictures",
        ),
        (
            CONFIGS["dream"] | {"expand_token_id": 7},
            "DreamOn is not supported: it expands and deletes masks",
        ),
        (
            A2D | {"model_type": "qwen3"},
            "'qwen3' is not a supported diffusion language model; "
            "A2DQwen3LMHeadModel goes with 'a2d-qwen3'",
        ),
        ({"model_type": "a2d-qwen4"}, "did you mean 'a2d-qwen3'?"),
        (
            QWEN2,
            'if it is of Open-dLLM, set hf_overrides={"architectures": '
            '["OpenDcoderForCausalLM"]}',
        ),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_with_the_nearest(stated, reason):
    with pytest.raises(ValueError) as caught:
        parse_config(stated, "folder")
    assert reason in str(caught.value)


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


def test_tokens_that_insert_and_delete_are_never_chosen():
    config = CONFIGS["llada2"] | {"delete_token_id": 9, "split_token_id": 7}
    read = parse_config(config, "LLaDA2.2-mini")
    assert barred_tokens(read) == [9, 7]
    assert barred_tokens(parse_config(CONFIGS["llada2"], "LLaDA2.0-mini")) == []
