"""Requests with structured output: an automaton takes the place of vLLM's field and travels in ``extra_args``."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.options.request_options import CONSTRAINT, REASONING, InvalidRequestError
from dllm_engine.structured_output.automata import automaton
from dllm_engine.structured_output.build import BuildInput, Grammar
from dllm_engine.structured_output.reasoning import ReasoningArguments, arguments_in, reasoning_before
from dllm_engine.structured_output.vocabulary import vocabulary_of

LONGEST_GRAMMAR = 1 << 16
"""Characters of a regex, of the choices or of a schema as JSON. An automaton of more would have too many states."""
_REFUSED = {
    "grammar": "context-free grammars are not supported; use regex, choice or json",
    "structural_tag": "structural tags are not supported; use regex, choice or json",
    "whitespace_pattern": "not supported; JSON is written with at most one space behind a comma or a colon, or, with "
    "disable_any_whitespace, with none",
    "disable_additional_properties": "not supported; set additionalProperties to false in the schema",
}


def grammar_of(structured: StructuredOutputsParams) -> Grammar:
    """The grammar that a request names. It is read only where its automaton is built, since that may take long.

    Raises ``InvalidRequestError`` for a kind that is not supported, and for a text that is too long or none.
    """
    for name, reason in _REFUSED.items():
        if getattr(structured, name) not in (None, False):
            raise InvalidRequestError(f"structured_outputs.{name}: {reason}")
    spaces = not structured.disable_any_whitespace
    if structured.regex is not None:
        grammar = Grammar("regex", structured.regex)
    elif structured.choice is not None:
        if not structured.choice:
            raise InvalidRequestError("structured_outputs.choice: the list is empty")
        grammar = Grammar("choice", json.dumps(list(dict.fromkeys(structured.choice)), ensure_ascii=False))
    elif structured.json is not None:
        try:
            schema = json.loads(structured.json) if isinstance(structured.json, str) else structured.json
            grammar = Grammar("json", json.dumps(schema, ensure_ascii=False), spaces)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"structured_outputs.json: the schema is no JSON: {error}") from None
    elif structured.json_object is True:
        grammar = Grammar("json_object", "", spaces)
    else:
        raise InvalidRequestError("structured_outputs.json_object: only true is supported; leave it out otherwise")
    if len(grammar.text) > LONGEST_GRAMMAR:
        raise InvalidRequestError(
            f"structured_outputs.{grammar.kind}: its {len(grammar.text)} characters are more than the "
            f"{LONGEST_GRAMMAR} that are supported; give a shorter one, such as a schema without descriptions"
        )
    return grammar


async def prepare(
    structured: StructuredOutputsParams,
    prompts: Iterable[Any],
    arguments: ReasoningArguments,
    tokenizer: Any,
    vllm_config: Any,
) -> None:
    """Build the automaton, and those of the reasoning behind the prompts, without holding up the event loop.

    Raises as ``constrained``.
    """
    token_ids = (prompt.get("prompt_token_ids") for prompt in prompts if isinstance(prompt, dict))
    reasoning = {reasoning_before(arguments, tokens, tokenizer, vllm_config) for tokens in token_ids if tokens}
    for grammar in (grammar_of(structured), *filter(None, reasoning)):
        wanted = await asyncio.to_thread(build_input, grammar, tokenizer, vllm_config)
        await asyncio.wrap_future(automaton(wanted))


def is_prepared(structured: StructuredOutputsParams, tokenizer: Any, vllm_config: Any) -> bool:
    """Return True if the automaton is there, so that ``constrained`` need not wait; begin to build it otherwise."""
    return automaton(build_input(grammar_of(structured), tokenizer, vllm_config)).done()


def constrained(
    params: SamplingParams, prompt_token_ids: Sequence[int], tokenizer: Any, vllm_config: Any
) -> SamplingParams:
    """The parameters with an automaton in place of ``structured_outputs``, of which vLLM would make a matcher of its
    own; and with one of the reasoning before it, if the response begins with that.

    Args:
        params: of vLLM's own class; not changed.
        tokenizer: the model's, or None.

    Raises as ``grammar_of``, ``vocabulary_of``, ``automaton`` and ``reasoning_before``.
    """
    if params.structured_outputs is None:
        return params
    grammars = {
        CONSTRAINT: grammar_of(params.structured_outputs),
        REASONING: reasoning_before(arguments_in(params), prompt_token_ids, tokenizer, vllm_config),
    }
    built = {name: automaton(build_input(each, tokenizer, vllm_config)) for name, each in grammars.items() if each}
    given = params.extra_args or {}
    params = params.clone()
    params.structured_outputs = None
    params.extra_args = {name: future.result().packed for name, future in built.items()}
    params.extra_args |= {name: value for name, value in given.items() if not isinstance(value, ReasoningArguments)}
    return params


def build_input(grammar: Grammar, tokenizer: Any, vllm_config: Any) -> BuildInput:
    engine = EngineOptions.from_vllm_config(vllm_config)
    limits = (engine.max_automaton_states, engine.max_automaton_seconds, engine.max_automaton_search)
    return BuildInput(grammar, vocabulary_of(tokenizer, vllm_config.model_config.hf_config.vocab_size), *limits)
