"""LoRA adapters that become part of the weights, against weights merged by hand."""

import math
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm_engine import DiffusionParams
from dllm_engine.checkpoints import load_config
from dllm_engine.model_executor.loading.lora import LoraAdapter
from tests.model_executor.models.test_loading import POINTER
from tests.support import tiny_checkpoints
from tests.support.engines import refuse_start, responses, runner_of
from tests.support.tiny_checkpoints import write, write_adapter

LLADA = [
    f"model.transformer.blocks.{part}"
    for part in ("0.q_proj", "1.v_proj", "0.ff_out", "1.up_proj")
]


def merged_by_hand(checkpoint, adapter, folder):
    """The checkpoint with W + 6 / 3 · B A, in float64."""
    weights = load_file(checkpoint / "model.safetensors")
    update = load_file(adapter / "adapter_model.safetensors")
    for name in update:
        if name.endswith("lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(
                ".lora_A.weight"
            )
            a = update[name].double()
            b = update[name.replace("lora_A", "lora_B")].double()
            weight = weights[f"{module}.weight"]
            weights[f"{module}.weight"] = (weight.double() + 2 * (b @ a)).to(
                weight.dtype
            )
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def parameters(llm):
    return {
        name: tensor.clone()
        for name, tensor in runner_of(llm).model.state_dict().items()
    }


def assert_same_parameters(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], atol=1e-6, rtol=1e-5)


def every_second_matrix(checkpoint):
    """Modules of both layers, and the head where it is not the embedding."""
    config = load_config(str(checkpoint))
    names = config.family.names
    return [
        name.removesuffix(".weight")
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
        if tensor.ndim == 2 and name != f"{names.embedding}.weight"
    ][::2]


@pytest.mark.parametrize("family", tiny_checkpoints.CONFIGS)
def test_weights_are_those_merged_by_hand(engines, request, tmp_path, family):
    checkpoint = request.getfixturevalue(f"tiny_{family}")
    modules = every_second_matrix(checkpoint)
    adapter = write_adapter(tmp_path / "adapter", checkpoint, modules)
    by_hand = merged_by_hand(checkpoint, adapter, tmp_path / "merged")
    llm = engines(checkpoint, lora_path=str(adapter))
    assert_same_parameters(parameters(llm), parameters(engines(by_hand)))
    params = DiffusionParams(gen_length=16, block_length=8, ignore_eos=True)
    merged, expected, plain = (
        responses(each, [[5, 6, 7]], params)
        for each in (llm, engines(by_hand), engines(checkpoint))
    )
    assert merged == expected != plain
    if not llm.model_config.hf_config.experts:  # which a CPU cannot read again
        before = parameters(llm)
        llm.collective_rpc("reload_weights")
        assert_same_parameters(parameters(llm), before)


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"lora_alpha": 5}, (5 / 3, 5 / 3)),
        ({"use_rslora": True}, (6 / math.sqrt(3), 6 / math.sqrt(3))),
        ({"alpha_pattern": {"blocks.0.q_proj": 12}}, (12 / 3, 6 / 3)),
        ({"alpha_pattern": {r"blocks\.1\.\w+": 12}}, (6 / 3, 12 / 3)),
        ({"alpha_pattern": {r"^model.*\.0\.q_proj": 12}}, (12 / 3, 6 / 3)),
        ({"alpha_pattern": {"^q_proj": 9, "q|v_proj": 12}}, (6 / 3, 12 / 3)),
        ({"alpha_pattern": {"(.*)*x": 9, "(([a-z._]|[0-1])+)+V": 9}}, (6 / 3, 6 / 3)),
        ({"r": 64, "rank_pattern": {".*": 3}}, (6 / 3, 6 / 3)),
    ],
)
def test_the_scale_is_pefts(tiny_llada, tmp_path, config, scales):
    adapter = LoraAdapter(str(write_adapter(tmp_path, tiny_llada, LLADA[:2], **config)))
    assert [
        adapter.scales[f"{module}.weight"] for module in LLADA[:2]
    ] == pytest.approx(scales)


