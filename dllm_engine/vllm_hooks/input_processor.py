"""Checks of requests by our rules (``admission.py``), in
``InputProcessor.process_inputs``, which every front end calls.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from dllm_engine.admission import admitted
from dllm_engine.decoding.option_types import MOST_TOKENS
from dllm_engine.infill.template import nothing
from dllm_engine.lengths.forward_passes import served_result
from dllm_engine.lengths.requests import (
    AutoLength,
    LengthChoice,
    has_open_length,
    own_copy,
    with_lengths,
)
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.request_options.sampling_params import (
    SOURCE,
    DefaultLength,
    ResponseLimit,
)
from dllm_engine.structured_output.automata import count_request
from dllm_engine.structured_output.requests import (
    Constraints,
    ReasoningArguments,
    has_grammar,
    reading,
    with_arguments,
)
from dllm_engine.vllm_hooks.patch import Original, is_ours
from dllm_engine.vllm_hooks.server.error_forms import is_anthropic
from dllm_engine.vllm_hooks.server.open_requests import OpenRequest, open_request

NO_BEAM_SEARCH = (
    "beam search is not supported for diffusion models; use n with a temperature "
    "above 0"
)
_CHECKED_REQUEST = "dllm_engine_request"
"""Key of a rendered prompt for its checked request, which ``process_inputs`` has made.
"""


def process_checked_inputs(
    process_inputs: Original,
    self: Any,
    request_id: str,
    prompt: Any,
    params: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Check a request before it enters the engine."""
    if not is_ours(self) or not isinstance(params, SamplingParams):
        params = _as_made(params)
        return process_inputs(self, request_id, prompt, params, *args, **kwargs)
    # vLLM modifies a request, so this one is used only once.
    if (
        isinstance(prompt, dict)
        and (request := prompt.pop(_CHECKED_REQUEST, None)) is not None
    ):
        request.request_id = request_id
        return request
    if kwargs.get("lora_request") is not None:
        raise InvalidRequestError(
            "lora_request: an adapter serves all requests of an engine; leave it out, "
            "and start an engine with the adapter's folder as lora_path"
        )
    prompt = _rendered(self, prompt, kwargs.get("tokenization_kwargs"))
    if prompt["type"] != "token":
        raise InvalidRequestError(
            "only text and token prompts are supported, no embeddings or other "
            "modalities"
        )
    is_constrained = params.structured_outputs is not None
    prompt_token_ids = prompt.get("prompt_token_ids") or []
    params = admitted(params, prompt_token_ids, self.tokenizer, self.vllm_config)
    # vLLM refuses budgets of reasoning that it cannot enforce itself.
    budget, params.thinking_token_budget = params.thinking_token_budget, None
    request = process_inputs(self, request_id, prompt, params, *args, **kwargs)
    request.sampling_params.thinking_token_budget = budget
    _check_can_be_sent(request)
    if is_constrained:
        count_request()
    return request


def _check_can_be_sent(request: EngineCoreRequest) -> None:
    """Refuse a request that cannot be encoded. vLLM would notice it only after
    registering the request, answer 500 and never drop it.
    """
    try:
        MsgpackEncoder().encode(request)
    except (ValueError, OverflowError, TypeError) as error:
        raise InvalidRequestError(
            f"the request cannot be sent to the engine: {error}; text must be valid "
            f"Unicode, and integers must have at most 64 bits"
        ) from None


def _is_rendered(prompt: Any) -> bool:
    return isinstance(prompt, dict) and "type" in prompt


def _rendered(
    input_processor: Any, prompt: Any, tokenization_kwargs: dict[str, Any] | None
) -> Any:
    """The prompt as token ids. ``AsyncLLM`` and ``LLMEngine`` also take raw prompts,
    which vLLM renders later.
    """
    from vllm.v1.engine.input_processor import parse_model_prompt

    if _is_rendered(prompt):
        return prompt
    renderer = input_processor.renderer
    parsed = parse_model_prompt(input_processor.model_config, prompt)
    settings = renderer.default_cmpl_tok_params.with_kwargs(
        **(tokenization_kwargs or {})
    )
    (rendered,) = renderer.render_cmpl([parsed], settings)
    return rendered


