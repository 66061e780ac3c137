"""Checks of a request before it enters the engine, offline and over HTTP.

vLLM validates requests in ``InputProcessor.process_inputs``, which every front end calls with the prompt and the
parameters; ``install`` puts our checks there. What fails is answered with 400 and loses nothing.
"""

import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from dllm_engine.families import ModelFamily, family_of
from dllm_engine.options import EngineOptions
from dllm_engine.params import (
    DEFAULT_GEN_LENGTH,
    DiffusionParams,
    InvalidRequestError,
    check_page_demand,
    resolve_decoding,
)
from dllm_engine.scheduler.decoding import DecodingSpec
from dllm_engine.scheduler.page_layout import PoolGeometry

# SamplingParams fields that have no meaning here (yet), with the value that means "not used".
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "prompt_logprobs": (None, "log-probabilities of the prompt are"),
    "logprob_token_ids": (None, "log-probabilities of chosen tokens are"),
    "presence_penalty": (0.0, "penalties are"),
    "frequency_penalty": (0.0, "penalties are"),
    "repetition_penalty": (1.0, "penalties are"),
    "min_p": (0.0, "min_p sampling is"),
    "min_tokens": (0, "a minimum length is"),
    "structured_outputs": (None, "structured output is"),
    "logit_bias": (None, "logit bias is"),
    "allowed_token_ids": (None, "restricting the tokens is"),
    "bad_words": ([], "forbidding words is"),
    "repetition_detection": (None, "repetition detection is"),
    "thinking_token_budget": (None, "a thinking budget is"),
    "trace_decode_token_ids": (None, "trace replay is"),
}


def check_request(
    params: SamplingParams,
    prompt_token_ids: list[int],
    family: ModelFamily,
    engine: EngineOptions,
    hf_config: Any,
    max_model_len: int,
) -> DecodingSpec:
    """The request with every default filled in.

    Raises ``InvalidRequestError`` naming the setting, its value and what to do, if it cannot be served.
    """
    for name, (unused, what) in _UNSUPPORTED.items():
        value = getattr(params, name)
        if value is not None and value != unused:
            shown = f"{name}={value!r}" if isinstance(value, int | float | str) else name
            raise InvalidRequestError(f"{shown}: {what} not supported for diffusion models; leave it unset")
    for option in params.extra_args or {}:
        if option == "cfg_scale":
            raise InvalidRequestError("cfg_scale: classifier-free guidance is not supported; leave it unset")
    if params.logprobs is not None and not 0 <= params.logprobs <= hf_config.vocab_size:
        raise InvalidRequestError(
            f"logprobs={params.logprobs} is not supported for diffusion models; name how many of the "
            f"{hf_config.vocab_size} tokens to report, 0 for the response's own"
        )
    if not prompt_token_ids:
        raise InvalidRequestError("the prompt is empty; give at least one token")
    if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= hf_config.vocab_size:
        position = next(i for i, token in enumerate(prompt_token_ids) if not 0 <= token < hf_config.vocab_size)
        raise InvalidRequestError(
            f"the prompt contains token id {prompt_token_ids[position]} at position {position}, outside the "
            f"vocabulary of {hf_config.vocab_size}"
        )
    if hf_config.mask_token_id in prompt_token_ids:
        raise InvalidRequestError(
            f"the prompt contains the mask token (id {hf_config.mask_token_id}) at position "
            f"{prompt_token_ids.index(hf_config.mask_token_id)}; masks mark the response's positions and cannot be "
            f"prompted"
        )
    spec = resolve_decoding(params, len(prompt_token_ids), family, engine)
    if spec.canvas_length > max_model_len:
        raise InvalidRequestError(
            f"prompt ({spec.prompt_length} tokens) and gen_length={spec.gen_length} (max_tokens) need a canvas of "
            f"{spec.canvas_length}, max_model_len is {max_model_len}; shorten one or raise max_model_len"
        )
    return spec


