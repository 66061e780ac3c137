"""Settings of vLLM that diffusion engines do not honour are refused by name and value, with what to use."""

import pytest
from vllm.config import KVEventsConfig

from dllm_engine.vllm_hooks.engine_config import DiffusionEngineConfig
from tests.support.engines import runner_of, scheduler_of, start_engine

REFUSED = {
    "leave it unset": {
        "enable_batch_sharded_sampling": True, "enable_dbo": True, "ubatch_size": 2, "enable_hc_sp": True,
        "scheduler_reserve_full_isl": False, "prefill_schedule_interval": 2, "kv_cache_dtype_skip_layers": ["0"],
        "kv_sharing_fast_prefill": True, "kv_offloading_size": 1.0, "logits_processors": ["a:B"],
        "use_fp64_gumbel": True, "enable_prompt_embeds": True,
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True),
        "scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler",
    },
    "tensor_parallel_size": {
        "pipeline_parallel_size": 2, "prefill_context_parallel_size": 2, "decode_context_parallel_size": 2,
        "cpu_offload_gb": 1, "offload_group_size": 2,
    },
    "refresh_ratio": {"long_prefill_token_threshold": 64, "long_prefill_token_threshold_adaptive": True},
    "page_size": {"block_size": 64, "prefix_match_unit": 16},
    "models with experts, on GPUs": {"enable_expert_parallel": True},
    "steps_per_dispatch": {"async_scheduling": True},
    "reserves all pages of a request at admission": {"watermark": 0.1},
    "the model's dtype": {"kv_cache_dtype": "fp8"},
    "dense_attention": {"attention_backend": "FLASH_ATTN"},
    "unmasking step": {"logprobs_mode": "raw_logits"},
    "name its folder as lora_path": {"enable_lora": True},
}  # fmt: skip
OTHERS = {"decode_context_parallel_size": {"tensor_parallel_size": 2}}
"""Without it, vLLM itself refuses the setting."""


@pytest.mark.parametrize(
    ("instead", "name", "value"),
    [(instead, *setting) for instead, settings in REFUSED.items() for setting in settings.items()],
    ids=str,
)
def test_a_setting_that_is_not_honoured_is_refused(tiny_llada, instead, name, value):
    with pytest.raises(ValueError) as error:
        start_engine(tiny_llada, **{name: value}, **OTHERS.get(name, {}))
    (message,) = [line for line in str(error.value).splitlines() if "not supported for diffusion models" in line]
    shown = "" if name in ("enable_lora", "attention_backend", "kv_events_config") else repr(value)[:9]
    assert f"{name}={shown}" in message
    assert instead in message


def test_settings_that_say_what_holds_anyway_are_accepted(tiny_llada):
    start_engine(tiny_llada, page_size=16, block_size=16, async_scheduling=False, enable_batch_sharded_sampling=False)


def test_a_watermark_is_for_methods_whose_pages_come_as_blocks_come(tiny_sdar):
    assert scheduler_of(start_engine(tiny_sdar, watermark=0.1)).watermark > 0


def test_a_limit_of_scheduled_tokens_is_the_row_budget(tiny_llada):
    llm = start_engine(tiny_llada, max_num_scheduled_tokens=300)
    assert llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens == scheduler_of(llm).max_rows == 300
    with pytest.raises(
        ValueError, match=r"max_num_scheduled_tokens=255 is less than the 256 rows .* lower max_model_len"
    ):
        start_engine(tiny_llada, max_num_scheduled_tokens=255)


@pytest.mark.parametrize(("name", "value"), [("data_parallel_size", 2), ("enable_eplb", True)])
def test_what_vllm_itself_refuses_elsewhere_is_refused_with_experts(engines, tiny_llada_moe, monkeypatch, name, value):
    """Before this hook, for a CPU or for ``LLM``; not for a server on GPUs. Nor do ranks of a CPU share experts."""
    with pytest.raises(
        ValueError, match=r"enable_expert_parallel=True is not supported .* models with experts, on GPUs"
    ):
        start_engine(tiny_llada_moe, enable_expert_parallel=True, tensor_parallel_size=2)
    config = runner_of(engines(tiny_llada_moe)).vllm_config
    monkeypatch.setattr(config.parallel_config, name, value)
    with pytest.raises(ValueError, match=f"{name}={value} is not supported for diffusion models"):
        DiffusionEngineConfig.verify_and_update_config(config)


@pytest.mark.parametrize("size", [3, 8])
def test_ranks_that_do_not_share_the_heads_evenly_are_refused(tiny_llada, size):
    """Four heads."""
    with pytest.raises(ValueError, match=rf"tensor.parallel.size.*{size}|{size}.*tensor.parallel.size"):
        start_engine(tiny_llada, tensor_parallel_size=size)
