"""What an engine needs of memory is computed before it is loaded; what does not fit is refused with both numbers."""

from functools import partial

import pytest

from dllm_engine.checkpoints import RELEASED_CONFIGS, load_config
from dllm_engine.families import family_of
from dllm_engine.memory.machine import MachineMemory
from dllm_engine.memory.needs import needs_on_cpu, plan_on_cpu
from dllm_engine.memory.start_up import check_gpu_memory
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.methods import methods_for
from dllm_engine.sizing import GIB, Deployment, SizingError, activation_bytes, weight_bytes
from dllm_engine.vllm_hooks import engine_config
from tests.support import tiny_checkpoints
from tests.support.engines import start_engine

TABLE = 192 * 64 * 4
"""Bytes of a tiny checkpoint's embeddings, with a padded vocabulary."""
SIZES = {"dtype_bytes": 4, "rows": 512, "max_model_len": 256, "page_pool": 7 << 20, "overhead": 3}


def deployment_of(model, **settings):
    lengths = {"prompt": 128, "response": 64, "page_pool": GIB}
    return Deployment(model=model, **(lengths | {"options": EngineOptions(cache_method="dual")} | settings))


@pytest.mark.parametrize("model", [model for model in RELEASED_CONFIGS if "LLaDA2" not in model])
def test_released_models_fit_24_gib(model):
    """With 2 GiB for the system; LLaDA2.0 has 30 GiB of weights. The peak is more than 1.1 times the weights and 1.5 GB
    in no case."""
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
    needs = needs_on_cpu([config], EngineOptions(cache_method="dual"), ranks=ranks, **SIZES)
    assert needs.weights == ranks * weight_bytes(config, ranks, 4)
    assert needs.packed == max(TABLE, 2 * 112 * 64 * 4)
    assert needs.tied == TABLE * is_tied
    assert (needs.pages, needs.overhead) == (ranks * SIZES["page_pool"], ranks * SIZES["overhead"])
    assert needs.activations == ranks * activation_bytes(config, ranks, 4, 512)
    assert needs.total == needs.weights + needs.tied + needs.overhead + needs.pages + needs.activations


def test_experts_of_a_layer_are_packed_together(tiny_llada_moe):
    config = load_config(str(tiny_llada_moe))
    needs = needs_on_cpu([config], EngineOptions(), ranks=1, **SIZES)
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
