"""What an engine needs of memory is computed before it is loaded; what does not fit is refused with both numbers."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from dllm_engine.checkpoints import RELEASED_CONFIGS, load_config
from dllm_engine.families import family_of
from dllm_engine.memory.activations import RankLoad, activation_bytes
from dllm_engine.memory.deployment import GIB, Deployment, SizingError
from dllm_engine.memory.machine import MachineMemory
from dllm_engine.memory.needs import needs_on_cpu, plan_on_cpu
from dllm_engine.memory.start_up import check_gpu_memory, stored_bytes, weights_on_a_rank
from dllm_engine.memory.weights import weight_bytes
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.methods import methods_for
from dllm_engine.vllm_hooks import engine_config
from examples.quantize import quantize
from tests.support import tiny_checkpoints
from tests.support.engines import start_engine

TABLE = 192 * 64 * 4
"""Bytes of a tiny checkpoint's embeddings, with a padded vocabulary."""
EXTRA = {"page_pool": 7 << 20, "overhead": 3}


def load_of(config, options, ranks=1):
    return RankLoad([config], [101], options, ranks, dtype_bytes=4, rows=512, max_model_len=256)


def deployment_of(model, **settings):
    lengths = {"prompt": 128, "response": 64, "page_pool": GIB}
    return Deployment(model=model, **(lengths | {"options": EngineOptions(cache_method="dual")} | settings))


@pytest.mark.parametrize("model", [model for model in RELEASED_CONFIGS if "LLaDA2" not in model and "30B" not in model])
def test_released_models_fit_24_gib(model):
    """With 2 GiB for the system; SDAR-30B and LLaDA2.0 have more weights. The peak is more than 1.1 times the weights
    and 1.5 GB in no case."""
    *_, method = methods_for(family_of(load_config(model)).attention)
    deployment = partial(deployment_of, options=EngineOptions(cache_method=method))
    _, needs = plan_on_cpu(deployment(model, memory=22 * GIB))
    assert needs.weights + needs.packed + needs.overhead <= 1.1 * needs.weights + 1.5e9 + 0.5e9
    with pytest.raises(SizingError, match=r"needs 1\d\.\dGiB, and the machine has 14\.0GiB: weights 1\d\.\dGiB"):
        plan_on_cpu(deployment(model, memory=14 * GIB))


@pytest.mark.parametrize(
    ("missing", "advice"), [(1, "lower --kv-cache-memory-bytes"), (2 * GIB, "take a machine with more memory")]
)
def test_advice_depends_on_what_is_missing(missing, advice):
    _, needs = plan_on_cpu(deployment_of("GSAI-ML/LLaDA-1.5", memory=24 * GIB))
    with pytest.raises(SizingError, match=advice):
        plan_on_cpu(deployment_of("GSAI-ML/LLaDA-1.5", memory=needs.total - missing))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("is_tied", [False, True])
def test_all_ranks_share_the_memory(tmp_path, is_tied, ranks):
    config = load_config(str(tiny_checkpoints.write_llada(tmp_path, weight_tying=is_tied)))
    needs = needs_on_cpu(load_of(config, EngineOptions(cache_method="dual"), ranks), copies=ranks, **EXTRA)
    assert needs.weights == ranks * 101
    assert needs.packed == max(TABLE, 2 * 112 * 64 * 4)
    assert needs.tied == TABLE * is_tied
    assert (needs.pages, needs.overhead) == (ranks * EXTRA["page_pool"], ranks * EXTRA["overhead"])
    assert needs.activations == ranks * activation_bytes(config, ranks, 4, 512)
    assert needs.total == needs.weights + needs.tied + needs.overhead + needs.pages + needs.activations


def test_experts_of_a_layer_are_packed_together(tiny_llada_moe):
    config = load_config(str(tiny_llada_moe))
    needs = needs_on_cpu(load_of(config, EngineOptions()), copies=1, **EXTRA)
    assert needs.packed == 6 * 2 * 48 * 64 * 4
    assert needs.pages == 0


