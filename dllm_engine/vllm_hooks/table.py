"""Everything in vLLM that this package replaces.

All of it was compared with the sources of the releases in ``release.py``; look up every new entry in each of them. One
change is not in the table, because it is no function: the default of ``max_tokens`` in ``CompletionRequest``
(``server/bodies.py``).
"""

from dllm_engine.vllm_hooks.patch import Patch

EVERY_PROCESS = (
    Patch(
        "vllm.config.vllm:VllmConfig.try_verify_and_update_config",
        "engine_config:refuse_stray_options",
        "refuse options of diffusion engines for a model that is none",
    ),
    Patch(
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        "input_processor:process_checked_inputs",
        "check a request before it enters the engine",
    ),
    Patch(
        "vllm.entrypoints.serve.utils.api_utils:get_max_tokens",
        "input_processor:refuse_clipping",
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
        "input_processor:remember_filters",
        "keep top_p and top_k of greedy requests, on which confidences depend",
    ),
    Patch(
        "vllm.sampling_params:SamplingParams._verify_greedy_sampling",
        "input_processor:settle_greedy",
        "bring top_p and top_k back, and say what several responses to a prompt need",
    ),
)
"""Applied when ``dllm_engine.LLM`` is imported, since parameters may be made before an engine, and with the next."""

SERVING = (
    *SAMPLING,
    *(
        Patch(
            f"vllm.renderers.online_renderer:OnlineRenderer.preprocess_{kind}",
            "input_processor:render_and_build",
            "build what structured output needs before the request is checked, while others are served",
        )
        for kind in ("chat", "completion")
    ),
    Patch(
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest.resolve_reasoning_ended",
        "input_processor:resolve_by_prompt",
        "let a response reason before its structured output, also where its reasoning is not included",
    ),
    Patch(
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        "input_processor:generate_if_valid",
        "refuse a streamed request before its response starts with status 200",
    ),
    Patch(
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._generate_with_builtin_tools",
        "input_processor:respond_if_valid",
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
            "input_processor:refuse_beam_search",
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
