"""Settings that turn stock vLLM into a diffusion engine. They are applied if the model
is one of ours.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config import CompilationMode, CUDAGraphMode, ModelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config

from dllm_engine.admission import unsupported
from dllm_engine.cache_methods.page_demand import PageDemand
from dllm_engine.checkpoints import check_folder
from dllm_engine.decoding.unmasking_policies import PARALLEL_RULES
from dllm_engine.families import barred_tokens, released_defaults
from dllm_engine.memory import CPU_PAGE_POOL_BYTES
from dllm_engine.model_executor.guide.sizes import guide_config, guide_shape
from dllm_engine.model_executor.guide.text import Retokenizer
from dllm_engine.model_executor.loading.files import check_generation_config
from dllm_engine.model_executor.loading.lora import DraftAdapter, check_adapter
from dllm_engine.model_executor.loading.tokenizers import tokenizer_files_named
from dllm_engine.model_executor.models.config_facts import unsupported_model
from dllm_engine.model_executor.models.config_keys import block_size_of
from dllm_engine.model_executor.models.configs import (
    Config,
    config_class_of,
    parse_config,
)
from dllm_engine.model_name import own_name
from dllm_engine.options import OPTIONS_KEY, EngineOptions
from dllm_engine.quiet import continue_quietly
from dllm_engine.request_options.defaults import (
    check_request_defaults,
    checkpoint_defaults,
)
from dllm_engine.request_options.fields import (
    RequestOptions,
    check_attention,
    with_defaults,
)
from dllm_engine.request_options.sampling_params import (
    DEFAULT_GEN_LENGTH,
    DefaultLength,
    ResponseLimit,
)
from dllm_engine.text import assignments, cut, did_you_mean, one_line, shortened
from dllm_engine.vllm_hooks import patch, table
from dllm_engine.vllm_hooks.patch import Original
from dllm_engine.vllm_hooks.refused_settings import SCHEDULER_CLASS, refuse_unsupported
from dllm_engine.vllm_hooks.stated_sizes import check_sizes

logger = init_logger(f"vllm.{__name__}")

WORKER_CLASSES = {
    "cpu": "dllm_engine.model_executor.workers.cpu.DiffusionCPUWorker",
    "cuda": "dllm_engine.model_executor.workers.gpu.DiffusionGPUWorker",
}

USED_DEFAULTS = ("temperature", "top_p", "top_k", "max_new_tokens")
"""Keys of ``generation_config.json`` and ``override_generation_config`` that become
defaults of requests.
"""
OTHER_DEFAULTS = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_p",
)
"""The other keys that vLLM uses. If a user sets one, it is refused. In a file, which
was written for another engine, they are ignored with a warning."""


class DiffusionEngineConfig(VerifyAndUpdateConfig):
    """vLLM's per-architecture hook. Raises ``ValueError`` for settings that diffusion
    models do not support.
    """

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        _take_named_family(model_config)
        config, overrides = model_config.hf_config, model_config.hf_overrides
        if not isinstance(config, Config):
            raise ValueError(
                unsupported_model(
                    model_config.model, config.model_type, config.architectures
                )
            )
        if isinstance(overrides, dict) and overrides:
            # vLLM sets them one by one, so that two could contradict.
            config.update(overrides)
        check_folder(model_config.model)
        config.check()
        _check_quantization(model_config)
        model_config.is_dllm_engine = True
        # Our classes replace those in `auto_map`, so code in a checkpoint never runs.
        model_config.trust_remote_code = False
        # Defaults of requests: those of the checkpoint, else greedy like the authors,
        # with a limited length.
        stated = stated_defaults(model_config)
        defaults: dict[str, Any] = {
            "temperature": 0.0,
            "max_new_tokens": DEFAULT_GEN_LENGTH,
            **dict.fromkeys(OTHER_DEFAULTS),
        }
        defaults |= {
            name: stated[name] for name in USED_DEFAULTS if stated.get(name) is not None
        }
        defaults["max_new_tokens"] = DefaultLength(defaults["max_new_tokens"])
        overrides = checked_defaults(model_config.override_generation_config or {})
        if not hasattr(model_config, "dllm_response_limit"):
            model_config.dllm_response_limit = overrides.get("max_new_tokens")
            if model_config.dllm_response_limit is not None:
                overrides["max_new_tokens"] = ResponseLimit(overrides["max_new_tokens"])
        model_config.override_generation_config = defaults | overrides

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        continue_quietly()  # vLLM has set up logging anew for this engine
        refuse_unsupported(vllm_config)
        model_config = vllm_config.model_config
        check_sizes(model_config.model, model_config.hf_config, vllm_config)
        if not model_config.skip_tokenizer_init:
            with tokenizer_files_named(model_config.tokenizer):
                cached_tokenizer_from_config(model_config)
        _check_block_size(model_config)
        if left_out := left_out_defaults(model_config):
            text = (
                "generation_config.json of %s: not supported for diffusion models, and "
                "left out: %s"
            )
            logger.warning(text, model_config.model, ", ".join(left_out))
        options = _resolve_engine_options(vllm_config)
        if (device := current_platform.device_type) not in WORKER_CLASSES:
            raise ValueError(
                f"device type {device!r} is not supported; use one of "
                f"{', '.join(WORKER_CLASSES)}"
            )
        scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
        scheduler.scheduler_cls = SCHEDULER_CLASS
        scheduler.async_scheduling = False
        scheduler.enable_chunked_prefill &= options.method.shortened is not None
        # A step computes the whole canvas at once, or a block if prompts can be fed in
        # parts.
        longest = 1 if scheduler.enable_chunked_prefill else model_config.max_model_len
        num_rows = model_config.hf_config.family.longest_canvas(longest)
        limit = scheduler.max_num_scheduled_tokens
        if limit is None:
            limit = scheduler.max_num_batched_tokens
        elif limit < num_rows:
            raise ValueError(
                f"max_num_scheduled_tokens={limit} is less than the {num_rows} rows of "
                f"the longest canvas; raise it or lower "
                f"max_model_len={model_config.max_model_len}"
            )
        scheduler.max_num_batched_tokens = max(
            min(scheduler.max_num_batched_tokens, limit), num_rows
        )
        if parallel.worker_cls == "auto":
            parallel.worker_cls = WORKER_CLASSES[device]
        parallel.distributed_executor_backend = _executor(
            parallel.distributed_executor_backend
        )
        # A page may end inside a block. If the rows of a block share experts, they must
        # not be fed in parts.
        shares = options.share_prompts or (
            options.method.keeps_for_good
            and not model_config.hf_config.family.experts_by_block
        )
        cache = vllm_config.cache_config
        if options.share_prompts and not cache.enable_prefix_caching:
            raise ValueError(
                "share_prompts=True needs vLLM's enable_prefix_caching; leave one of "
                "them unset"
            )
        cache.enable_prefix_caching &= shares
        if cache.enable_prefix_caching:
            # Number of tokens that vLLM hashes together.
            cache.block_size = options.page_size
        if current_platform.is_cpu() and cache.kv_cache_memory_bytes is None:
            cache.kv_cache_memory_bytes = CPU_PAGE_POOL_BYTES
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        # Among vLLM's layers only the quantization of activations gains from its
        # kernel. Other layers are ours.
        compilation.custom_ops = (
            ["none"] if current_platform.is_cpu() else ["none", "+quant_fp8"]
        )
        patch.apply(table.SERVING)


def _executor(backend: Any) -> Any:
    """Our executor in place of a named one of vLLM; other backends unchanged."""
    if backend == "mp":
        from dllm_engine.model_executor.workers.multiproc import (
            DiffusionMultiprocExecutor,
        )

        return DiffusionMultiprocExecutor
    if backend == "ray" and current_platform.is_cpu():
        from dllm_engine.model_executor.workers.ray_cpu import RayCPUExecutor

        return RayCPUExecutor
    return backend


def stated_defaults(model_config: ModelConfig) -> dict[str, Any]:
    """Defaults of requests from the checkpoint, or from the folder named by
    ``generation_config``; none if this is "vllm"."""
    source = model_config.generation_config
    if source == "vllm":
        return {}
    if source != "auto":
        check_generation_config(Path(source))
    return model_config.try_get_generation_config()


def left_out_defaults(model_config: ModelConfig) -> list[str]:
    """Defaults in the file that the engine ignores."""
    stated = stated_defaults(model_config)
    return [
        f"{name}={stated[name]!r}"
        for name in OTHER_DEFAULTS
        if unsupported(name, stated.get(name)) is not None
    ]


def checked_defaults(override: dict[str, Any]) -> dict[str, Any]:
    """``override_generation_config`` without values that have no effect. Raises
    ``ValueError`` naming what is wrong.
    """
    where = "override_generation_config"
    for name, value in override.items():
        if name not in (*USED_DEFAULTS, *OTHER_DEFAULTS):
            raise ValueError(
                f"{where} takes no {name!r}{did_you_mean(name, USED_DEFAULTS)} (it may "
                f"hold {', '.join(USED_DEFAULTS)})"
            )
        if reason := unsupported(name, value):
            raise ValueError(f"{where}: {reason}; leave it out")
    return {
        name: value
        for name, value in override.items()
        if name in USED_DEFAULTS and value is not None
    }


def _take_named_family(model_config: ModelConfig) -> None:
    """Replace the config of a model that states another architecture, and is one of
    ours only by ``hf_overrides``.
    """
    overrides = model_config.hf_overrides
    if isinstance(model_config.hf_config, Config) or not isinstance(overrides, dict):
        return
    stated = model_config.hf_config.to_dict()
    stated["architectures"] = overrides.get("architectures")
    family = config_class_of(stated)
    if family is not None:
        model_config.hf_config = parse_config(stated, model_config.model)
        model_config.hf_text_config = model_config.hf_config


def refuse_stray_options(original: Original, self: VllmConfig) -> None:
    """Refuse our options for other models. vLLM would ignore them."""
    model, additional = self.model_config, self.additional_config
    is_asked_for = isinstance(additional, dict) and OPTIONS_KEY in additional
    if model is not None and is_asked_for and not hasattr(model, "is_dllm_engine"):
        reason = unsupported_model(
            model.model, model.hf_config.model_type, model.hf_config.architectures
        )
        raise ValueError(
            f"additional_config[{OPTIONS_KEY!r}] is for diffusion language models; "
            f"{reason}"
        )
    original(self)


def _resolve_engine_options(vllm_config: VllmConfig) -> EngineOptions:
    """The engine's options, validated for this model, and with the settings of the
    method's paper. They are written back into the config, so that every process reads
    the same."""
    model_config = vllm_config.model_config
    options = EngineOptions.from_vllm_config(vllm_config)
    check_request_defaults(options)
    defaults = with_defaults(
        options.request_defaults, checkpoint_defaults(model_config.hf_config)
    )
    family = model_config.hf_config.family
    check_attention(RequestOptions.model_validate(defaults), family)
    named_block_size = block_size_of(family, own_name(model_config.model))
    if (
        family.attention == "block_causal"
        and named_block_size == family.default_block_length
    ):
        logger.info_once(
            "%s: blocks of %d tokens, as its name says",
            model_config.model,
            named_block_size,
        )
    _tell_of_released_defaults(model_config, defaults)
    options = options.model_copy(update={"request_defaults": defaults})
    stated, options = options, options.with_paper_settings(model_config.model, family)
    _tell_of_guessed_settings(stated, options, model_config)
    if options.guide_model is not None:
        options = _with_guide_shape(options, vllm_config)
    if options.lora_path is not None:
        check_adapter(options.lora_path, vllm_config)
    if options.draft_lora is not None:
        DraftAdapter(vllm_config, options.draft_lora)  # checks it
    geometry = options.geometry(
        model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size
    )
    # Import these now, so that a broken package is named before any process is started.
    _ = options.layer_pass
    for name, rule in PARALLEL_RULES.items():
        PARALLEL_RULES.function(name, rule.selects)
    page_demand = PageDemand(options.method, geometry, options.share_prompts)
    num_pages = page_demand.upper_bound(
        options.cache, family.longest_canvas(model_config.max_model_len)
    )
    reserved = vllm_config.cache_config.kv_cache_memory_bytes
    needed = num_pages * geometry.page_bytes(model_config.dtype.itemsize)
    if reserved is not None and reserved < needed:
        raise ValueError(
            f"kv_cache_memory_bytes={reserved} is less than the {needed} bytes of "
            f"{num_pages} pages, which a request of "
            f"max_model_len={model_config.max_model_len} may need; raise it, or lower "
            f"max_model_len"
        )
    options = options.on_device(
        current_platform.device_type, model_config.enforce_eager
    )
    # Store the validated cache options, because other nodes may lack the files that
    # options name.
    resolved = options.model_dump() | {
        "cache_options": options.cache.model_dump(mode="json")
    }
    vllm_config.additional_config = {
        **(vllm_config.additional_config or {}),
        OPTIONS_KEY: resolved,
    }
    return options


def _check_quantization(model_config: ModelConfig) -> None:
    """Raise ``ValueError`` if vLLM cannot read the quantization of the weights. Its own
    errors do not name the file, and have many types.
    """
    stated = getattr(model_config.hf_config, "quantization_config", None)
    if stated is None:
        return
    try:
        model_config._verify_quantization()
        get_quantization_config(model_config.quantization).from_config(stated)
    except Exception as error:
        raise ValueError(
            f"{model_config.model}/config.json: "
            f"quantization_config={shortened(stated)} cannot be read: "
            f"{cut(one_line(error))}"
        ) from None


def _check_block_size(model_config: ModelConfig) -> None:
    family, longest = model_config.hf_config.family, model_config.max_model_len
    if family.attention != "full" and family.default_block_length > longest:
        raise ValueError(
            f"block_size={family.default_block_length} of {model_config.model} is more "
            f"than max_model_len={longest}"
        )


def _tell_of_released_defaults(
    model_config: ModelConfig, defaults: Mapping[str, Any]
) -> None:
    """Log the defaults that follow from the model's name, or that other names would
    bring.
    """
    model, family = model_config.model, model_config.hf_config.family
    if family.barred is not None and barred_tokens(model_config.hf_config):
        logger.warning_once(
            "%s: %s %s", model, family.barred.name, family.barred.reason
        )
        return
    if named := released_defaults(model_config.hf_config):
        logger.info_once(
            "%s: requests get %s by default, as its name says",
            model,
            assignments(dict(named)),
        )
        return
    if own_name(model) in map(own_name, family.checkpoints):
        return  # the name of a released checkpoint
    for name, others in family.released_defaults.items():
        if not others.keys() <= defaults.keys():
            logger.info_once(
                "%s: requests to %s get %s by default; this model's name does not say "
                "that it is one; if it is, set them in request_defaults",
                model,
                name,
                assignments(dict(others)),
            )


def _tell_of_guessed_settings(
    stated: EngineOptions, options: EngineOptions, model_config: ModelConfig
) -> None:
    """Log the cache options from papers, and warn if they depend on the model but its
    name does not identify it.
    """
    family, model = model_config.hf_config.family, model_config.model
    by_name, settings = options.method.settings_for(model, family)
    guessed = ", ".join(
        f"{name}={value}"
        for name, value in settings.items()
        if name not in stated.cache_options
    )
    method, name = options.cache_method, own_name(model)
    if guessed and by_name:
        text = "cache_method=%r: the paper's settings for %s: %s"
        logger.info_once(text, method, name, guessed)
    if guessed and not by_name:
        text = (
            "cache_method=%r: the papers' settings depend on the model, and the name "
            "of %s contains none of %s; using those of %s: %s. Set them in cache_options "
            "if others suit the model better"
        )
        parts = [repr(x) for x in options.method.options.paper_settings[family.name]]
        logger.warning_once(text, method, name, ", ".join(parts), parts[-1], guessed)


def _with_guide_shape(options: EngineOptions, vllm_config: VllmConfig) -> EngineOptions:
    """The options with the guide's sizes. Raises ``ValueError`` if the guide cannot
    guide this model.
    """
    guide, model_config = options.guide_model, vllm_config.model_config
    assert guide is not None
    check_sizes(guide, guide_config(guide), vllm_config)
    tokenizer = (
        None
        if model_config.skip_tokenizer_init
        else cached_tokenizer_from_config(model_config)
    )
    shape = guide_shape(
        guide, tokenizer and tokenizer.get_vocab(), options.guide_tokens_per_token
    )
    if not shape.same_tokens:
        # Make one to refuse unsupported tokenizers before workers start.
        Retokenizer.between(model_config, guide)
        logger.info(
            "guide_model=%r has another tokenizer; it reads drafts as text", guide
        )
    return options.model_copy(update={"guide_shape": shape})
