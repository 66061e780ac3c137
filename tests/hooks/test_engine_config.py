"""Settings of vLLM that are not honoured are refused by name and value. Defaults of
requests come from ``generation_config.json`` and ``override_generation_config``."""

import json

import pytest
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.engine.arg_utils import EngineArgs

from dllm_engine.plugin import register
from dllm_engine.vllm_hooks import engine_config
from dllm_engine.vllm_hooks.engine_config import (
    DiffusionEngineConfig,
    left_out_defaults,
)
from tests.support import tiny_checkpoints
from tests.support.engines import runner_of, scheduler_of, start_engine
from tests.support.http_app import refusal, served

REFUSED = {
    "leave it unset": {
        "enable_batch_sharded_sampling": True,
        "enable_dbo": True,
        "ubatch_size": 2,
        "enable_hc_sp": True,
        "scheduler_reserve_full_isl": False,
        "prefill_schedule_interval": 2,
        "kv_cache_dtype_skip_layers": ["0"],
        "kv_sharing_fast_prefill": True,
        "kv_offloading_size": 1.0,
        "logits_processors": ["a:B"],
        "use_fp64_gumbel": True,
        "enable_prompt_embeds": True,
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True),
        "scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler",
    },
    "tensor_parallel_size": {
        "pipeline_parallel_size": 2,
        "prefill_context_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "cpu_offload_gb": 1,
        "offload_group_size": 2,
    },
    "refresh_ratio": {
        "long_prefill_token_threshold": 64,
        "long_prefill_token_threshold_adaptive": True,
    },
    "page_size": {"block_size": 64, "prefix_match_unit": 16},
    "models with experts, on GPUs": {"enable_expert_parallel": True},
    "steps_per_dispatch": {"async_scheduling": True},
    "reserves all pages of a request at admission": {"watermark": 0.1},
    "the model's dtype": {"kv_cache_dtype": "fp8"},
    "dense_attention": {"attention_backend": "FLASH_ATTN"},
    "unmasking step": {"logprobs_mode": "raw_logits"},
    "name its folder as lora_path": {"enable_lora": True},
}
OTHERS = {"decode_context_parallel_size": {"tensor_parallel_size": 2}}
"""Without it, vLLM itself refuses the setting."""


@pytest.mark.parametrize(
    ("instead", "name", "value"),
    [
        (instead, *setting)
        for instead, settings in REFUSED.items()
        for setting in settings.items()
    ],
    ids=str,
)
def test_a_setting_that_is_not_honoured_is_refused(tiny_llada, instead, name, value):
    with pytest.raises(ValueError) as error:
        start_engine(tiny_llada, **{name: value}, **OTHERS.get(name, {}))
    (message,) = [
        line
        for line in str(error.value).splitlines()
        if "not supported for diffusion models" in line
    ]
    shown = (
        ""
        if name in ("enable_lora", "attention_backend", "kv_events_config")
        else repr(value)[:9]
    )
    assert f"{name}={shown}" in message
    assert instead in message


def test_settings_that_say_what_holds_anyway_are_accepted(tiny_llada):
    start_engine(
        tiny_llada,
        page_size=16,
        block_size=16,
        async_scheduling=False,
        enable_batch_sharded_sampling=False,
    )


def test_a_watermark_is_for_methods_whose_pages_come_as_blocks_come(tiny_sdar):
    assert scheduler_of(start_engine(tiny_sdar, watermark=0.1)).tables.watermark > 0


def test_a_limit_of_scheduled_tokens_is_the_row_budget(tiny_llada):
    llm = start_engine(tiny_llada, max_num_scheduled_tokens=300)
    assert (
        llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
        == scheduler_of(llm).max_rows
        == 300
    )
    with pytest.raises(
        ValueError,
        match=r"max_num_scheduled_tokens=255 is less than the 256 .* lower max_model_len",
    ):
        start_engine(tiny_llada, max_num_scheduled_tokens=255)


