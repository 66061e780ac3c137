"""Everything in vLLM that this package replaces, or uses although vLLM does not promise to keep it.

All of it was compared with the sources of the releases in ``release.py``; look up every new entry in each of them. One
change is not in the table, because it is no function: the default of ``max_tokens`` in ``CompletionRequest``
(``server/bodies.py``).
"""

from dllm_engine.vllm_hooks import refused_settings
from dllm_engine.vllm_hooks.patch import Patch, Private

EVERY_PROCESS = (
    Patch(
        "vllm.config.vllm:VllmConfig.try_verify_and_update_config",
        "engine_config:refuse_stray_options",
        "refuse options of diffusion engines for a model that is none",
    ),
    Patch(
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        "admission:process_checked_inputs",
        "check a request before it enters the engine",
    ),
    Patch(
        "vllm.entrypoints.serve.utils.api_utils:get_max_tokens",
        "admission:refuse_clipping",
        "refuse a length that vLLM would silently shorten",
        scope="every_import",
    ),
    Patch(
        "vllm.v1.engine.output_processor:RequestState._new_completion_output",
        "output_processor:complete_with_figures",
        "attach the figures to the completion",
    ),
    Patch(
        "vllm.outputs:RequestOutput.add",
        "output_processor:merge_with_figures",
        "keep the latest figures where outputs are merged",
    ),
    Patch(
        "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        "output_processor:process_messages",
        "take figures and the running block out of the engine's messages",
    ),
    Patch(
        "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.update",
        "output_processor:detokenize_all",
        "keep the last token of a text that is complete without an end token",
    ),
    Patch(
        "vllm.v1.engine.output_processor:RequestOutputCollector.put",
        "output_processor:put_latest",
        "drop the steps that a slow consumer was overtaken by, never text",
    ),
    Patch(
        "vllm.v1.engine.output_processor:RequestOutputCollector.get",
        "output_processor:get_one",
        "hand on one by one what waits for a slow consumer",
    ),
    Patch(
        "vllm.v1.engine.output_processor:RequestOutputCollector.get_nowait",
        "output_processor:get_one_nowait",
        "hand on one by one what waits for a slow consumer",
    ),
    Patch(
        "vllm.v1.metrics.loggers:PrometheusStatLogger.__init__",
        "metrics:init_with_metrics",
        "register the metrics of diffusion engines",
    ),
    Patch(
        "vllm.v1.metrics.loggers:StatLoggerManager.record",
        "metrics:record_with_metrics",
        "record the metrics of diffusion engines",
    ),
    Patch(
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor._post_init_executor",
        "engine_core.shared_memory:unname_in_engine",
        "leave no shared memory behind when the engine is killed, and no engine when its front end is",
    ),
    Patch(
        "vllm.v1.executor.multiproc_executor:WorkerProc.worker_busy_loop",
        "engine_core.shared_memory:unname_in_worker",
        "leave no shared memory behind when a worker is killed",
    ),
    Patch(
        "vllm.v1.engine.core:EngineCore.collective_rpc",
        "engine_core.weights:guard_weights",
        "let no response come from two sets of weights",
    ),
    Patch(
        "vllm.v1.engine.core:EngineCore.sleep",
        "engine_core.weights:sleep_if_possible",
        "refuse what a CPU cannot do, and what would lose the pages of running requests",
    ),
    Patch(
        "vllm.v1.engine.core:EngineCore.release_kv_cache_memory",
        "engine_core.weights:release_if_unused",
        "keep the pages of running requests",
    ),
    Patch(
        "vllm.entrypoints.launchers.app:register_api_routers",
        "server.app:extend_app",
        "add the playground, the check of request bodies and the refusals of a server that ends",
    ),
    *(
        Patch(
            f"vllm.entrypoints.{module}:setup_server",
            "server.start:name_address",
            "say in a sentence that a port is in use",
            scope="if_imported",
        )
        for module in ("launchers.api_server.entry", "cli.serve")  # one process, or several, serve the port
    ),
)
"""Applied when vLLM loads its plugins. Requests of other models are untouched."""

SAMPLING = (
    Patch(
        "vllm.sampling_params:SamplingParams._verify_args",
        "admission:remember_filters",
        "keep top_p and top_k of greedy requests, on which confidences depend",
    ),
    Patch(
        "vllm.sampling_params:SamplingParams._verify_greedy_sampling",
        "admission:settle_greedy",
        "bring top_p and top_k back, and say what several responses to a prompt need",
    ),
)
"""Applied when ``dllm_engine.LLM`` is imported, since parameters may be made before an engine, and with the next."""