def test_the_sum_is_rounded_once(tiny_llada, tmp_path):
    adapter = LoraAdapter(str(write_adapter(tmp_path, tiny_llada, LLADA[:1])))
    update = load_file(tmp_path / "adapter_model.safetensors")
    a, b = (update[f"base_model.model.{LLADA[0]}.lora_{part}.weight"] for part in "AB")
    weight = load_file(tiny_llada / "model.safetensors")[
        f"{LLADA[0]}.weight"
    ].bfloat16()
    ((_, merged),) = adapter.merged([(f"{LLADA[0]}.weight", weight)], whole=True)
    assert torch.equal(
        merged, (weight.double() + 2 * b.double() @ a.double()).bfloat16()
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30], ids=str)
def test_an_update_that_is_not_finite_is_named(tiny_llada, tmp_path, value):
    """Also one that is not once it is multiplied."""
    file = write_adapter(tmp_path, tiny_llada, LLADA[:1]) / "adapter_model.safetensors"
    tensors = load_file(file)
    for tensor in tensors.values():
        tensor[0, 0] = value
    save_file(tensors, file)
    refuse_start(
        tiny_llada,
        f"{file}: '{LLADA[0]}.weight' with its update holds NaN or infinity",
        lora_path=str(tmp_path),
    )


def test_weights_that_come_in_parts_need_not_hold_all(tiny_llada, tmp_path):
    adapter = LoraAdapter(str(write_adapter(tmp_path, tiny_llada, LLADA)))
    assert [
        name
        for name, _ in adapter.merged([("other.weight", torch.ones(1))], whole=False)
    ] == ["other.weight"]
    with pytest.raises(ValueError, match=r"the model has no '.*ff_out.weight'"):
        list(adapter.merged([("other.weight", torch.ones(1))], whole=True))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lora_alpha": "6"}, "lora_alpha='6': Input should be a valid number"),
        ({"lora_alpha": float("inf")}, "lora_alpha=inf"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan"),
        ({"lora_alpha": None}, "lora_alpha=None"),
        ({"lora_alpha": True}, "lora_alpha=True"),
        ({"lora_alpha": 10**400}, "lora_alpha="),
        ({"lora_alpha": 1e308}, "lora_alpha=1e+308 of "),
        ({"r": 0}, "r=0: Input should be greater than 0"),
        ({"r": 4}, "states the rank 4"),
        ({"rank_pattern": {".*": 5}}, "states the rank 5"),
        ({"rank_pattern": {".*": -1}}, "rank_pattern..*=-1: Input should be greater"),
        ({"rank_pattern": [3]}, "rank_pattern=[3]: Input should be a valid dict"),
        ({"rank_pattern": False}, "rank_pattern=False"),
        ({"rank_pattern": {"(a|b)" * 300: 3}}, "is longer than 1000 characters"),
        (
            {"rank_pattern": {f"(a{i}|b)": 3 for i in range(101)}},
            "rank_pattern has 101 regular expressions, at most 100",
        ),
        ({"alpha_pattern": "q_proj"}, "alpha_pattern='q_proj'"),
        ({"alpha_pattern": []}, "alpha_pattern=[]"),
        ({"alpha_pattern": {".*": "3"}}, "alpha_pattern..*='3'"),
        ({"alpha_pattern": {".*": None}}, "alpha_pattern..*=None"),
        ({"alpha_pattern": {"(.*a.{20})": 3}}, "['(.*a.{20})'] matches too many"),
        (
            {"alpha_pattern": {"(": 3}},
            "alpha_pattern['('] is not a supported regular expression",
        ),
        (
            {"alpha_pattern": {")(": 3}},
            "alpha_pattern[')('] is not a supported regular expression",
        ),
        (
            {"alpha_pattern": {"(?i)x": 3}},
            "alpha_pattern['(?i)x'] is not a supported regular expression",
        ),
        ({"use_rslora": "yes"}, "use_rslora='yes': Input should be a valid boolean"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not supported, only 'LORA'"),
        ({"use_dora": True}, "use_dora=True is not supported; merge the adapter into"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"bias": "all"}, "bias='all' is not supported, only 'none'; save the adapter"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
    ],
)
def test_a_config_that_means_more_is_refused_by_name(
    tiny_llada, tmp_path, config, message
):
    folder = write_adapter(tmp_path, tiny_llada, LLADA[:1], **config)
    said = f"{folder}/adapter_config.json"
    refuse_start(tiny_llada, said, message, lora_path=str(folder))


