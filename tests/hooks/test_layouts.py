"""Ways to split a model or its work that diffusion engines do not have are refused by name, with what to use."""

import pytest
from vllm.config import KVEventsConfig

from dllm_engine.vllm_hooks.engine_config import DiffusionEngineConfig
from tests.support.engines import runner_of, start_engine


@pytest.mark.parametrize(
    ("settings", "named", "instead"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size", "tensor_parallel_size"),
        ({"decode_context_parallel_size": 2, "tensor_parallel_size": 2}, "decode_context_parallel_size", "tensor_par"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size", "tensor_parallel_size"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel", "models with experts, on GPUs"),
        ({"enable_batch_sharded_sampling": True}, "enable_batch_sharded_sampling", "leave it unset"),
        ({"enable_dbo": True}, "enable_dbo", "leave it unset"),
        ({"ubatch_size": 2}, "ubatch_size", "leave it unset"),
        ({"cpu_offload_gb": 1}, "cpu_offload_gb", "tensor_parallel_size"),
        ({"offload_group_size": 2}, "offload_group_size", "tensor_parallel_size"),
        ({"enable_lora": True}, "enable_lora", "name its folder as lora_path"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds", "leave it unset"),
        ({"kv_events_config": KVEventsConfig(enable_kv_cache_events=True)}, "kv_events_config", "leave it unset"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_layout_that_is_not_supported_is_refused(tiny_llada, settings, named, instead):
    with pytest.raises(ValueError) as error:
        start_engine(tiny_llada, **settings)
    assert f"{named} is not supported for diffusion models" in str(error.value)
    assert instead in str(error.value)


@pytest.mark.parametrize(("name", "value"), [("data_parallel_size", 2), ("enable_eplb", True)])
def test_what_vllm_itself_refuses_elsewhere_is_refused_with_experts(engines, tiny_llada_moe, monkeypatch, name, value):
    """Before this hook, for a CPU or for ``LLM``; not for a server on GPUs. Nor do ranks of a CPU share experts."""
    with pytest.raises(ValueError, match=r"enable_expert_parallel is not supported .* models with experts, on GPUs"):
        start_engine(tiny_llada_moe, enable_expert_parallel=True, tensor_parallel_size=2)
    config = runner_of(engines(tiny_llada_moe)).vllm_config
    monkeypatch.setattr(config.parallel_config, name, value)
    with pytest.raises(ValueError, match=f"{name} is not supported for diffusion models"):
        DiffusionEngineConfig.verify_and_update_config(config)


@pytest.mark.parametrize("size", [3, 8])
def test_ranks_that_do_not_share_the_heads_evenly_are_refused(tiny_llada, size):
    """Four heads."""
    with pytest.raises(ValueError, match=rf"tensor.parallel.size.*{size}|{size}.*tensor.parallel.size"):
        start_engine(tiny_llada, tensor_parallel_size=size)
