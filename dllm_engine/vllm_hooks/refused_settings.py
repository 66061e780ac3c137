"""Settings of vLLM that diffusion engines do not support. They are refused by name,
because most of them would have no effect.
"""

import reprlib
from operator import attrgetter
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

from dllm_engine.model_executor.models.quantization import Quantization
from dllm_engine.options import EngineOptions

FOUR_BITS = "cpu_gemm_wna16"
"""vLLM's operator for 4-bit weights on a CPU."""
SCHEDULER_CLASS = "dllm_engine.scheduler.diffusion_scheduler.DiffusionScheduler"

_UNSET = "leave it unset"
_PAGES = "page_size sets how many tokens a page has"
_REFRESHES = "refresh_ratio limits how long requests hold up short ones"
_USE_TENSORS = (
    "use tensor_parallel_size to split a model over GPUs, data_parallel_size for more "
    "requests"
)

REFUSED = (
    (
        "parallel_config",
        "pipeline_parallel_size decode_context_parallel_size",
        _USE_TENSORS,
    ),
    ("parallel_config", "prefill_context_parallel_size", _USE_TENSORS),
    (
        "parallel_config",
        "enable_expert_parallel",
        f"it is for models with experts, on GPUs; {_USE_TENSORS}",
    ),
    ("parallel_config", "data_parallel_size", "start one server for each"),
    (
        "parallel_config",
        "enable_eplb enable_batch_sharded_sampling enable_dbo ubatch_size",
        _UNSET,
    ),
    (
        "parallel_config",
        "enable_ep_weight_filter enable_hc_sp enable_elastic_ep enable_fault_tolerance",
        _UNSET,
    ),
    (
        "scheduler_config",
        "long_prefill_token_threshold long_prefill_token_threshold_adaptive",
        _REFRESHES,
    ),
    (
        "scheduler_config",
        "scheduler_cls",
        "cache_method chooses what a step computes; leave it unset",
    ),
    (
        "scheduler_config",
        "async_scheduling",
        "steps_per_dispatch runs several steps without the scheduler",
    ),
    (
        "scheduler_config",
        "scheduler_reserve_full_isl prefill_schedule_interval",
        _UNSET,
    ),
    (
        "scheduler_config",
        "watermark",
        f"this cache method reserves all pages of a request at admission; {_UNSET}",
    ),
    ("cache_config", "block_size", _PAGES),
    ("cache_config", "prefix_match_unit", f"prefixes are shared by pages; {_PAGES}"),
    ("cache_config", "cache_dtype", f"pages have the model's dtype; {_UNSET}"),
    (
        "cache_config",
        "kv_cache_dtype_skip_layers kv_sharing_fast_prefill kv_offloading_size",
        _UNSET,
    ),
    (
        "model_config",
        "enable_prompt_embeds return_sampling_mask enable_trace_replay",
        _UNSET,
    ),
    (
        "model_config",
        "quantization",
        "vLLM's CPU kernels for 4 bits need AVX-512; take 8 bits, or another machine",
    ),
    ("model_config", "logits_processors use_fp64_gumbel", _UNSET),
    (
        "model_config",
        "logprobs_mode",
        f"log-probabilities are those of the unmasking step; {_UNSET}",
    ),
    ("offload_config.uva", "cpu_offload_gb", _USE_TENSORS),
    ("offload_config.prefetch", "offload_group_size", _USE_TENSORS),
    ("attention_config", "backend", "dense_attention chooses the library"),
    ("aux_output_config", "enable_return_routed_experts", _UNSET),
    (
        "",
        "lora_config",
        "an adapter serves all requests of an engine: name its folder as lora_path",
    ),
    (
        "",
        "speculative_config kv_transfer_config kv_events_config ec_transfer_config",
        _UNSET,
    ),
    ("", "watermark_config diffusion_config", _UNSET),
)
"""Refused settings: place in a ``VllmConfig``, names of settings there, and what to do
instead.
"""
_OPTIONS = {
    "cache_dtype": "kv_cache_dtype",
    "backend": "attention_backend",
    "lora_config": "enable_lora",
}
"""Names that users know, for settings with another name in the config."""


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raise ``ValueError`` for an unsupported setting that differs from vLLM's default."""
    for place, names, instead in REFUSED:
        owner = attrgetter(place)(vllm_config) if place else vllm_config
        for name in names.split():
            value = getattr(owner, name)
            if not _is_default(owner, name, value) and not _is_honoured(
                name, vllm_config
            ):
                setting = f"{_OPTIONS.get(name, name)}={reprlib.repr(value)}"
                raise ValueError(
                    f"{setting} is not supported for diffusion models; {instead}"
                )


def _is_default(config: Any, name: str, value: Any) -> bool:
    """Return True if a field of a config has its default value, or is turned off like
    its default.
    """
    default = (
        type(config).__pydantic_fields__[name].get_default(call_default_factory=True)
    )
    return value == default or not (value or default)


def _is_honoured(name: str, config: VllmConfig) -> bool:
    """Return True if this engine supports the value of a setting although it is not
    vLLM's default.
    """
    model, cache, options = (
        config.model_config,
        config.cache_config,
        EngineOptions.from_vllm_config(config),
    )
    match name:
        case "enable_expert_parallel":
            # vLLM's experts for CPUs ignore which experts a rank holds, and would read
            # beyond them.
            return model.is_moe and not current_platform.is_cpu()
        case "data_parallel_size":
            # With experts, data-parallel ranks would wait for each other in every step,
            # even ranks without requests.
            return not model.is_moe
        case "scheduler_cls":
            return config.scheduler_config.scheduler_cls == SCHEDULER_CLASS
        case "watermark":
            return options.with_paper_settings(
                model.model, model.hf_config.family
            ).method.keeps_for_good
        case "block_size":
            return (
                not cache.user_specified_block_size
                or cache.block_size == options.page_size
            )
        case "quantization":
            current_platform.import_kernels()
            stored = Quantization.of(model.hf_config)
            has_kernels = not current_platform.is_cpu() or hasattr(
                torch.ops._C, FOUR_BITS
            )
            return has_kernels or stored is None or stored.bits != 4
        case "cache_dtype":  # a quantized checkpoint may state another default
            return cache.cache_dtype == resolve_kv_cache_dtype_string("auto", model)
    return False
