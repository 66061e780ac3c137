"""Keys of the released checkpoints' configs, none of which is refused; any other key
is, in every family.
"""

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig

from dllm_engine.checkpoints import is_named_shape, load_config, named_shape
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