def test_an_engine_that_does_not_fit_is_refused_before_it_reads_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_config, "machine_memory", lambda: MachineMemory(8 * GIB, GIB + (32 << 20)))
    folder = tiny_checkpoints.write_llada(tmp_path)
    with pytest.raises(
        ValueError, match=r"needs 1\.\dGiB of memory, and 1\.0GiB of 8\.0GiB are available: weights"
    ) as error:
        start_engine(folder, cache_method="dual")
    assert "lower kv_cache_memory_bytes (pages) or max_num_batched_tokens (activations)" in str(error.value)


def test_a_model_that_does_not_fit_a_gpu_is_refused(engines, tiny_llada):
    config = engines(tiny_llada, cache_method="dual").llm_engine.vllm_config
    check_gpu_memory(config, GIB)
    with pytest.raises(ValueError, match=r"leaves 1\.0MiB: weights .*; raise tensor_parallel_size \(now 1\), or"):
        check_gpu_memory(config, 1 << 20)


PER_TOKEN, PER_CHANNEL, HALF = "nvfp4_per_token", "fp8_per_channel_static", torch.bfloat16


@pytest.mark.parametrize("scheme", ["int8", "int4", "unknown"])
def test_a_quantized_checkpoint_counts_as_its_tensors(tiny_dream, tmp_path, scheme):
    """Whether or not its config tells their sizes; in bfloat16, its plain ones take half."""
    folder = quantize(str(tiny_dream), tmp_path / "quantized", "int8" if scheme == "unknown" else scheme)
    tensors = load_file(folder / "model.safetensors").values()
    in_bfloat16 = sum(t.numel() * (2 if t.is_floating_point() else t.element_size()) for t in tensors)
    assert stored_bytes(str(folder), 2) == in_bfloat16
    config = load_config(str(folder))
    if scheme == "unknown":
        config.quantization_config = {"quant_method": "unknown"}
    model = SimpleNamespace(model=folder, dtype=HALF, quantization=scheme, quantization_config=None)
    assert weights_on_a_rank(model, [config], 2) == [in_bfloat16 // 2]
    model.model = "not/here"  # at least four bits each
    assert 0 < weights_on_a_rank(model, [config], 2)[0] < in_bfloat16


@pytest.mark.parametrize(
    ("asked", "of_linear", "of_experts"),
    [
        (None, (1, 4), (1, 4)),
        ({"linear": PER_CHANNEL, "moe": "fp8_per_tensor_static", "targets": None}, (1, 4), (1, 4)),
        ({"linear": PER_CHANNEL, "moe": None, "targets": None}, (1, 4), (2, 0)),
        ({"linear": None, "moe": PER_TOKEN, "targets": None}, (2, 0), (0.5, 2)),
        ({"linear": None, "moe": None, "targets": {"*": PER_TOKEN}}, (0.5, 0), (0.5, 0)),
    ],
)
def test_weights_quantized_at_load_time_count_by_their_bits(tmp_path, asked, of_linear, of_experts):
    """Bytes of a weight and of a scale; what is left as it is has no scales. By module, the least is counted."""
    config = load_config(str(tiny_checkpoints.write_llada_moe(tmp_path)))
    asked = asked and SimpleNamespace(**asked)
    model = SimpleNamespace(model="", dtype=HALF, quantization="fp8_per_tensor", quantization_config=asked)
    linear, experts = (2 * 4 * 64 * 64, 2 * 4 * 64), (2 * 6 * 3 * 48 * 64, 2 * 6 * (2 * 48 + 64))  # weights and scales
    others = weight_bytes(config, 1, 2) - 2 * (linear[0] + experts[0])
    counted = [
        number * size
        for part, sizes in ((linear, of_linear), (experts, of_experts))
        for number, size in zip(part, sizes, strict=True)
    ]
    assert weights_on_a_rank(model, [config], 1) == [others + sum(counted)]


def test_quantized_weights_that_do_not_fit_are_refused(tiny_dream, monkeypatch, tmp_path):
    folder = quantize(str(tiny_dream), tmp_path / "quantized", "int8")
    monkeypatch.setattr(engine_config, "machine_memory", lambda: MachineMemory(8 * GIB, 64 << 20))
    for model, settings in [(folder, {}), (tiny_dream, {"quantization": "fp8_per_channel", "dtype": "bfloat16"})]:
        with pytest.raises(ValueError, match=r"needs 1\.\dGiB of memory, and 64\.0MiB of 8\.0GiB are available"):
            start_engine(model, **settings)
