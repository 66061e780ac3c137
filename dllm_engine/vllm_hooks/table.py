"""Everything in vLLM that this package replaces or extends, with the replacement. The
docstring of each replacement says why, and a comment here says which feature of vLLM
would make it unnecessary.

Entries were compared with the sources of the releases in ``release.py``. Look up every
new entry in each of them.
"""

from dllm_engine.vllm_hooks.release import is_installed

BESIDE = {
    "plugin.py": "model classes in ModelRegistry and MODELS_CONFIG_MAP; config classes "
    "in AutoConfig",
    "model_executor/models/configs.py": "tokenizers of families in AutoTokenizer",
    "structured_output/tool_calls.py": "the server's tool parser in ToolParserManager, "
    "again, as a class of ours",
    "vllm_hooks/engine_config.py": "an engine's config: scheduler, worker and executor "
    "classes, defaults of requests, settings that have one value here",
    "vllm_hooks/cpu_distribution.py": "a finder of the metadata of vLLM's CPU build",
    "vllm_hooks/server/app.py": "routes and middleware of the application, without "
    "vLLM's /scale_elastic_ep and /v1/decisions; GUARDED_PREFIX, so that more routes "
    "ask for the API key; a filter of what is logged of refusals",
    "vllm_hooks/server/stop.py": "shutdown of an engine and propagate_error of its "
    "output processor, while it serves",
    "vllm_hooks/server/batch_chats.py": "the wrapper of chats in run-batch's registry",
    "vllm_hooks/metrics.py": "a logger in an engine's StatLoggerManager",
    "scheduler/page_pool.py": "BlockPool is given the one attribute of a request that "
    "it reads",
    "scheduler/scheduled_request.py": "figures travel in kv_transfer_params of an output",
    "scheduler/engine_stats.py": "counts travel in kv_connector_stats",
    "model_executor/workers/ray_cpu.py": "Ray's actor class while an executor starts, "
    "and Ray's name of a CPU",
    "model_executor/workers/cpu.py": "VLLM_DIST_IDENT, the name of a rank's memory",
    "quiet.py": "levels, filters and handlers of loggers",
}
"""Changes beside replaced functions, by the file that makes them."""

_RUN_BATCH = "vllm.entrypoints.launchers.run_batch"
_BEAM_SEARCH = "vllm.entrypoints.generate.beam_search"
_CHAT = "vllm.entrypoints.openai.chat_completion"
_COMPLETION = "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion"
_OFFLINE = "vllm.entrypoints.common.offline:OfflineInferenceMixin"
_RENDERER = "vllm.renderers.online_renderer:OnlineRenderer"
_RESPONSES = "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses"
_PROCESSOR = "vllm.v1.engine.output_processor"

STARTING = {
    # Wish: handlers of signals that end a process which loads.
    "vllm.entrypoints.launchers.launcher:setup_server": "server.start:keep_handlers",
    "vllm.v1.utils:wait_for_completion_or_failure": "server.start:restore_handlers",
}
"""Applied by ``dllm serve``."""

EVERY_PROCESS = {
    # Wish: additional_config that nobody reads is refused.
    "vllm.config.vllm:VllmConfig.try_verify_and_update_config": "engine_config:refuse_stray_options",
    # Wish: a hook of the model for requests. Platform.validate_request is the device's.
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": "input_processor:process_checked_inputs",
    # Wish: stat_logger_plugins for offline engines too.
    "vllm.v1.metrics.loggers:StatLoggerManager.__init__": "metrics:init_with_metrics",
    # Wish: a scheduler is asked before its workers change.
    "vllm.v1.engine.core:EngineCore.collective_rpc": "engine_core:call_workers",
    "vllm.v1.engine.core:EngineCore.sleep": "engine_core:sleep_if_possible",
    "vllm.v1.engine.core:EngineCore.release_kv_cache_memory": "engine_core:release_if_unused",
    # Wish: endpoint_plugins without VLLM_PLUGINS.
    "vllm.entrypoints.launchers.app:register_api_routers": "server.app:extend_app",
}
"""Applied when vLLM loads its plugins. Requests of other models are untouched."""

SAMPLING = {
    # Wish: greedy parameters keep what they were given.
    "vllm.sampling_params:SamplingParams._verify_args": "input_processor:keep_filters"
}
"""Applied when ``dllm_engine.LLM`` is imported, because parameters may be made before
an engine, and together with ``SERVING``.
"""

SERVING = {
    **SAMPLING,
    # Wish: fields of EngineCoreOutput that reach the completion, and a class of output
    # processors that vLLM takes by name.
    f"{_PROCESSOR}:RequestState.from_new_request": "output_processor:state_with_figures",
    f"{_PROCESSOR}:OutputProcessor.process_outputs": "output_processor:process_messages",
    # Wish: grammars are built beside the event loop, and requests are checked before a
    # stream has its status.
    f"{_RENDERER}.preprocess_chat": "input_processor:render_and_build",
    f"{_RENDERER}.preprocess_completion": "input_processor:render_and_build",
    # Wish: --parser-plugin, a whole parser by name.
    "vllm.parser.parser_manager:ParserManager.get_parser": "reasoning:parser_that_reads_prompts",
    # Wish: a length that is too long is refused.
    "vllm.entrypoints.serve.utils.api_utils:get_max_tokens": "input_processor:refuse_clipping",
    "vllm.v1.engine.async_llm:AsyncLLM.generate": "input_processor:generate_if_valid",
    # Wish: as above, and a look at all prompts of a call before the first one enters.
    f"{_OFFLINE}._render_and_add_requests": "input_processor:add_with_lengths",
    f"{_RESPONSES}._generate_with_builtin_tools": "input_processor:respond_if_valid",
    # Wish: a model says that it has no beam search.
    f"{_BEAM_SEARCH}.offline:BeamSearchOfflineMixin.beam_search": "input_processor:refuse_beam_search",
    # Wish: a pause between the prompts of a request.
    "vllm.entrypoints.serve.engine.serving:BaseServing._get_trace_headers": "input_processor:let_others_run",
    # Wish: run-batch asks its own application.
    f"{_RUN_BATCH}:build_endpoint_registry": "server.batch_chats:answer_as_over_http",
    # Wish: fields of completions reach the chunks.
    f"{_COMPLETION}.completion_stream_generator": "server.responses:stream_response",
    f"{_CHAT}.serving:OpenAIServingChat.chat_completion_stream_generator": "server.responses:stream_response",
    # Wish: clients of a server that ends get an answer, and its exit status says why.
    "vllm.entrypoints.launchers.launcher:serve_http": "server.stop:serve_and_tell",
    "vllm.v1.engine.utils:CoreEngineProcManager.monitor_engine_liveness": "server.stop:watch_processes",
}
"""Applied in the process that builds an engine's config, if the model is one of ours.
"""

if is_installed("0.32"):
    # vLLM 0.33 checks a file before it loads a model.
    SERVING |= {f"{_RUN_BATCH}:run_batch": "server.run_batch:run_by_line"}
