"""Settings of vLLM that diffusion engines do not honour. They are refused by name; vLLM would ignore most of them."""

import reprlib
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dllm_engine.families import family_of
from dllm_engine.options import EngineOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SCHEDULER_CLASS = "dllm_engine.scheduler.diffusion_scheduler.DiffusionScheduler"

_UNSET = "leave it unset"
_PAGES = "page_size sets how many tokens a page has"
_USE_TENSORS = "use tensor_parallel_size to split a model over GPUs, data_parallel_size for more requests"

REFUSED = (
    ("parallel_config", "pipeline_parallel_size decode_context_parallel_size", _USE_TENSORS),
    ("parallel_config", "prefill_context_parallel_size", _USE_TENSORS),
    ("parallel_config", "enable_expert_parallel", f"it is for models with experts, on GPUs; {_USE_TENSORS}"),
    ("parallel_config", "data_parallel_size", "start one server for each"),
    ("parallel_config", "enable_eplb enable_batch_sharded_sampling enable_dbo ubatch_size", _UNSET),
    ("parallel_config", "enable_ep_weight_filter enable_hc_sp enable_elastic_ep enable_fault_tolerance", _UNSET),
    (
        "scheduler_config",
        "long_prefill_token_threshold long_prefill_token_threshold_adaptive",
        "refresh_ratio limits how long requests hold up short ones",
    ),
    ("scheduler_config", "scheduler_cls", "cache_method chooses what a step computes; leave it unset"),
    ("scheduler_config", "async_scheduling", "steps_per_dispatch runs several steps without the scheduler"),
    ("scheduler_config", "scheduler_reserve_full_isl prefill_schedule_interval", _UNSET),
    ("scheduler_config", "watermark", f"this cache method reserves all pages of a request at admission; {_UNSET}"),
    ("cache_config", "block_size", _PAGES),
    ("cache_config", "prefix_match_unit", f"prefixes are shared by pages; {_PAGES}"),
    ("cache_config", "cache_dtype", f"pages have the model's dtype; {_UNSET}"),
    ("cache_config", "kv_cache_dtype_skip_layers kv_sharing_fast_prefill kv_offloading_size", _UNSET),
    ("model_config", "enable_prompt_embeds return_sampling_mask enable_trace_replay", _UNSET),
    ("model_config", "logits_processors use_fp64_gumbel", _UNSET),
    ("model_config", "logprobs_mode", f"log-probabilities are those of the unmasking step; {_UNSET}"),
    ("offload_config.uva", "cpu_offload_gb", _USE_TENSORS),
    ("offload_config.prefetch", "offload_group_size", _USE_TENSORS),
    ("attention_config", "backend", "dense_attention chooses the library"),
    ("aux_output_config", "enable_return_routed_experts", _UNSET),
    ("", "lora_config", "an adapter serves all requests of an engine: name its folder as lora_path"),
    ("", "speculative_config kv_transfer_config kv_events_config ec_transfer_config", _UNSET),
    ("", "watermark_config diffusion_config", _UNSET),
)
"""Each with its place in a ``VllmConfig``, names of settings there, and what to do instead."""
_OPTIONS = {"cache_dtype": "kv_cache_dtype", "backend": "attention_backend", "lora_config": "enable_lora"}
"""Names for users of settings that have another name."""


def _is_other_expert_parallel(config: "VllmConfig") -> bool:
    """vLLM's experts for CPUs do not ask which of them a rank holds, and read beyond them."""
    from vllm.platforms import current_platform

    return not config.model_config.is_moe or current_platform.is_cpu()


def _is_other_page_size(config: "VllmConfig") -> bool:
    cache = config.cache_config
    return cache.user_specified_block_size and cache.block_size != EngineOptions.from_vllm_config(config).page_size


def _is_other_dtype(config: "VllmConfig") -> bool:
    """Other than vLLM's default, which a quantized checkpoint may state."""
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    return config.cache_config.cache_dtype != resolve_kv_cache_dtype_string("auto", config.model_config)


def _reserves_pages_at_once(config: "VllmConfig") -> bool:
    family, options = family_of(config.model_config.hf_config), EngineOptions.from_vllm_config(config)
    return not options.with_paper_settings(config.model_config.model, family).method.keeps_for_good


_REFUSED_IF: dict[str, Callable[["VllmConfig"], bool]] = {
    "enable_expert_parallel": _is_other_expert_parallel,
    # With experts, its ranks would wait for each other in every step, also those without requests.
    "data_parallel_size": lambda config: config.model_config.is_moe,
    "scheduler_cls": lambda config: config.scheduler_config.scheduler_cls != SCHEDULER_CLASS,
    "watermark": _reserves_pages_at_once,
    "block_size": _is_other_page_size,
    "cache_dtype": _is_other_dtype,
}
"""Settings that are refused under a condition."""


def refuse_unsupported(vllm_config: "VllmConfig") -> None:
    """Raise ``ValueError`` for a setting that has another value than vLLM's default."""
    for place, names, instead in REFUSED:
        owner = attrgetter(place)(vllm_config) if place else vllm_config
        for name in names.split():
            value = getattr(owner, name)
            if not _is_default(owner, name, value) and _REFUSED_IF.get(name, lambda config: True)(vllm_config):
                shown = f"{_OPTIONS.get(name, name)}={reprlib.repr(value)}"
                raise ValueError(f"{shown} is not supported for diffusion models; {instead}")


def _is_default(config: Any, name: str, value: Any) -> bool:
    """Return True if a field of a config has its default, or is turned off and is off by default."""
    default = type(config).__pydantic_fields__[name].get_default(call_default_factory=True)
    return value == default or not (value or default)
