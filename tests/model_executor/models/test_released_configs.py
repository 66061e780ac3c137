"""Keys of the released checkpoints' configs, none of which is refused; any other key is, in every family."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig

from dllm_engine.model_executor.models.configs import CONFIG_CLASSES, parse_config
from dllm_engine.plugin import register
from dllm_engine.scheduler.options.resolve import checkpoint_defaults
from tests.support.tiny_checkpoints import DREAM_CONFIG, LLADA_CONFIG, write_stable_diffcoder

RELEASED = {
    name: entry
    for entry in json.loads(Path(__file__).with_name("released_configs.json").read_text())
    for name in entry["checkpoints"]
}
"""By the name of a checkpoint: its ``config``, and the block size and the mask token where they follow from others."""


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs_are_read_whole(name):
    stated = RELEASED[name]["config"]
    read = parse_config(stated, name)
    assert type(read) is CONFIG_CLASSES[stated["architectures"][0]]
    assert RELEASED[name].get("block_size") in (None, read.to_dict().get("block_size"))
    for key in read.schema.model_fields.keys() & stated.keys() - {"torch_dtype", "rope_scaling"}:
        assert stated[key] is None or getattr(read, key) == stated[key]
    assert read.mask_token_id == RELEASED[name].get("mask_token_id", read.mask_token_id) is not None
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
            parse_config(RELEASED[name]["config"] | {key: value}, name)
        assert f"{key}={value!r}: not known of " in str(caught.value)
        parse_config(RELEASED[name]["config"] | {key: None}, name)

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
    defaults = checkpoint_defaults(parse_config(RELEASED["inclusionAI/LLaDA2.0-mini"]["config"], name))
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