def default_gen_length(prompt_length: int, max_model_len: int) -> int:
    """Response length of a request that names none: 256, or what fits (at least 1, so that the check explains)."""
    return max(min(DEFAULT_GEN_LENGTH, max_model_len - prompt_length), 1)


def install() -> None:
    """Put the checks into vLLM's input processor and its HTTP server. Idempotent; other models are untouched."""
    from vllm.v1.engine.input_processor import InputProcessor

    if getattr(InputProcessor, "_dllm_admission", False):
        return
    process_inputs = InputProcessor.process_inputs

    def checked(
        self: Any, request_id: str, prompt: Any, params: Any, supported_tasks: Any, *args: Any, **kwargs: Any
    ) -> Any:
        config = self.model_config.hf_config
        if getattr(self.model_config, "is_dllm_engine", False) and isinstance(params, SamplingParams):
            prompt = _rendered(self, prompt, kwargs.get("tokenization_kwargs"))
            if prompt["type"] != "token":
                raise InvalidRequestError(
                    "only text and token prompts are supported, no embeddings or other modalities"
                )
            prompt_token_ids = prompt.get("prompt_token_ids") or []
            max_model_len = self.model_config.max_model_len
            if isinstance(params, DiffusionParams):
                params = params.to_sampling_params()
            if params.max_tokens is None:
                params = params.clone()
                params.max_tokens = default_gen_length(len(prompt_token_ids), max_model_len)
            engine = EngineOptions.from_vllm_config(self.vllm_config)
            spec = check_request(params, prompt_token_ids, family_of(config), engine, config, max_model_len)
            if spec.streams_steps and params.output_kind is RequestOutputKind.FINAL_ONLY:
                raise InvalidRequestError(
                    "stream_granularity='step' needs a response that is streamed: set stream to true, or in Python use "
                    "vLLM's AsyncLLM; leave stream_granularity unset otherwise"
                )
            # The null block is not handed out; before the engine has told its size there is nothing to compare.
            if (num_blocks := self.vllm_config.cache_config.num_gpu_blocks) is not None:
                geometry = PoolGeometry.of_model(config, engine, self.vllm_config.parallel_config.tensor_parallel_size)
                check_page_demand(spec, engine, geometry, num_blocks - 1)
        return process_inputs(self, request_id, prompt, params, supported_tasks, *args, **kwargs)

    InputProcessor.process_inputs = checked
    InputProcessor._dllm_admission = True
    _refuse_clipping()


def _rendered(input_processor: Any, prompt: Any, tokenization_kwargs: dict[str, Any] | None) -> Any:
    """The prompt as token ids. ``AsyncLLM`` and ``LLMEngine`` also take raw prompts, which vLLM renders later."""
    from vllm.v1.engine.input_processor import parse_model_prompt

    if isinstance(prompt, dict) and "type" in prompt:
        return prompt
    renderer = input_processor.renderer
    parsed = parse_model_prompt(input_processor.model_config, prompt)
    settings = renderer.default_cmpl_tok_params.with_kwargs(**(tokenization_kwargs or {}))
    (rendered,) = renderer.render_cmpl([parsed], settings)
    return rendered


_serves_diffusion = False
_response_limit: int | None = None


def serve_diffusion(response_limit: int | None) -> None:
    """Note that this process serves one of our models: its server refuses what stock vLLM would clip.

    Args:
        response_limit: most response tokens, where whoever runs the server has set some.
    """
    global _serves_diffusion, _response_limit
    _response_limit = response_limit
    if not _serves_diffusion:
        _serves_diffusion = True
        _refuse_beam_search()
        _refuse_before_streaming()