def generate_if_valid(
    generate: Original,
    self: Any,
    prompt: Any,
    sampling_params: SamplingParams,
    request_id: str,
    **kwargs: Any,
) -> AsyncGenerator[Any, None]:
    """Check a request when ``AsyncLLM.generate`` is called. vLLM checks it when the
    first result is requested, but then a streamed response has the status 200 already,
    and some routes of vLLM have no form for an error of a single request.
    """
    if not is_ours(self):
        return generate(self, prompt, sampling_params, request_id, **kwargs)
    http_request = open_request.get()
    if http_request is not None:
        # Do this here, because vLLM reads a raw prompt in a thread, without
        # ``open_request``.
        sampling_params = sampling_params.clone()
        extra_args = {**(sampling_params.extra_args or {}), **http_request.carried}
        sampling_params.extra_args = {**extra_args, SOURCE: http_request.name}
    choice = _length_choice(self, http_request, sampling_params)
    call = _GenerateCall(generate, self, prompt, request_id, kwargs, choice)
    if not has_grammar(sampling_params):
        return call.outputs(sampling_params, http_request)
    if http_request is not None:
        # vLLM passes that reasoning has ended if it should not be included. But its
        # parser then takes the whole response for reasoning.
        call.arguments["reasoning_ended"] = None
    sampling_params = with_arguments(sampling_params, call.arguments)
    constraints = Constraints.of(
        sampling_params, self.input_processor.tokenizer, self.vllm_config
    )
    if constraints.is_prepared(prompt):
        return call.outputs(sampling_params, http_request)
    return call.outputs_when_built(sampling_params, http_request, constraints)


@dataclass
class _GenerateCall:
    """A call of ``AsyncLLM.generate`` for a model of ours."""

    generate: Original
    engine: Any
    prompt: Any
    request_id: str
    arguments: dict[str, Any]
    choice: LengthChoice | None

    def outputs(
        self, params: SamplingParams, http_request: OpenRequest | None
    ) -> AsyncGenerator[Any, None]:
        """The outputs of a checked request."""
        if self.choice is None:
            outputs = self._checked(self.prompt, params)
        else:
            params = own_copy(params)
            if _is_rendered(self.prompt):
                # Refuse what cannot be served before a stream has its status.
                self._check_begun(self.choice, self.prompt, params)
            outputs = self._with_length(self.choice, params)
        return (
            outputs if http_request is None else http_request.outputs(outputs, params)
        )

    async def outputs_when_built(
        self,
        params: SamplingParams,
        http_request: OpenRequest | None,
        constraints: Constraints,
    ) -> AsyncGenerator[Any, None]:
        """The outputs of a request, which is checked when its automata are built."""
        await constraints.prepare([self.prompt])
        async with aclosing(self.outputs(params, http_request)) as outputs:
            async for output in outputs:
                yield output

    def _checked(
        self, prompt: Any, params: SamplingParams
    ) -> AsyncGenerator[Any, None]:
        prompt = _checked_prompt(
            self.engine, prompt, params, self.request_id, self.arguments
        )
        return self.generate(
            self.engine, prompt, params, self.request_id, **self.arguments
        )

    def _check_begun(
        self, choice: LengthChoice, prompt: Any, params: SamplingParams
    ) -> None:
        _check_begun(
            self.engine, choice, prompt, params, self.request_id, self.arguments
        )

    async def _with_length(
        self, choice: LengthChoice, params: SamplingParams
    ) -> AsyncGenerator[Any, None]:
        """The outputs of a request whose lengths are chosen first."""
        rendered = _unchecked(self.prompt)
        input_processor = self.engine.input_processor
        if not _is_rendered(self.prompt):
            settings = self.arguments.get("tokenization_kwargs")
            rendered = await reading(_rendered, input_processor, self.prompt, settings)
            self._check_begun(choice, rendered, params)
        tokens = rendered["prompt_token_ids"]
        settled = await choice.settle(self.engine, tokens, params)
        rendered = {**rendered, "prompt_token_ids": list(settled.prompt)}
        if settled.whole is not None:
            tokenizer = input_processor.tokenizer
            yield nothing(self.request_id, rendered, params, settled.whole, tokenizer)
            return
        async with aclosing(self._checked(rendered, params)) as outputs:
            async for output in outputs:
                for completion in output.outputs:
                    await served_result(self.engine, settled.cut(completion))
                    if completion.finish_reason == "length" and not settled.is_cut:
                        completion.finish_reason = "stop"
                yield output