A, B = (f"base_model.model.{LLADA[0]}.lora_{part}.weight" for part in "AB")


@pytest.mark.parametrize(
    ("edit", "fragments"),
    [
        (
            lambda t: t.update({A.replace("lora_A", "lora_embedding_A"): t.pop(A)}),
            ("lora_embedding_A", "lora_A"),
        ),
        (
            lambda t: t.update(
                {name.replace("q_proj", "w"): t.pop(name) for name in (A, B)}
            ),
            ("no 'model.transformer.blocks.0.w.weight'", "another"),
        ),
        (
            lambda t: t.update({A: t[A][:0], B: t[B][:, :0].contiguous()}),
            ("has the shape", "not that of a matrix"),
        ),
        (
            lambda t: t.update({A: t[A][None]}),
            ("has the shape", "not that of a matrix"),
        ),
        (
            lambda t: t.update({A: t[A][0].contiguous()}),
            ("has the shape", "not that of a matrix"),
        ),
        (lambda t: t.update({A: t[A].int()}), ("lora_A.weight' is of type I32",)),
        (lambda t: t.update({A: t[A].bool()}), ("lora_A.weight' is of type BOOL",)),
        (lambda t: t.clear(), ("adapter_model.safetensors holds no tensors",)),
        (
            lambda t: t.pop(A),
            ("lora_A and lora_B of 'model.transformer.blocks.0.q_proj'",),
        ),
        (
            lambda t: t.pop(B),
            ("lora_A and lora_B of 'model.transformer.blocks.0.q_proj'",),
        ),
        (lambda t: t.update({B: t[B][:, :2].contiguous()}), ("lora_A and lora_B of",)),
        (
            lambda t: t.update({B: t[B][:9].contiguous()}),
            ("q_proj.weight' and its update differ in shape",),
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_the_model_is_loaded(
    tiny_llada, tmp_path, edit, fragments
):
    file = write_adapter(tmp_path, tiny_llada, LLADA[:1]) / "adapter_model.safetensors"
    edit(tensors := load_file(file))
    save_file(tensors, file)
    refuse_start(tiny_llada, *fragments, lora_path=str(tmp_path))


CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (WEIGHTS, "{}", "is missing or damaged"),
        (WEIGHTS, None, "save_pretrained"),
        (WEIGHTS, POINTER, "safetensors is a Git LFS pointer"),
        (CONFIG, None, "adapter_config.json cannot be read"),
        (CONFIG, "[7]", "adapter_config.json cannot be read"),
        (CONFIG, "[" * 100_000, "adapter_config.json .* too deeply"),
        (CONFIG, POINTER, "_config.json is a Git LFS pointer"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tiny_llada, tmp_path, name, text, message):
    """``text``: what it holds; None: it is missing."""
    write_adapter(tmp_path, tiny_llada, LLADA[:1])
    (tmp_path / name).unlink()
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        LoraAdapter(str(tmp_path))


def test_files_beside_an_adapter_do_not_stop_it(tiny_llada, tmp_path):
    write_adapter(tmp_path, tiny_llada, LLADA[:1])
    for name in ("optimizer.safetensors", "results.json", "tokenizer.json"):
        (tmp_path / name).write_text(POINTER)
    for name in (
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
    ):
        (tmp_path / name).write_text("{")
    os.mkfifo(tmp_path / "log.json")
    assert LoraAdapter(str(tmp_path)).scales.keys() == {f"{LLADA[0]}.weight"}


def test_checkpoints_that_take_no_adapter_are_refused_by_name(tiny_llada, tmp_path):
    adapter = str(write_adapter(tmp_path / "adapter", tiny_llada, LLADA))
    head = str(
        write_adapter(tmp_path / "head", tiny_llada, ["model.transformer.ff_out"])
    )
    said = "lora_path=", " load_format='dummy'"
    refuse_start(tiny_llada, *said, lora_path=adapter, load_format="dummy")
    tied = write("llada", tmp_path / "tied", weight_tying=True)
    refuse_start(tied, "head is its embedding", lora_path=head)
    quantized = {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True}
    quantized["desc_act"] = False
    folder = write("llada", tmp_path, quantization_config=quantized)
    merge = "is quantized; merge the adapter"
    refuse_start(folder, merge, lora_path=adapter, dtype="bfloat16")
