"""Settings of vLLM that diffusion engines do not honour. They are refused by name; vLLM would ignore most of them."""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SCHEDULER_CLASS = "dllm_engine.scheduler.diffusion_scheduler.DiffusionScheduler"

_UNSET = "leave it unset"
_USE_TENSORS = "use tensor_parallel_size to split a model over GPUs, data_parallel_size for more requests"


@dataclass(frozen=True)
class Refused:
    """Settings of one of vLLM's configs that must keep their defaults."""

    place: str
    """Place of the config in a ``VllmConfig``; empty: the config itself."""
    names: str
    """Separated by spaces."""
    instead: str = _UNSET
    option: str | None = None
    """Name of the setting for users, if it has another name."""
    when: Callable[["VllmConfig"], bool] = lambda config: True
    """Refused only then."""


def _without_experts_or_gpu(config: "VllmConfig") -> bool:
    from vllm.platforms import current_platform

    return not config.model_config.is_moe or current_platform.is_cpu()


def _with_other_pages(config: "VllmConfig") -> bool:
    from dllm_engine.options import EngineOptions

    cache = config.cache_config
    return cache.user_specified_block_size and cache.block_size != EngineOptions.from_vllm_config(config).page_size


def _with_other_dtype(config: "VllmConfig") -> bool:
    """Other than vLLM's default, which a quantized checkpoint may state."""
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    return config.cache_config.cache_dtype != resolve_kv_cache_dtype_string("auto", config.model_config)


def _with_pages_reserved_at_once(config: "VllmConfig") -> bool:
    from dllm_engine.families import family_of
    from dllm_engine.options import EngineOptions

    family, options = family_of(config.model_config.hf_config), EngineOptions.from_vllm_config(config)
    return not options.with_paper_settings(config.model_config.model, family).method.keeps_for_good


REFUSED = (
    Refused(
        "parallel_config",
        "pipeline_parallel_size decode_context_parallel_size prefill_context_parallel_size",
        _USE_TENSORS,
    ),
    # vLLM's experts for CPUs do not ask which of them a rank holds, and read beyond them.
    Refused(
        "parallel_config",
        "enable_expert_parallel",
        "it is for models with experts, on GPUs; " + _USE_TENSORS,
        when=_without_experts_or_gpu,
    ),
    # With experts, its ranks would wait for each other in every step, also those without requests.
    Refused(
        "parallel_config",
        "data_parallel_size",
        "start one server for each",
        when=lambda config: config.model_config.is_moe,
    ),
    Refused(
        "parallel_config", "enable_eplb enable_batch_sharded_sampling enable_dbo ubatch_size enable_ep_weight_filter"
    ),
    Refused("parallel_config", "enable_hc_sp enable_elastic_ep enable_fault_tolerance"),
    Refused(
        "scheduler_config",
        "long_prefill_token_threshold long_prefill_token_threshold_adaptive",
        "refresh_ratio limits how long requests hold up short ones",
    ),
    Refused(
        "scheduler_config",
        "scheduler_cls",
        "cache_method chooses what a step computes; leave it unset",
        when=lambda config: config.scheduler_config.scheduler_cls != SCHEDULER_CLASS,
    ),
    Refused("scheduler_config", "async_scheduling", "steps_per_dispatch runs several steps without the scheduler"),
    Refused("scheduler_config", "scheduler_reserve_full_isl prefill_schedule_interval"),
    Refused(
        "scheduler_config",
        "watermark",
        "this cache method reserves all pages of a request at admission; leave it unset",
        when=_with_pages_reserved_at_once,
    ),
    Refused("cache_config", "block_size", "page_size sets how many tokens a page has", when=_with_other_pages),
    Refused(
        "cache_config", "prefix_match_unit", "prefixes are shared by pages; page_size sets how many tokens a page has"
    ),
    Refused(
        "cache_config",
        "cache_dtype",
        "pages have the model's dtype; leave it unset",
        option="kv_cache_dtype",
        when=_with_other_dtype,
    ),
    Refused("cache_config", "kv_cache_dtype_skip_layers kv_sharing_fast_prefill kv_offloading_size"),
    Refused("model_config", "enable_prompt_embeds return_sampling_mask enable_trace_replay"),
    Refused("model_config", "logits_processors use_fp64_gumbel"),
    Refused("model_config", "logprobs_mode", "log-probabilities are those of the unmasking step; leave it unset"),
    Refused("offload_config.uva", "cpu_offload_gb", _USE_TENSORS),
    Refused("offload_config.prefetch", "offload_group_size", _USE_TENSORS),
    Refused(
        "attention_config",
        "backend",
        "dense_attention chooses the library",
        option="attention_backend",
    ),
    Refused("aux_output_config", "enable_return_routed_experts"),
    Refused(
        "",
        "lora_config",
        "an adapter serves all requests of an engine: name its folder as lora_path",
        option="enable_lora",
    ),
    Refused("", "speculative_config kv_transfer_config kv_events_config ec_transfer_config"),
    Refused("", "watermark_config diffusion_config"),
)


def refuse_unsupported(vllm_config: "VllmConfig") -> None:
    """Raise ``ValueError`` for a setting that has another value than vLLM's default."""
    for each in REFUSED:
        owner = attrgetter(each.place)(vllm_config) if each.place else vllm_config
        for name in each.names.split():
            value = getattr(owner, name)
            if not _is_default(owner, name, value) and each.when(vllm_config):
                shown = f"{each.option or name}={reprlib.repr(value)}"
                raise ValueError(f"{shown} is not supported for diffusion models; {each.instead}")


def _is_default(config: Any, name: str, value: Any) -> bool:
    """Return True if a field of a config has its default, or is turned off and is off by default."""
    default = type(config).__pydantic_fields__[name].get_default(call_default_factory=True)
    return value == default or not (value or default)