def _length_choice(
    engine: Any, http_request: OpenRequest | None, params: SamplingParams
) -> LengthChoice | None:
    """The choice of a request's lengths; None: the request names them."""
    if http_request is not None and http_request.filling is not None:
        return http_request.filling.at(len(http_request.latest))
    if is_ours(engine) and has_open_length(params, engine.vllm_config):
        return AutoLength(params)
    return None


def _check_begun(
    engine: Any,
    choice: LengthChoice,
    prompt: Any,
    params: SamplingParams,
    request_id: str,
    arguments: dict[str, Any],
) -> None:
    """Check a request with the shortest length of ``choice``. This changes ``params``."""
    choice.begin(engine, prompt.get("prompt_token_ids") or [], params)
    _checked_prompt(engine, _unchecked(prompt), params, request_id, arguments)


def _unchecked(prompt: Any) -> Any:
    """The prompt without its checked request, which was made with another length."""
    if not isinstance(prompt, dict):
        return prompt
    return {name: x for name, x in prompt.items() if name != _CHECKED_REQUEST}


def add_with_lengths(
    render_and_add: Original,
    self: Any,
    prompts: Iterable[Any],
    params: Sequence[Any],
    **kwargs: Any,
) -> list[str]:
    """Choose the lengths of all requests together, before the engine runs one."""
    config = self.llm_engine.vllm_config
    if is_ours(self.llm_engine) and any(has_open_length(x, config) for x in params):
        prompts = list(prompts)
        params = with_lengths(self, prompts, params)
    return render_and_add(self, prompts, params, **kwargs)