def _refuse_before_streaming() -> None:
    """vLLM's server gives a streamed response the status 200, and ``AsyncLLM.generate`` checks the request when it is
    asked for the first result. Check when it is called, so that a refusal has its own status, streamed or not.

    What vLLM cannot send to its engine process (half a surrogate pair, integers beyond 64 bits) is refused too: vLLM
    finds out when it has noted the request already, answers 500, and keeps it for ever.
    """
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.serial_utils import MsgpackEncoder

    generate, respond = AsyncLLM.generate, OpenAIServingResponses._generate_with_builtin_tools
    encode = MsgpackEncoder().encode

    def generate_if_valid(
        self: Any, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        # The server renders prompts beforehand. Others wait for the generator, which renders off the event loop.
        if getattr(self.model_config, "is_dllm_engine", False) and isinstance(prompt, dict) and "type" in prompt:
            to_send = {name: kwargs.get(name) for name in ("data_parallel_rank", "session_id")}
            request = self.input_processor.process_inputs(request_id, prompt, sampling_params, ("generate",), **to_send)
            try:
                encode(request)
            except (ValueError, OverflowError) as error:
                raise InvalidRequestError(
                    f"the request cannot be sent to the engine: {error}; text must be valid Unicode, an integer have "
                    f"at most 64 bits"
                ) from None
        results: AsyncGenerator[Any, None] = generate(self, prompt, sampling_params, request_id, **kwargs)
        return results

    def respond_if_valid(
        self: Any, request_id: str, engine_input: Any, sampling_params: SamplingParams, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        # `/v1/responses` calls `generate` in a generator of its own. To be checked it is enough to be called.
        self.engine_client.generate(engine_input, sampling_params, request_id, session_id=kwargs.get("session_id"))
        results: AsyncGenerator[Any, None] = respond(self, request_id, engine_input, sampling_params, *args, **kwargs)
        return results

    AsyncLLM.generate = generate_if_valid
    OpenAIServingResponses._generate_with_builtin_tools = respond_if_valid


def _refuse_beam_search() -> None:
    """vLLM's beam search asks for one token at a time with its alternatives, which would be served, but mean nothing:
    a diffusion model has no prefix to extend."""
    from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin

    message = "beam search is not supported for diffusion models; use n with a temperature above 0"
    offline, online = BeamSearchOfflineMixin.beam_search, BeamSearchOnlineMixin.beam_search

    def beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.model_config, "is_dllm_engine", False):
            raise InvalidRequestError(message)
        return offline(self, *args, **kwargs)

    def beam_search_online(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.model_config, "is_dllm_engine", False):
            raise InvalidRequestError(message)
        return online(self, *args, **kwargs)

    BeamSearchOfflineMixin.beam_search = beam_search
    BeamSearchOnlineMixin.beam_search = beam_search_online


def _refuse_clipping() -> None:
    """vLLM's server silently shortens ``max_tokens`` to what is left of the context, or to the ``max_new_tokens`` of
    its generation config; refuse such a request instead.

    The function is imported by name, so it is replaced wherever it has been imported already.
    """
    from vllm.entrypoints.serve.utils import api_utils

    clipping: Callable[..., int] = api_utils.get_max_tokens

    def get_max_tokens(max_model_len: int, max_tokens: int | None, input_length: int, *args: Any, **kwargs: Any) -> int:
        if not _serves_diffusion or max_tokens is None:
            return clipping(max_model_len, max_tokens, input_length, *args, **kwargs)
        if input_length + max_tokens > max_model_len:
            raise InvalidRequestError(
                f"prompt ({input_length} tokens) and max_tokens={max_tokens} need a canvas of "
                f"{input_length + max_tokens}, max_model_len is {max_model_len}; shorten one or raise max_model_len"
            )
        if _response_limit is not None and max_tokens > _response_limit:
            raise InvalidRequestError(
                f"max_tokens={max_tokens} is above this server's limit of {_response_limit} (max_new_tokens of its "
                f"generation config)"
            )
        # Asked for, it is meant: our default of max_new_tokens is for requests that name no length.
        return max_tokens

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm.") and getattr(module, "get_max_tokens", None) is clipping:
            module.get_max_tokens = get_max_tokens  # type: ignore[attr-defined]