SERVING = (
    *SAMPLING,
    *(
        Patch(
            f"vllm.renderers.online_renderer:OnlineRenderer.preprocess_{kind}",
            "admission:render_and_build",
            "build what structured output needs before the request is checked, while others are served",
        )
        for kind in ("chat", "completion")
    ),
    Patch(
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest.resolve_reasoning_ended",
        "admission:resolve_by_prompt",
        "let a response reason before its structured output, also where its reasoning is not included",
    ),
    Patch(
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        "admission:generate_if_valid",
        "refuse a streamed request before its response starts with status 200",
    ),
    Patch(
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._generate_with_builtin_tools",
        "admission:respond_if_valid",
        "refuse a request to /v1/responses before its response starts",
    ),
    *(
        Patch(
            f"vllm.entrypoints.openai.{method}",
            "server.bodies:create_if_known",
            "refuse options of ours in the wrong place, which vLLM would ignore",
        )
        for method in (
            "completion.serving:OpenAIServingCompletion.create_completion",
            "chat_completion.serving:OpenAIServingChat.create_chat_completion",
            "chat_completion.batch_serving:OpenAIServingChatBatch.create_batch_chat_completion",
            "responses.serving:OpenAIServingResponses.create_responses",
        )
    ),
    Patch(
        "vllm.v1.engine.output_processor:OutputProcessor.abort_requests",
        "output_processor:abort_with_parents",
        "forget a request with n > 1 when all of its responses were aborted",
    ),
    *(
        Patch(
            f"vllm.entrypoints.generate.beam_search.{method}.beam_search",
            "admission:refuse_beam_search",
            "refuse beam search, which means nothing without a prefix to extend",
        )
        for method in ("offline:BeamSearchOfflineMixin", "online:BeamSearchOnlineMixin")
    ),
    Patch(
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.completion_stream_generator",
        "server.responses:stream_completion_with_fields",
        "add figures and provisional blocks to the chunks of a completion",
    ),
    Patch(
        "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator",
        "server.responses:stream_chat_with_fields",
        "add figures and provisional blocks to the chunks of a chat completion",
    ),
    Patch(
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.request_output_to_completion_response",
        "server.responses:complete_with_fields",
        "add figures to a completion",
    ),
    Patch(
        "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator",
        "server.responses:complete_chat_with_fields",
        "add figures to a chat completion",
    ),
    Patch(
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.responses_stream_generator",
        "server.responses:end_responses_stream",
        "end a stream of /v1/responses that fails with an event that says why",
    ),
    Patch(
        "vllm.entrypoints.generate.base.serving:GenerateBaseServing._raise_if_error",
        "server.responses:raise_with_reason",
        "tell a client why its request ended with an error",
    ),
    Patch(
        "vllm.entrypoints.launchers.api_server.entry:serve_http",
        "server.shutdown:serve_gracefully",
        "answer every client when the server ends, with an exit status that says why",
        scope="if_imported",
    ),
)
"""Applied in the process that builds an engine's config, once it is known that the model is one of ours."""

_SCHEDULER = "for the scheduler"
_RUNNER = "for the model runner"
_WORKER = "for the workers"
_ATTENTION = "for dense attention"
_LOADING = "to load weights"
_SETTINGS = "to set up an engine"
_TOOLS = "for calls of tools that must be made"
_LIKELIHOODS = "for the route of likelihoods"
_FRONT_END = "for what a front end checks and shows"

