"""Quantized checkpoints of every family under vLLM's quantization methods."""

from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm_engine.checkpoints import load_config
from dllm_engine.model_bytes import weight_bytes
from dllm_engine.vllm_hooks import refused_settings
from tests.model_executor.models.test_forward import dense_logits
from tests.support import tiny_checkpoints
from tests.support.engines import refuse_start, runner_of
from tests.support.quantized_checkpoints import (
    FOUR_BITS,
    HAS_KERNELS,
    SCHEMES,
    needs_kernels,
    quantize,
    write_rounded,
)

DENSE: dict[str, dict[str, Any]] = {
    "llada": {"include_qkv_bias": True},
    "llada_moe": tiny_checkpoints.ALL_KINDS_OF_EXPERTS | {"moe_layer_freq": [0, 0]},
    "llada2": {"first_k_dense_replace": 2},
    "sdar_moe": {"mlp_only_layers": [0, 1]},
}
"""Experts have no kernels on a CPU without AMX: all layers are dense ones here."""
WIDTHS = ("intermediate_size", "mlp_hidden_size", "dense_intermediate_size")
"""Of dense layers; CPU kernels for four bits take multiples of 32."""
FAMILIES = {
    family: DENSE.get(family, {}) | {key: 128 for key in WIDTHS if key in config}
    for family, config in tiny_checkpoints.CONFIGS.items()
}
IDS = [
    11,
    12,
    13,
    14,
    tiny_checkpoints.MASK,
    15,
    tiny_checkpoints.MASK,
    tiny_checkpoints.MASK,
]
EACH_SCHEME = [
    (family, scheme)
    for family in FAMILIES
    for scheme in (SCHEMES if family in ("llada", "dream") else ("int8", "gptq"))
]


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return {
        family: tiny_checkpoints.write(family, folder / family, **sizes)
        for family, sizes in FAMILIES.items()
    }


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return ((logits.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize(("family", "scheme"), EACH_SCHEME)
def test_logits_are_those_of_the_rounded_weights(
    engines, plain, tmp_path, family, scheme
):
    needs_kernels(scheme)
    quantized = quantize(plain[family], tmp_path / "quantized", scheme)
    rounded = write_rounded(plain[family], tmp_path / "rounded", scheme)
    (actual,) = dense_logits(engines(quantized, dtype="bfloat16"), IDS)
    (expected,) = dense_logits(engines(rounded), IDS)
    # 8 bits also round the inputs of each layer, and without AVX-512 clip sums at 16
    # bits; 4 bits compute in bfloat16, which gives 0.03 on a CPU with AMX. A wrong
    # shard gives about 1.
    most = 0.1 if scheme in FOUR_BITS else 0.2 if HAS_KERNELS else 0.5
    assert distance(actual, expected) < most


@pytest.mark.parametrize(("family", "scheme"), EACH_SCHEME)
def test_the_plan_of_a_quantized_checkpoint_counts_the_bytes_of_its_tensors(
    plain, tmp_path, family, scheme
):
    quantized = quantize(plain[family], tmp_path / "quantized", scheme)
    config = load_config(str(quantized))
    tensors = load_file(quantized / "model.safetensors").items()
    matrices = 1 if config.tie_word_embeddings else 2
    padding = matrices * (192 - tiny_checkpoints.VOCAB_SIZE) * 64 * 4
    kept = sum(
        tensor.nbytes
        for name, tensor in tensors
        if not name.endswith(("weight_shape", "g_idx"))
    )
    assert weight_bytes(config, 1, 4) == kept + padding


@pytest.mark.parametrize(
    ("family", "names"),
    [
        (
            "llada",
            [
                "re:.*attn_out$",
                "model.transformer.blocks.1.ff_proj",
                "model.transformer.blocks.1.up_proj",
            ],
        ),
        (
            "dream",
            [
                "re:.*o_proj$",
                "model.layers.1.mlp.gate_proj",
                "model.layers.1.mlp.up_proj",
            ],
        ),
    ],
)
def test_modules_to_leave_as_they_are_go_by_the_released_names(
    engines, plain, tmp_path, family, names
):
    """Two of them by their names, which are one layer of ours, and one by a regular
    expression.
    """
    needs_kernels("int4")
    quantized = quantize(plain[family], tmp_path / "quantized", "int4", ignore=names)
    llm = engines(quantized, dtype="bfloat16")
    is_packed = [
        [
            hasattr(module, "weight_packed")
            for module in (layer.qkv_proj, layer.out_proj, *layer.mlp.children())
        ]
        for layer in cast(Any, runner_of(llm).model.layers)
    ]
    assert is_packed == [[True, False, True, True], [True, False, False, True]]
    assert isinstance(dense_logits(llm, IDS)[0], torch.Tensor)


def test_weights_become_fp8_while_they_load(engines, plain):
    llm = engines(plain["llada"], dtype="bfloat16", quantization="fp8_per_channel")
    (expected,) = dense_logits(engines(plain["llada"]), IDS)
    layer: Any = runner_of(llm).model.layers[0]
    assert layer.mlp.down_proj.weight.dtype == torch.float8_e4m3fn
    assert distance(dense_logits(llm, IDS)[0], expected) < 0.3


def test_four_bits_without_kernels_are_refused(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(refused_settings, "FOUR_BITS", "missing")
    for scheme in FOUR_BITS:
        refuse_start(
            quantize(plain["dream"], tmp_path / scheme, scheme),
            "quantization=",
            "need AVX-512",
            dtype="bfloat16",
        )


SCALES = [
    ("int8", "weight_scale"),
    ("int4", "weight_scale"),
    ("gptq", "qzeros"),
    ("awq", "scales"),
]


@pytest.mark.parametrize(("scheme", "kind"), [*SCALES, ("gptq", "g_idx")])
def test_missing_scales_and_groups_out_of_order_are_named(
    plain, tmp_path, scheme, kind
):
    """Groups by GPTQ's ``desc_act``, which the config does not tell of."""
    needs_kernels(scheme)
    quantized = quantize(plain["llada"], tmp_path / "quantized", scheme)
    tensors = load_file(quantized / "model.safetensors")
    name = f"model.transformer.blocks.1.k_proj.{kind}"
    tensor = tensors.pop(name)
    fragments = (f"layers.1.qkv_proj.{kind}[k]", "lacks 1 tensor")
    if kind == "g_idx":
        tensors[name], fragments = tensor.flip(0).contiguous(), (name, "desc_act")
    save_file(tensors, quantized / "model.safetensors")
    refuse_start(quantized, *fragments, dtype="bfloat16")


@pytest.mark.parametrize("at_load_time", [False, True])
@pytest.mark.parametrize("family", ["llada_moe", "sdar_moe", "llada2"])
def test_experts_may_be_left_as_they_are(
    engines, request, tmp_path, family, at_load_time
):
    settings = {}
    plain_model = request.getfixturevalue(f"tiny_{family}")
    model = plain_model
    if at_load_time:
        settings = {
            "quantization": "online",
            "quantization_config": {"linear": "fp8_per_channel"},
        }
    else:
        model = quantize(
            model,
            tmp_path / "quantized",
            "int8",
            ignore=["re:.*mlp.experts", "re:.*shared_expert"],
        )
    llm = engines(model, dtype="bfloat16", **settings)
    (expected,) = dense_logits(engines(plain_model), IDS)
    layer: Any = runner_of(llm).model.layers[1]
    assert type(layer.out_proj.quant_method).__name__ != "UnquantizedLinearMethod"
    assert distance(dense_logits(llm, IDS)[0], expected) < 0.3
