"""Checkpoints that are damaged or of another kind: one sentence, which names the file
and what is wrong in it.
"""

import json
import os
import re
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm_engine.demo import model_path
from dllm_engine.model_executor.loading.files import check_files, check_safetensors
from dllm_engine.model_executor.models.configs import parse_config
from tests.support import tiny_checkpoints
from tests.support.engines import refuse_start, tokens_of

FAMILIES = ("llada", "dream", "llada_moe", "sdar_moe", "illada", "llada2")
LLADA, DREAM, MOE, SDAR_MOE, ILLADA, LLADA2 = (
    tiny_checkpoints.CONFIGS[family] for family in FAMILIES
)


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        parse_config(config, "folder")
    message = str(caught.value)
    assert "\n" not in message
    return message


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


SIZES = [
    (config, key)
    for config in (LLADA, DREAM, MOE)
    for key in config
    if re.fullmatch("d_model|(n|num|max)_.*|.*_size", key)
]


@pytest.mark.parametrize("value", [0, "64", 10**12], ids=str)
@pytest.mark.parametrize(
    ("config", "key"), SIZES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_size_that_is_none_is_named(config, key, value):
    assert f"folder/config.json: {key}={value!r}" in refusal(config | {key: value})


@pytest.mark.parametrize(
    ("config", "stated"),
    [
        (
            LLADA,
            {
                "n_layers": None,
                "rms_norm_eps": -1e-5,
                "rope_theta": 0,
                "weight_tying": "no",
            },
        ),
        (LLADA, {"mask_token_id": "<mask>", "auto_map": 5, "self": 1}),
        (DREAM, {"eos_token_id": -1, "end_of_turn_token_id": "x"}),
        (LLADA, {"quantization_config": {"quant_method": 5}}),
        (LLADA, {"quantization_config": {"quant_method": "awq", "format": 5}}),
        (LLADA, {"torch_dtype": "float33", "architectures": "LLaDAModelLM"}),
        (LLADA, {"rms_norm_eps": 0, "rope_theta": float("inf"), "mask_token_id": -1}),
        (DREAM, {"rms_norm_eps": float("nan"), "rope_scaling": "yarn", "dtype": "16"}),
        (SDAR_MOE, {"decoder_sparse_step": 0, "norm_topk_prob": None}),
        # Variants that are not implemented.
        (
            LLADA,
            {
                "block_type": "sequential",
                "activation_type": "gelu",
                "rope": False,
                "alibi": True,
                "clip_qkv": 8.0,
            },
        ),
        (MOE, {"hidden_act": "gelu", "partial_rotary_factor": 0.5}),
        (MOE, {"norm_topk_prob": True, "routed_scaling_factor": 2.5}),
        (ILLADA, {"layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True}),
        (
            DREAM,
            {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"],
            },
        ),
        (SDAR_MOE, {"use_sliding_window": True, "qk_layernorm": False}),
        (
            LLADA2,
            {
                "norm_head": True,
                "use_bias": True,
                "router_dtype": "bf16",
                "rotary_dim": 16,
            },
        ),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_key(config, stated):
    for key, value in stated.items():
        message = refusal(config | {key: value})
        assert "folder/config.json: " in message
        assert f"{key}={value!r}" in message or f"{key}.0={value[0]!r}" in message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            DREAM | {"mask_token_id": 150},
            "mask_token_id=150 is outside the vocabulary of 150",
        ),
        (
            LLADA | {"n_heads": 3},
            "d_model=64, n_heads=3: RoPE needs heads of an even size",
        ),
        (
            DREAM | {"num_key_value_heads": 3},
            "num_key_value_heads=3 does not divide num_attention_heads=4",
        ),
        (
            LLADA | {"architectures": ["LLaDAMoE"]},
            "goes with the architecture 'LLaDAModelLM' or 'LLaDAMoEModelLM'",
        ),
        (MOE | {"num_experts_per_tok": 7}, "num_experts_per_tok=7 of num_experts=6"),
        (
            MOE | {"moe_layer_freq": [1, 1, 1]},
            "moe_layer_freq must hold num_hidden_layers=2",
        ),
        (
            MOE | {"moe_layer_freq": [0, 1], "dense_intermediate_size": None},
            "need a dense_intermediate_size",
        ),
        (
            MOE | {"sliding_window": 8, "of_the_future": 1},
            "of_the_future=1, sliding_window=8: not known of LLaDA-MoE",
        ),
        (
            DREAM | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            "model_type='llama' is not a",
        ),
        (
            DREAM | {"architectures": ["DreamLM"]},
            "goes with the architecture 'DreamModel' or 'DreamForCausalLM'",
        ),
        (LLADA | {"model_type": ["llada"]}, "model_type=['llada'] is not a supported"),
        (
            {},
            "supported: LLaDAModelLM (LLaDA), LLaDAMoEModelLM (LLaDA-MoE), "
            "ILLaDAForCausalLM (iLLaDA)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_key_that_makes_no_sense_is_named(config, message):
    assert message in refusal(config)


@pytest.mark.parametrize("config", [LLADA, DREAM])
def test_a_config_without_a_mask_token_is_no_diffusion_models(config):
    with pytest.raises(ValueError, match=r"config\.json has no 'mask_token_id'"):
        parse_config(without(config, "mask_token_id"), "folder").check()


def test_keys_that_no_model_reads_may_hold_anything():
    read = parse_config(LLADA | {"id2label": 5, "is_encoder_decoder": "x"}, "folder")
    assert read.to_dict() == parse_config(LLADA, "folder").to_dict()


def test_the_architecture_may_be_left_out():
    assert parse_config(without(DREAM, "architectures"), "folder").architectures == [
        "DreamModel"
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"of_the_future": 1}, "of_the_future=1: not known of SDAR"),
        (
            {"num_attention_heads": 3},
            "num_key_value_heads=2 does not divide num_attention_heads=3",
        ),
    ],
)
def test_overrides_are_checked_by_stock_vllm_as_the_file_is(
    tiny_sdar, changes, message
):
    from vllm.engine.arg_utils import EngineArgs

    def change(config):
        for name, value in changes.items():
            setattr(config, name, value)
        return config

    for override in (changes, change):
        arguments = EngineArgs(
            model=str(tiny_sdar), hf_overrides=override, skip_tokenizer_init=True
        )
        with pytest.raises(ValueError, match=rf"{tiny_sdar}/config\.json") as caught:
            arguments.create_model_config()
        assert message in str(caught.value)


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def as_integers(tensors):
    name = min(tensors)
    tensors[name] = tensors[name].int()


def as_a_pipe(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


CONFIG, GENERATION = "config.json", "generation_config.json"
INDEX = "model.safetensors.index.json"
LONG = "k" * 1_000_000


def places(where) -> str:
    return json.dumps({"weight_map": where})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (CONFIG, "{", "cannot be read"),
        (CONFIG, json.dumps(LLADA | {"mlp_hidden_size": 0}), "mlp_hidden_size=0"),
        (CONFIG, json.dumps(LLADA | {LONG: 1}), "not known of LLaDA"),
        (
            CONFIG,
            json.dumps(LLADA | {"rope_parameters": {LONG: 1}}),
            "RoPE: unknown key",
        ),
        (
            CONFIG,
            json.dumps(LLADA | {"quantization_config": {"quant_method": LONG}}),
            "quant_method must be a name",
        ),
        (CONFIG, "[7]", "must hold a JSON object"),
        (CONFIG, '{"a":' * 100_000, "too deeply"),
        (CONFIG, r'{"x": "\ud800"}', "surrogates"),
        (GENERATION, '{"temp', "cannot be read"),
        (GENERATION, "[]", "must hold a JSON object"),
        (GENERATION, '{"temperature": [1]}', "temperature=[1]"),
        (GENERATION, '{"temperature": 1' + "0" * 400 + "}", "temperature=1"),
        (GENERATION, '{"temperature": -1}', "temperature=-1"),
        (GENERATION, '{"top_p": 7}', "top_p=7"),
        (GENERATION, '{"top_k": 1.5}', "top_k=1.5"),
        (GENERATION, '{"max_new_tokens": -3}', "max_new_tokens=-3"),
        (GENERATION, '{"eos_token_id": "x"}', "eos_token_id='x'"),
        (GENERATION, '{"presence_penalty": "x"}', "presence_penalty='x'"),
        (GENERATION, '{"frequency_penalty": NaN}', "frequency_penalty=nan"),
        (
            GENERATION,
            '{"do_sample": 1, "pad_token_id": "x"}',
            "pad_token_id='x' cannot be read: TypeError",
        ),
        ("special_tokens_map.json", "[1]", "must hold a JSON object"),
        ("added_tokens.json", "{", "cannot be read"),
        ("tokenizer.json", "{", "cannot be read"),
        (INDEX, "{", "cannot be read"),
        (INDEX, places([1]), "weight_map=[1] must map tensors to files"),
        (INDEX, places({"a": "../a"}), "which is not a file of this folder"),
        (INDEX, places({"a": "gone"}), "'gone', which is not in the folder"),
        (INDEX, places({"a": LONG}), "not in the folder"),
    ],
)
def test_a_damaged_file_is_named_in_a_short_sentence(tmp_path, name, text, message):
    folder = tiny_checkpoints.write("llada", tmp_path)
    (folder / name).write_text(text)
    refuse_start(folder, f"{folder}/{name}", message)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / CONFIG).unlink(), "holds no config.json"),
        (lambda folder: with_keys(folder, model_type=LONG), "is not a supported"),
        (as_a_pipe, "model.safetensors is not a regular file"),
        (
            lambda folder: edit_weights(folder, as_integers),
            "model.safetensors: 'model.transformer.blocks.0.attn_norm.weight' is of "
            "type I32",
        ),
    ],
)
def test_a_damaged_folder_is_named(tmp_path, damage, message):
    damage(folder := tiny_checkpoints.write("llada", tmp_path))
    refuse_start(folder, str(folder), message)


