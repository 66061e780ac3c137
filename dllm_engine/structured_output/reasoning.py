"""Reasoning in front of structured output, as a reasoning parser of vLLM describes it."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import SamplingParams

from dllm_engine.scheduler.options.request_options import REASONING, InvalidRequestError
from dllm_engine.structured_output.build import Grammar
from dllm_engine.structured_output.lifting import Reasoning


class ReasoningArguments(NamedTuple):
    """Arguments about reasoning that vLLM's front ends give beside the parameters."""

    ended: bool | None = None
    """True if the response begins behind reasoning; None: the prompt decides."""
    parser: Mapping[str, Any] | None = None
    """Arguments of the request's reasoning parser."""


def with_arguments(params: Any, arguments: Mapping[str, Any]) -> Any:
    """The parameters with those arguments of ``AsyncLLM.generate`` that are about reasoning."""
    carried = ReasoningArguments(arguments.get("reasoning_ended"), arguments.get("reasoning_parser_kwargs"))
    if getattr(params, "structured_outputs", None) is None or carried == ReasoningArguments():
        return params
    params = params.clone()
    params.extra_args = {**(params.extra_args or {}), REASONING: carried}
    return params


def arguments_in(params: SamplingParams) -> ReasoningArguments:
    """Arguments noted by ``with_arguments``."""
    given = (params.extra_args or {}).get(REASONING)
    return given if isinstance(given, ReasoningArguments) else ReasoningArguments()


def reasoning_before(
    arguments: ReasoningArguments, prompt_token_ids: Sequence[int], tokenizer: Any, vllm_config: Any
) -> Grammar | None:
    """The grammar of the reasoning that a request's constrained text follows; None where it begins the response.

    Raises ``InvalidRequestError`` where the parser does not suit the tokenizer, or does not say what ends reasoning.
    """
    settings = vllm_config.structured_outputs_config
    if not settings.reasoning_parser or settings.enable_in_reasoning or arguments.ended:
        return None
    about = f"structured_outputs: the engine's reasoning_parser={settings.reasoning_parser!r}"
    try:
        parser_class = _parser(settings.reasoning_parser, settings.reasoning_parser_plugin)
        parser = parser_class(tokenizer, **(arguments.parser or {}))
    except Exception as error:  # each parser raises its own
        raise InvalidRequestError(f"{about} fails: {error}") from error
    if arguments.ended is None and parser.is_reasoning_end(prompt_token_ids):
        return None
    if parser.reasoning_end_str is None:
        raise InvalidRequestError(
            f"{about} does not name the text that ends reasoning (reasoning_end_str); start the engine with another "
            f"parser, or with enable_in_reasoning in structured_outputs_config"
        )
    vocabulary = tokenizer.get_vocab()
    tokens = (vocabulary.get(marker) for marker in (parser.reasoning_end_str, parser.reasoning_start_str))
    return Grammar("reasoning", json.dumps(Reasoning(parser.reasoning_end_str, *tokens)))


@cache
def _parser(name: str, plugin: str) -> Any:
    if plugin:
        ReasoningParserManager.import_reasoning_parser(plugin)
    return ReasoningParserManager.get_reasoning_parser(name)
