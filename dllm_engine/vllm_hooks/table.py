"""The table of everything in vLLM that this package replaces."""

from dllm_engine.vllm_hooks.patch import Patch

EVERY_PROCESS = (
    Patch(
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        "admission:checked_inputs",
        "self, request_id, prompt, params, supported_tasks",
        "check a request before it enters the engine",
    ),
    Patch(
        "vllm.entrypoints.serve.utils.api_utils:get_max_tokens",
        "admission:unclipped_max_tokens",
        "max_model_len, max_tokens, input_length",
        "refuse a length that vLLM would silently shorten",
        scope="every_import",
    ),
    Patch(
        "vllm.v1.engine.output_processor:RequestState.make_request_output",
        "request_outputs:taking_message",
        "self, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params",
        "take a request's figures out of the engine's message",
    ),
    Patch(
        "vllm.v1.engine.output_processor:RequestState._new_completion_output",
        "request_outputs:with_figures",
        "self",
        "attach the figures to the completion",
    ),
    Patch(
        "vllm.outputs:RequestOutput.add",
        "request_outputs:merging_figures",
        "self, next_output, aggregate",
        "keep the latest figures where outputs are merged",
    ),
    Patch(
        "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        "step_stream:processing_provisional",
        "self, engine_core_outputs",
        "hand on the running block after each step without counting it as new tokens",
    ),
    Patch(
        "vllm.v1.engine.output_processor:RequestOutputCollector.put",
        "step_stream:putting_one_by_one",
        "self, output",
        "keep the steps of a slow consumer apart",
    ),
    Patch(
        "vllm.v1.engine.output_processor:RequestOutputCollector.get",
        "step_stream:getting_one",
        "self",
        "keep the steps of a slow consumer apart",
    ),
    Patch(
        "vllm.v1.engine.output_processor:RequestOutputCollector.get_nowait",
        "step_stream:getting_one_nowait",
        "self",
        "keep the steps of a slow consumer apart",
    ),
    Patch(
        "vllm.v1.metrics.loggers:PrometheusStatLogger.__init__",
        "metrics:registering_metrics",
        "self, vllm_config",
        "register the metrics of diffusion engines",
    ),
    Patch(
        "vllm.v1.metrics.loggers:StatLoggerManager.record",
        "metrics:recording_metrics",
        "self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx",
        "record the metrics of diffusion engines",
    ),
    Patch(
        "vllm.v1.engine.llm_engine:LLMEngine.get_metrics",
        "metrics:getting_all_metrics",
        "self",
        "show the metrics of diffusion engines",
    ),
    Patch(
        "vllm.entrypoints.launchers.app:register_api_routers",
        "http_app:extended_app",
        "args, app, supported_tasks, model_config",
        "add the playground, the check of request bodies and the refusals of a server that ends",
    ),
    Patch(
        "vllm.entrypoints.launchers.api_server.entry:setup_server",
        "server_start:naming_address",
        "args",
        "say in a sentence that a port is in use",
        scope="if_imported",
    ),
    Patch(
        "vllm.entrypoints.cli.serve:setup_server",
        "server_start:naming_address",
        "args",
        "say in a sentence that a port is in use, where several processes serve it",
        scope="if_imported",
    ),
)
"""Applied when vLLM loads its plugins; requests of other models are untouched."""

SERVING = (
    Patch(
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        "admission:checked_generate",
        "self, prompt, sampling_params, request_id",
        "refuse a streamed request before its response starts with status 200",
    ),
    Patch(
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._generate_with_builtin_tools",
        "admission:checked_respond",
        "self, request_id, engine_input, sampling_params",
        "refuse a request to /v1/responses before its response starts",
    ),
    Patch(
        "vllm.entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin.beam_search",
        "admission:refused_beam_search",
        "self",
        "refuse beam search, which means nothing without a prefix to extend",
    ),
    Patch(
        "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search",
        "admission:refused_beam_search",
        "self",
        "refuse beam search, which means nothing without a prefix to extend",
    ),
    Patch(
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.completion_stream_generator",
        "http_responses:completion_stream",
        "self, request, engine_inputs, result_generator, request_id, created_time, model_name",
        "add figures and provisional blocks to the chunks of a completion",
    ),
    Patch(
        "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator",
        "http_responses:chat_stream",
        "self, request, result_generator",
        "add figures and provisional blocks to the chunks of a chat completion",
    ),
    Patch(
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.request_output_to_completion_response",
        "http_responses:whole_completion",
        "self, final_res_batch",
        "add figures to a completion",
    ),
    Patch(
        "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator",
        "http_responses:whole_chat",
        "self, request, result_generator",
        "add figures to a chat completion",
    ),
    Patch(
        "vllm.entrypoints.launchers.api_server.entry:serve_http",
        "shutdown:ending_well",
        "app",
        "answer every client when the server ends, with an exit status that says why",
        scope="if_imported",
    ),
)
"""Applied in the process that builds an engine's config, once the model is known to be one of ours."""