def with_keys(folder, **stated):
    """Change keys of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | stated))
    return folder


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("tokenizer.json", "{}", "KeyError: 'added_tokens'"),
        ("tokenizer.json", '{"added_tokens": 5}', "TypeError: 'int' object is not"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}', ""),
        ("tokenizer_config.json", '{"pad_token": 5}', "Special token pad_token"),
        ("tokenizer_config.json", '{"padding_side": "\\n"}', "Padding side should"),
    ],
)
def test_a_damaged_file_of_a_tokenizer_is_named(tmp_path, name, text, reason):
    folder = shutil.copytree(model_path("demo"), tmp_path / "model")
    (folder / name).write_text(text)
    said = f"{folder / name} cannot be read: "
    refuse_start(folder, said, reason, skip_tokenizer_init=False)


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ({"quant_method": "x"}, "Unknown quantization method: x"),
        ({"quant_method": "awq", "bits": 0, "group_size": 32}, "bits"),
        ({"quant_method": "awq", "bits": 4, "dynamic": 5}, "AttributeError"),
    ],
)
def test_quantization_that_vllm_cannot_read_is_named(tmp_path, stated, reason):
    folder = tiny_checkpoints.write("llada", tmp_path, quantization_config=stated)
    refuse_start(folder, f"{folder}/config.json: quantization_config=", reason)


@pytest.mark.parametrize(
    ("num_layers", "message"),
    [
        (1000, "n_layers=1000, but the weights have 3"),
        (1 << 24, "n_layers=16777216: Input should be less than or equal to 1024"),
    ],
)
def test_more_layers_than_the_weights_have_are_refused_before_they_are_made(
    tmp_path, num_layers, message
):
    """Layers are counted, not taken from the highest number."""

    def add_last(tensors):
        tensors["model.transformer.blocks.999.q_proj.weight"] = torch.ones(1)

    folder = tiny_checkpoints.write("llada", tmp_path, edit=add_last)
    with_keys(folder, n_layers=num_layers)
    refuse_start(folder, f"config.json: {message}")


GUIDE_DAMAGES = [
    ({"num_hidden_layers": 1 << 24}, "num_hidden_layers=16777216: Input should be"),
    ({"num_hidden_layers": 1000}, "num_hidden_layers=1000, but the weights have 2"),
    ({"vocab_size": 1 << 30}, "vocab_size=1073741824: Input should be less"),
    ({"vocab_size": 1 << 24}, "vocab_size=16777216 × hidden_size=64 is more than the"),
    ({"num_attention_heads": 0}, "num_attention_heads=0: Input should be greater"),
    ({"hidden_size": "x"}, "hidden_size='x': Input should be a valid integer"),
    ({"intermediate_size": -1}, "intermediate_size=-1: Input should be greater"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: Input should be a finite"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
    ({"quantization_config": {"quant_method": "gptq"}}, "is not supported, only None"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type='linear'"),
]


@pytest.mark.parametrize(("stated", "message"), GUIDE_DAMAGES, ids=str)
def test_a_guides_config_is_checked_as_the_models_is(
    tiny_llada, tmp_path, stated, message
):
    guide = with_keys(tiny_checkpoints.write_guide(tmp_path), **stated)
    said = f"{guide}/config.json: "
    refuse_start(tiny_llada, said, message, guide_model=str(guide))


def test_integer_weights_of_a_guide_are_named(tiny_llada, tmp_path):
    guide = tiny_checkpoints.write_guide(tmp_path)
    edit_weights(guide, as_integers)
    said = f"{guide}/model.safetensors: "
    refuse_start(tiny_llada, said, "of type I32", guide_model=str(guide))


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"n_layers": 1 << 24}, "n_layers=16777216"),
        (
            {"vocab_size": 1 << 24, "embedding_size": 1 << 24, "d_model": 1 << 16},
            "its sizes make weights of ",
        ),
    ],
)
def test_random_weights_fit_the_machine(tmp_path, stated, message):
    folder = with_keys(tiny_checkpoints.write("llada", tmp_path), **stated)
    refuse_start(folder, f"{folder}/config.json: {message}", load_format="dummy")


def test_a_tensor_in_two_files_is_named_with_both(tmp_path):
    folder = tiny_checkpoints.write("llada", tmp_path)
    copy = folder / "pytorch.safetensors"
    copy.write_bytes((folder / "model.safetensors").read_bytes())
    refuse_start(folder, f"{copy} holds the tensor '", "', as model.safetensors does")


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llada", "d_model"),
        ("llada", "mlp_hidden_size"),
        ("llada", "vocab_size"),
        ("sdar", "head_dim"),
        ("sdar_moe", "num_experts"),
        ("llada_moe", "num_experts"),
        ("llada2", "moe_intermediate_size"),
    ],
)
def test_sizes_beyond_all_weights_are_refused_before_memory_is_taken(
    tmp_path, family, key
):
    folder = with_keys(tiny_checkpoints.write(family, tmp_path), **{key: 1 << 24})
    refuse_start(folder, "config.json: ", f"{key}=16777216", " is more than the ")


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), 10**400, True, "2"],
    ids=["nan", "inf", "1e400", "true", "text"],
)
def test_numbers_of_rope_are_finite(value):
    message = refusal(DREAM | {"rope_scaling": {"type": "linear", "factor": value}})
    assert "RoPE: key factor=" in message
    assert "Input should be a " in message


def test_a_cut_file_named_as_generation_config_is_named(tiny_llada, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temp')
    said = f"{tmp_path}/generation_config.json cannot be read"
    refuse_start(tiny_llada, said, generation_config=str(tmp_path))


def test_blocks_that_exceed_the_context_are_refused(tiny_sdar):
    said = "block_size=256 of ", " is more than max_model_len=128"
    overrides = {"block_size": 256}
    refuse_start(tiny_sdar, *said, hf_overrides=overrides, max_model_len=128)


def test_files_that_are_not_the_models_do_not_stop_it(tmp_path):
    folder = tiny_checkpoints.shard(tiny_checkpoints.write("llada", tmp_path))
    for name in (
        "._model-00001-of-00003.safetensors",
        "optimizer.safetensors",
        "._config.json",
    ):
        (folder / name).write_bytes(b"Mac OS X")
    (folder / "overview.png").write_text("version https://git-lfs.github.com/spec/v1\n")
    for name in ("results.json", "notes.txt", "old.model", "x.jinja"):
        (folder / name).write_text("version https://git-lfs.github.com/spec/v1\n")
    (folder / "runs.json").mkdir()
    os.mkfifo(folder / "log.json")
    check_files(str(folder))
    assert check_safetensors(str(folder)).keys() == load_whole(folder).keys()


def load_whole(folder):
    return {
        name: t
        for path in folder.glob("model-*.safetensors")
        for name, t in load_file(path).items()
    }


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_overrides_of_rope_scaling_take_the_older_key(tiny_sdar, key):
    from vllm.engine.arg_utils import EngineArgs

    overrides = {"rope_scaling": {key: "linear", "factor": 2.0}}
    arguments = EngineArgs(
        model=str(tiny_sdar), hf_overrides=overrides, skip_tokenizer_init=True
    )
    assert (
        arguments.create_model_config().hf_config.rope_parameters["rope_type"]
        == "linear"
    )


def test_a_factor_without_a_type_is_refused(tiny_sdar):
    for key in ("rope_scaling", "rope_parameters"):
        said = "RoPE: factor=2.0 needs a rope_type"
        overrides = {"factor": 2.0}
        refuse_start(tiny_sdar, said, hf_overrides={key: overrides})


def test_defaults_that_follow_from_other_keys_follow_overrides():
    config = parse_config(
        without(LLADA, "n_kv_heads") | {"mlp_hidden_size": None, "mlp_ratio": 3},
        "folder",
    )
    assert (config.num_key_value_heads, config.intermediate_size) == (4, 192)
    config.update({"num_attention_heads": 2, "hidden_size": 32})
    assert (config.n_heads, config.num_key_value_heads, config.intermediate_size) == (
        2,
        2,
        96,
    )
    for name in ("torch_dtype", "dtype"):
        config.update({name: "float16"})
        assert config.dtype == torch.float16
        config.update({name: "bfloat16"})
        assert config.dtype == torch.bfloat16


def test_a_caller_states_what_a_config_leaves_out(engines, tiny_sdar, tmp_path):
    stated = {"block_size": 8, "mask_token_id": tiny_checkpoints.MASK}
    folder = tiny_checkpoints.write("sdar", tmp_path, **dict.fromkeys(stated))
    asked: dict[str, Any] = {
        "prompt": [*range(30)],
        "gen_length": 20,
        "ignore_eos": True,
    }
    expected = tokens_of(engines(tiny_sdar), block_length=8, **asked)
    assert tokens_of(engines(folder, hf_overrides=stated), **asked) == expected
