"""Requests whose length forward passes choose before the engine gets them."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams

from dllm_engine.admission import admitted, open_length_rule, shortest_text
from dllm_engine.families import model_end_tokens
from dllm_engine.lengths.forward_passes import Passes, result_of, served_result
from dllm_engine.lengths.responses import (
    ChosenLength,
    OpenResponse,
    chosen_lengths,
)
from dllm_engine.options import EngineOptions
from dllm_engine.params import DiffusionParams
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.request_options.fields import check_attention
from dllm_engine.request_options.layout import (
    LENGTH_RULE_OPTIONS,
    MOST_CHOSEN,
    LengthRule,
)
from dllm_engine.request_options.sampling_params import (
    LENGTH_FIGURES,
    DefaultLength,
    parse_request_options,
)
from dllm_engine.structured_output.requests import constrained


def _uncut(completion: CompletionOutput) -> Passes[None]:
    yield from ()


class Settled(NamedTuple):
    """A response whose length is known."""

    prompt: Sequence[int]
    """The prompt. Its end may be part of the response now."""
    whole: Sequence[int] | None = None
    """All returned tokens, if nothing is left to write."""
    is_cut: bool = True
    """True if a longer response might have been written."""
    cut: Callable[[CompletionOutput], Passes[None]] = _uncut
    """Changes the text of a completion to what is returned."""


class LengthChoice(Protocol):
    """The choice of the lengths of a request. It changes the request's parameters."""

    def begin(self, engine: Any, prompt: Sequence[int], params: SamplingParams) -> None:
        """Set a short length in the parameters, so that they can be checked."""

    async def settle(
        self, engine: Any, prompt: Sequence[int], params: SamplingParams
    ) -> Settled:
        """Set the chosen length in the parameters."""


class AutoLength:
    """The choice of the length of a whole response."""

    def __init__(self, params: SamplingParams) -> None:
        """``params``: as the request gave them."""
        self._params = params

    def response(self, engine: Any, prompt: Sequence[int]) -> OpenResponse:
        tokenizer = engine.input_processor.tokenizer
        return open_response(self._params, prompt, tokenizer, engine.vllm_config)

    def begin(self, engine: Any, prompt: Sequence[int], params: SamplingParams) -> None:
        set_length(params, ChosenLength(self.response(engine, prompt).first))

    async def settle(
        self, engine: Any, prompt: Sequence[int], params: SamplingParams
    ) -> Settled:
        passes = chosen_lengths([self.response(engine, prompt)])
        (chosen,) = await served_result(engine, passes)
        set_length(params, chosen)
        return Settled(prompt)


def has_open_length(params: Any, vllm_config: Any) -> bool:
    """Return True for a request whose length is to be chosen."""
    return isinstance(params, SamplingParams) and _rule(params, vllm_config) is not None


def _rule(params: SamplingParams, vllm_config: Any) -> LengthRule | None:
    engine = EngineOptions.from_vllm_config(vllm_config)
    extra_args = params.extra_args
    if not isinstance(extra_args, dict):  # refused when the request is added
        extra_args = {}
    return open_length_rule(extra_args, engine, ignore_eos=params.ignore_eos)


def open_response(
    params: SamplingParams,
    prompt: Sequence[int],
    tokenizer: Any,
    vllm_config: Any,
) -> OpenResponse:
    """The response of a request that ``has_open_length``. Other options of the request
    may need more tokens than the rule begins with.
    """
    hf_config = vllm_config.model_config.hf_config
    rule = _rule(params, vllm_config)
    assert rule is not None, "has_open_length"
    named = {name: x for name, x in (params.extra_args or {}).items() if name in _NEEDS}
    options = parse_request_options({"auto_length": True, **named})
    check_attention(options, hf_config.family)
    end_tokens = model_end_tokens(hf_config)
    if not end_tokens:
        raise InvalidRequestError(
            "auto_length=True: the model's config names no eos_token_id, by which the "
            "length would be chosen; give gen_length (max_tokens)"
        )
    max_tokens = _most(params, len(prompt), vllm_config)
    built = constrained(params, prompt, max_tokens, tokenizer, vllm_config)
    min_tokens = max(
        rule.start,
        params.min_tokens,
        2 * shortest_text(built, hf_config),
        *(getattr(options, name) or 0 for name in _NEEDS),
    )
    return OpenResponse(
        prompt, end_tokens[0], min(min_tokens, max_tokens), max_tokens, rule
    )


_NEEDS = ("block_length", "steps")
"""Options whose value is the least number of tokens of a response."""


def _most(params: SamplingParams, prompt_length: int, vllm_config: Any) -> int:
    """Limit on the tokens of a response: the request's limit, or what fits. At least 1,
    so that a later check refuses the request with its reason."""
    config = vllm_config.model_config
    limit = params.max_tokens
    if limit is None or isinstance(limit, DefaultLength):
        limit = config.dllm_response_limit or MOST_CHOSEN
    rows = vllm_config.scheduler_config.max_num_batched_tokens
    return max(min(limit, min(config.max_model_len, rows) - prompt_length), 1)


def with_lengths(llm: Any, prompts: Sequence[Any], params: Sequence[Any]) -> list[Any]:
    """The parameters of an offline engine's requests, with a chosen length if theirs is
    open. Raises the same as ``admitted``, before any pass.
    """
    engine = llm.llm_engine
    settled, responses = list(params), {}
    for place, request_params in enumerate(params):
        if not has_open_length(request_params, engine.vllm_config):
            continue
        settled_params = settled[place] = own_copy(request_params)
        prompt = prompts[place].get("prompt_token_ids") or []
        choice = AutoLength(request_params)
        choice.begin(engine, prompt, settled_params)
        admitted(
            settled_params, prompt, engine.input_processor.tokenizer, engine.vllm_config
        )
        responses[place] = choice.response(engine, prompt)
    chosen = result_of(llm, chosen_lengths([*responses.values()]))
    for place, length in zip(responses, chosen, strict=True):
        set_length(settled[place], length)
    return settled


def set_length(params: SamplingParams, chosen: ChosenLength) -> None:
    """Set the chosen length in the parameters."""
    extra_args = params.extra_args or {}
    kept = {
        name: x for name, x in extra_args.items() if name not in LENGTH_RULE_OPTIONS
    }
    figures = {"length_passes": chosen.passes, "length_rows": chosen.rows}
    params.extra_args = {
        **kept,
        "auto_length": False,
        LENGTH_FIGURES: json.dumps(figures).encode(),
    }
    params.max_tokens = chosen.length


def own_copy(params: SamplingParams) -> SamplingParams:
    """A copy of a request's parameters, of vLLM's class."""
    if isinstance(params, DiffusionParams):
        return params.to_sampling_params()
    return params.clone()
