"""Engines whose weights do not fit are refused before they are read."""

import pytest

from dllm_engine.memory import start_up
from dllm_engine.memory.capacity import GIB
from dllm_engine.memory.start_up import check_gpu_memory
from examples.quantize import quantize
from tests.support.engines import start_engine


def test_a_model_that_does_not_fit_a_gpu_is_refused(engines, tiny_llada):
    config = engines(tiny_llada, cache_method="dual").llm_engine.vllm_config
    check_gpu_memory(config, GIB)
    with pytest.raises(ValueError, match=r"leaves 128B; raise it or tensor_parallel_size \(now 1\), or take"):
        check_gpu_memory(config, 128)


def test_a_model_that_does_not_fit_the_machine_is_refused(tiny_dream, monkeypatch, tmp_path):
    quantized = quantize(str(tiny_dream), tmp_path / "quantized", "int8")
    monkeypatch.setattr(start_up, "available_memory", lambda: 64 << 20)
    at_load_time = {"quantization": "fp8_per_channel", "dtype": "bfloat16"}
    for model, settings in [(tiny_dream, {}), (quantized, {}), (tiny_dream, at_load_time)]:
        with pytest.raises(ValueError, match=r"needs .*MiB of memory \(.*\), and 64\.0MiB are available"):
            start_engine(model, **settings)


def test_a_containers_limit_counts(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("400000")
    monkeypatch.setattr(start_up, "CGROUP", tmp_path)
    assert start_up.available_memory() == 600_000
    (tmp_path / "memory.max").write_text("max")
    assert start_up.available_memory() > 1_000_000