PRIVATE = (
    # The scheduler and its messages
    Private("vllm.v1.core.sched.interface", "SchedulerInterface PauseState", _SCHEDULER),
    Private("vllm.v1.core.sched.output", "SchedulerOutput.make_empty CachedRequestData.make_empty", _SCHEDULER),
    Private("vllm.v1.core.sched.output", "NewRequestData.from_request GrammarOutput", _SCHEDULER),
    Private("vllm.v1.core.sched.request_queue", "SchedulingPolicy create_request_queue", _SCHEDULER),
    Private("vllm.v1.core.sched.utils", "remove_all", _SCHEDULER),
    Private("vllm.v1.engine", "EngineCoreEventType EngineCoreOutput EngineCoreOutputs", _SCHEDULER),
    Private("vllm.v1.engine", "EngineCoreOutput.kv_transfer_params EngineCoreOutputs.scheduler_stats", _SCHEDULER),
    Private("vllm.v1.request", "Request.append_output_token_ids Request.take_events RequestStatus", _SCHEDULER),
    Private("vllm.v1.structured_output", "StructuredOutputManager", _SCHEDULER),
    Private("vllm.multimodal", "MULTIMODAL_REGISTRY MultiModalRegistry", _SCHEDULER),
    Private("vllm.v1.metrics.stats", "PrefixCacheStats SchedulerStats.kv_connector_stats", "for the metrics"),
    Private("vllm.v1.metrics.loggers", "PrometheusStatLogger._counter_cls", "for the metrics"),
    Private("vllm.v1.metrics.loggers", "PrometheusStatLogger._gauge_cls", "for the metrics"),
    Private("vllm.v1.metrics.loggers", "PrometheusStatLogger._histogram_cls", "for the metrics"),
    # Pages
    Private("vllm.v1.core.block_pool", "BlockPool.get_new_blocks BlockPool.free_blocks", "for the pages"),
    Private("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks", "for the pages"),
    Private("vllm.v1.core.kv_cache_utils", "BlockHash KVCacheBlock", "for the pages"),
    Private("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager", "for the pages"),
    Private("vllm.v1.kv_cache_interface", "FullAttentionSpec KVCacheConfig.num_blocks KVCacheSpec", "for the pages"),
    Private("vllm.v1.kv_cache_spec_registry", "KVCacheSpecRegistry._ensure_registered", "for the pages"),
    Private("vllm.v1.kv_cache_spec_registry", "KVCacheSpecRegistry.register", "for the pages"),
    # Workers and what they run
    Private("vllm.v1.outputs", "DraftTokenIds EMPTY_MODEL_RUNNER_OUTPUT LogprobsLists ModelRunnerOutput", _RUNNER),
    Private("vllm.tasks", "SupportedTask", _RUNNER),
    Private("vllm.model_executor.layers.fused_moe", "FusedMoEFactory", "for experts"),
    Private("vllm.forward_context", "set_forward_context", "for experts"),
    Private("vllm.distributed.parallel_state", "GraphCaptureContext GroupCoordinator.graph_capture", _RUNNER),
    Private("vllm.distributed.parallel_state", "GroupCoordinator is_global_first_rank", _RUNNER),
    Private("vllm.utils.gc_utils", "freeze_gc_heap", _WORKER),
    Private("vllm.model_executor.model_loader", "DefaultModelLoader get_model_loader", _LOADING),
    Private("vllm.model_executor.model_loader.default_loader", "DefaultModelLoader._get_weights_iterator", _LOADING),
    Private("vllm.model_executor.model_loader.default_loader", "DefaultModelLoader._prepare_weights", _LOADING),
    Private("vllm.model_executor.model_loader.reload.inplace", "reload_weights", _RUNNER),
    Private("vllm.model_executor.model_loader.reload", "record_metadata_for_reloading", "for the guide model"),
    Private("vllm.model_executor.model_loader.utils", "process_weights_after_loading", "for the guide model"),
    Private("vllm.utils.torch_utils", "set_default_torch_dtype", "for the guide model"),
    Private("vllm.utils.torch_utils", "set_random_seed", _WORKER),
    Private("vllm.v1.worker.worker_base", "CompilationTimes WorkerBase.get_supported_kv_cache_layouts", _WORKER),
    Private("vllm.v1.worker.cpu_worker", "CPUWorker.init_device CPUWorker.compile_or_warm_up_model", _WORKER),
    Private("vllm.v1.worker.gpu_worker", "Worker._make_model_runner init_worker_distributed_environment", _WORKER),
    Private("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model Worker.execute_dummy_batch", _WORKER),
    Private("vllm.v1.attention.backends.fa_utils", "flash_attn_varlen_func get_flash_attn_version", _ATTENTION),
    Private("vllm.platforms.cpu", "CpuPlatform", "for Ray without GPUs"),
    Private("vllm.platforms.interface", "Platform.ray_device_key", "for Ray without GPUs"),
    Private("vllm.v1.executor.ray_executor_v2", "RayWorkerProc.get_node_and_physical_gpu_ids", "for Ray without GPUs"),
    Private("vllm.v1.executor.ray_executor_v2", "RayExecutorV2._get_actor_resource_kwargs", "for Ray without GPUs"),
    Private("vllm.v1.executor.ray_executor_v2", "RayExecutorV2._init_executor", "for Ray without GPUs"),
    # Settings of an engine
    Private("vllm.model_executor.models.config", "MODELS_CONFIG_MAP", _SETTINGS),
    Private(
        "vllm.model_executor.models.config",
        "VerifyAndUpdateConfig.verify_and_update_config VerifyAndUpdateConfig.verify_and_update_model_config",
        _SETTINGS,
    ),
    Private("vllm.config.compilation", "CompilationMode CUDAGraphMode", _SETTINGS),
    Private("vllm.config.compilation", "CompilationConfig.mode CompilationConfig.cudagraph_mode", _SETTINGS),
    Private("vllm.config.compilation", "CompilationConfig.custom_ops", _SETTINGS),
    Private("vllm.config.scheduler", "SchedulerConfig.scheduler_cls SchedulerConfig.async_scheduling", _SETTINGS),
    Private("vllm.config.scheduler", "SchedulerConfig.enable_chunked_prefill SchedulerConfig.policy", _SETTINGS),
    Private("vllm.config.scheduler", "SchedulerConfig.max_num_batched_tokens SchedulerConfig.max_num_seqs", _SETTINGS),
    Private("vllm.config.scheduler", "SchedulerConfig.max_num_scheduled_tokens", _SETTINGS),
    Private("vllm.config.scheduler", "SchedulerConfig.max_num_active_seqs", _SETTINGS),
    Private("vllm.config.cache", "CacheConfig.enable_prefix_caching CacheConfig.kv_cache_memory_bytes", _SETTINGS),
    Private("vllm.config.cache", "CacheConfig.num_gpu_blocks CacheConfig.user_specified_block_size", _SETTINGS),
    Private("vllm.config.parallel", "ParallelConfig.worker_cls", _SETTINGS),
    Private("vllm.config.parallel", "ParallelConfig.distributed_executor_backend", _SETTINGS),
    Private("vllm.config.parallel", "ParallelConfig.tensor_parallel_size", _SETTINGS),
    Private("vllm.utils.torch_utils", "resolve_kv_cache_dtype_string", _SETTINGS),
    *refused_settings.USES,
    Private("vllm.tokenizers", "cached_tokenizer_from_config", _SETTINGS),
    Private("vllm.transformers_utils.repo_utils", "get_hf_file_to_dict", "for the checkpoint's own defaults"),
    # Front ends
    Private("vllm.v1.engine.input_processor", "InputProcessor parse_model_prompt", _FRONT_END),
    Private("vllm.renderers", "TokenizeParams renderer_from_config", _FRONT_END),
    Private("vllm.usage.usage_lib", "UsageContext", _FRONT_END),
    Private(
        "vllm.renderers.base", "BaseRenderer.tokenize_prompts_async", "to tokenize templates outside the event loop"
    ),
    Private("vllm.tokenizers", "TokenizerLike", "for automata over tokens"),
    Private("vllm.reasoning", "ReasoningParserManager", "for reasoning before structured output"),
    Private("vllm.renderers.online_renderer", "OnlineRenderer.effective_chat_template_kwargs", _FRONT_END),
    Private(
        "vllm.reasoning.abs_reasoning_parsers",
        "ReasoningParser.is_reasoning_end ReasoningParser.reasoning_start_str ReasoningParser.reasoning_end_str",
        "for reasoning before structured output",
    ),
    Private("vllm.entrypoints.generate.base.protocol", "DeltaMessage ExtractedToolCallInformation", _TOOLS),
    Private("vllm.tool_parsers", "ToolParserManager", _TOOLS),
    Private("vllm.tool_parsers.abstract_tool_parser", "ToolParser ToolParser.adjust_request", _TOOLS),
    Private("vllm.tool_parsers.abstract_tool_parser", "ToolParser.structural_tag_model", _TOOLS),
    Private("vllm.tool_parsers.abstract_tool_parser", "ToolParser.supports_required_and_named", _TOOLS),
    Private("vllm.v1.serial_utils", "MsgpackEncoder", _FRONT_END),
    Private("vllm.v1.engine", "EngineCoreRequest FinishReason", _FRONT_END),
    Private("vllm.entrypoints.openai.completion.protocol", "CompletionRequest.max_tokens", _FRONT_END),
    Private("vllm.entrypoints.openai.completion.protocol", "CompletionRequest", _LIKELIHOODS),
    Private(
        "vllm.entrypoints.openai.completion.serving", "OpenAIServingCompletion.render_completion_request", _LIKELIHOODS
    ),
    Private("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest", _LIKELIHOODS),
    Private("vllm.entrypoints.openai.chat_completion.serving", "OpenAIServingChat.render_chat_request", _LIKELIHOODS),
    Private("vllm.entrypoints.serve.engine.protocol", "ErrorResponse", _LIKELIHOODS),
    Private("vllm.entrypoints.serve.utils.api_utils", "load_aware_call with_cancellation", _LIKELIHOODS),
    Private("vllm.entrypoints.serve.middleware.authenticate", "AuthenticationMiddleware.verify_token", _FRONT_END),
    Private("vllm.v1.engine.exceptions", "EngineDeadError", _FRONT_END),
    Private("vllm.v1.engine.output_processor", "RequestState._new_request_output", _FRONT_END),
    Private("vllm.v1.engine.output_processor", "OutputProcessor.propagate_error", _FRONT_END),
    Private("vllm.entrypoints.serve.exception_handling.error_response", "create_error_response", _FRONT_END),
    Private("vllm.entrypoints.launchers.launcher", "terminate_if_errored", _FRONT_END),
    Private("vllm.entrypoints.cli.main", "main", "for `dllm serve`"),
    Private("vllm.entrypoints.cli.serve", "make_arg_parser", "for `dllm serve`"),
    Private("vllm.utils.argparse_utils", "FlexibleArgumentParser.load_config_file", "for `dllm serve`"),
)
"""Names that are imported, and their attributes that are overridden, set or read. Checked when vLLM loads plugins."""