@pytest.mark.parametrize(
    ("name", "value"), [("data_parallel_size", 2), ("enable_eplb", True)]
)
def test_what_vllm_itself_refuses_elsewhere_is_refused_with_experts(
    engines, tiny_llada_moe, monkeypatch, name, value
):
    """Before this hook, for a CPU or for ``LLM``; not for a server on GPUs. Nor do
    ranks of a CPU share experts.
    """
    with pytest.raises(
        ValueError,
        match=r"enable_expert_parallel=True is not .* models with experts, on GPUs",
    ):
        start_engine(
            tiny_llada_moe, enable_expert_parallel=True, tensor_parallel_size=2
        )
    config = runner_of(engines(tiny_llada_moe)).vllm_config
    monkeypatch.setattr(config.parallel_config, name, value)
    with pytest.raises(
        ValueError, match=f"{name}={value} is not supported for diffusion models"
    ):
        DiffusionEngineConfig.verify_and_update_config(config)


@pytest.mark.parametrize("size", [3, 8])
def test_ranks_that_do_not_share_the_heads_evenly_are_refused(tiny_llada, size):
    """Four heads."""
    with pytest.raises(
        ValueError, match=rf"tensor.parallel.size.*{size}|{size}.*tensor.parallel.size"
    ):
        start_engine(tiny_llada, tensor_parallel_size=size)


QWEN = {
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "min_p": 0.05,
}
USED = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoints.write("llada", tmp_path_factory.mktemp("generation"))


@pytest.fixture
def configured(folder):
    def configure(content, **settings):
        register()
        (folder / "generation_config.json").write_text(json.dumps(content))
        return EngineArgs(
            str(folder), skip_tokenizer_init=True, **settings
        ).create_model_config()

    return configure


@pytest.mark.parametrize(
    ("stated", "left_out"),
    [
        *[
            ({name: 0.1}, [f"{name}=0.1"])
            for name in ("repetition_penalty", "presence_penalty", "min_p")
        ],
        ({"repetition_penalty": 1.0, "min_p": 0.0, "eos_token_id": [1, 2]}, []),
    ],
)
def test_what_a_file_brings_and_is_not_supported_is_left_out_and_named(
    configured, stated, left_out
):
    model_config = configured(USED | stated)
    assert left_out_defaults(model_config) == left_out
    assert model_config.get_diff_sampling_param() == USED | {"max_tokens": 256}
    assert left_out_defaults(configured(USED | stated, generation_config="vllm")) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            {"repetition_penalty": 1.05},
            "repetition_penalty=1.05: penalties are not supported",
        ),
        ({"temprature": 0.5}, r"takes no 'temprature'.*'?temperature"),
        ({"eos_token_id": 7}, "takes no 'eos_token_id'"),
    ],
    ids=str,
)
def test_an_override_that_is_not_supported_is_refused_by_name(
    configured, override, message
):
    with pytest.raises(ValueError, match=f"override_generation_config.*{message}"):
        configured({}, override_generation_config=override)


def test_an_override_of_neutral_values_is_none(configured):
    override = {
        "repetition_penalty": 1.0,
        "min_p": 0.0,
        "frequency_penalty": 0,
        "temperature": None,
        "top_p": 0.9,
    }
    model_config = configured(USED, override_generation_config=override)
    assert model_config.get_diff_sampling_param() == USED | {
        "top_p": 0.9,
        "max_tokens": 256,
    }


def test_an_engine_of_such_a_file_answers_and_says_once_what_it_leaves_out(
    folder, lines_of
):
    (folder / "generation_config.json").write_text(json.dumps(QWEN))
    warnings = lines_of(engine_config.logger, "warning")
    llm = start_engine(folder)
    (warning,) = [text for text in warnings if "left out" in text]
    assert "repetition_penalty=1.05, min_p=0.05" in warning
    prompt = {"prompt_token_ids": [3, 1, 4]}
    for params in (
        None,
        SamplingParams(max_tokens=4),
        llm.get_default_sampling_params(),
    ):
        assert llm.generate(prompt, params)
    body = {"model": str(folder), "prompt": [3, 1, 4], "max_tokens": 4}
    ask = served(llm).post
    assert ask("/v1/completions", json=body).status_code == 200
    refused = ask("/v1/completions", json=body | {"repetition_penalty": 1.05})
    assert "repetition_penalty=1.05" in refusal(refused)