async def render_and_build(
    render: Original, self: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Build the automaton of a request after vLLM has rendered the prompt, and before
    it checks the request. Building takes seconds, and the server must answer others
    meanwhile.
    """
    rendered = await render(self, request, *args, **kwargs)
    if is_ours(self):
        params = getattr(request, "sampling_params", None)  # for the route of token ids
        extract = getattr(request, "extract_structured_outputs", None)
        structured = (
            extract() if extract else getattr(params, "structured_outputs", None)
        )
        budget = getattr(params or request, "thinking_token_budget", None)
        if structured is not None or budget is not None:
            has_template = hasattr(request, "build_chat_params")
            parser = None
            if has_template:
                arguments = self.effective_chat_template_kwargs(request)
                parser = {"chat_template_kwargs": arguments}
            constraints = Constraints(
                structured,
                ReasoningArguments(None, parser, budget),
                self.renderer.tokenizer,
                self.renderer.config,
            )
            await constraints.prepare(rendered[1] if has_template else rendered)
    return rendered


async def let_others_run(trace_headers: Original, self: Any, headers: Any) -> Any:
    """Let other requests run when vLLM reads the headers for a prompt, because it
    prepares all prompts of a request without a pause.
    """
    if is_ours(self):
        await asyncio.sleep(0)
    return await trace_headers(self, headers)


def respond_if_valid(
    respond: Original,
    self: Any,
    request_id: str,
    engine_input: Any,
    sampling_params: Any,
    *args: Any,
    **kwargs: Any,
) -> AsyncGenerator[Any, None]:
    """Check a request of ``/v1/responses`` when its generator is made. The generator
    calls ``generate`` later.
    """
    engine = self.engine_client
    with_reasoning = with_arguments(sampling_params, kwargs)
    choice = _length_choice(engine, None, sampling_params)
    if choice is not None:
        begun = own_copy(with_reasoning)
        _check_begun(engine, choice, engine_input, begun, request_id, kwargs)
        return respond(self, request_id, engine_input, with_reasoning, *args, **kwargs)
    engine_input = _checked_prompt(
        engine, engine_input, with_reasoning, request_id, kwargs
    )
    if is_ours(engine):
        sampling_params.max_tokens = engine_input[
            _CHECKED_REQUEST
        ].sampling_params.max_tokens  # the response contains it
    return respond(self, request_id, engine_input, with_reasoning, *args, **kwargs)


def _checked_prompt(
    engine: Any,
    prompt: Any,
    params: SamplingParams,
    request_id: str,
    arguments: dict[str, Any],
) -> Any:
    """The prompt with its checked request. A raw prompt is returned unchanged: vLLM's
    generator renders it outside the event loop, and it is checked then."""
    if not is_ours(engine) or not _is_rendered(prompt) or _CHECKED_REQUEST in prompt:
        return prompt
    names = (
        "lora_request",
        "trace_headers",
        "priority",
        "data_parallel_rank",
        "session_id",
        "kv_hints",
    )
    carried = {name: arguments[name] for name in names if name in arguments}
    request = engine.input_processor.process_inputs(
        request_id, prompt, params, ("generate",), **carried
    )
    return {**prompt, _CHECKED_REQUEST: request}


class KeptFilters(dict):
    """``extra_args`` of greedy parameters, with their original ``top_p`` and ``top_k``."""

    def __init__(self, made_with: Mapping[str, Any], original: dict[str, Any] | None):
        super().__init__({**made_with, **(original or {})})
        self.original = original

    def __reduce__(self) -> Any:  # needed for copies
        return KeptFilters, (dict(self), self.original)


def keep_filters(verify: Original, self: SamplingParams) -> None:
    """Keep ``top_p`` and ``top_k`` of a greedy request in ``extra_args``. vLLM calls
    this when parameters are made, and then resets its own fields for every model. The
    model is not known yet; for another model ``process_checked_inputs`` removes them
    again.
    """
    verify(self)
    if self.temperature == 0 and (self.top_p != 1.0 or self.top_k > 0):
        filters = {"top_p": self.top_p, "top_k": min(max(self.top_k, 0), MOST_TOKENS)}
        self.extra_args = KeptFilters(filters, self.extra_args)


def _as_made(params: Any) -> Any:
    """Parameters for another model, without the additions of ``keep_filters``."""
    if isinstance(kept := getattr(params, "extra_args", None), KeptFilters):
        params = params.clone()
        params.extra_args = kept.original
    return params


def refuse_beam_search(
    beam_search: Original, self: Any, *args: Any, **kwargs: Any
) -> Any:
    """Refuse vLLM's beam search, which requests one token at a time with its
    alternatives: a diffusion model has no prefix to extend.
    """
    if is_ours(self):
        raise InvalidRequestError(NO_BEAM_SEARCH)
    return beam_search(self, *args, **kwargs)


def refuse_clipping(
    clipping: Original,
    max_model_len: int,
    max_tokens: int | None,
    input_length: int,
    default_sampling_params: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> int:
    """Refuse a ``max_tokens`` that vLLM's server would silently shorten to the
    ``max_new_tokens`` of its generation config, and never shorten to our default. The
    request's check refuses a length that exceeds the context, unless it is only a
    limit."""
    stated = default_sampling_params.get("max_tokens")
    if not isinstance(stated, DefaultLength | ResponseLimit):  # of another model
        return clipping(
            max_model_len,
            max_tokens,
            input_length,
            default_sampling_params,
            *args,
            **kwargs,
        )
    http_request = open_request.get()
    limit = int(stated) if isinstance(stated, ResponseLimit) else None
    length_limit = None if http_request is None else http_request.length_limit
    if (
        length_limit is None
        and http_request is not None
        and is_anthropic(http_request.route)
    ):
        # This API requires a length, and its clients send thousands for any question,
        # so it is only a limit.
        length_limit = max_tokens
    if length_limit is not None:
        longest = min(max_model_len - input_length, limit or max_model_len)
        # At least 1, so that the check of the request explains the error.
        return max(min(length_limit, longest), 1)
    if max_tokens is None or (
        http_request is not None and http_request.leaves_length_open
    ):
        return DefaultLength(
            clipping(
                max_model_len,
                None,
                input_length,
                default_sampling_params,
                *args,
                **kwargs,
            )
        )
    if limit is not None and max_tokens > limit:
        raise InvalidRequestError(
            f"max_tokens={max_tokens} is above this server's limit of {limit} "
            f"(max_new_tokens of its generation config)"
        )
    return max_tokens
