"""Requests with structured output: an automaton takes the place of vLLM's field and travels in ``extra_args``."""

import asyncio
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any

from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.constraints.automaton import Automaton
from dllm_engine.scheduler.options.request_options import CONSTRAINT, REASONING, InvalidRequestError
from dllm_engine.structured_output.automata import automaton_of, awaited_automaton, begun_character, known_vocabulary
from dllm_engine.structured_output.build import Grammar, Limits
from dllm_engine.structured_output.grammar import grammar_of
from dllm_engine.structured_output.reasoning import ReasoningArguments, arguments_in, reasoning_before
from dllm_engine.structured_output.vocabulary import Vocabulary

_prepared: ContextVar[tuple[Grammar, Any, Automaton] | None] = ContextVar("_prepared", default=None)
"""The automaton of the request that a task is about, with its grammar and its engine's config."""


_waiting: dict[asyncio.Future[Automaton], Exception | None] = {}
"""Requests that wait for their automata, each with the error that ended its waiting."""


async def prepare(
    structured: StructuredOutputsParams, tokenizer: Any, vllm_config: Any, reasoning: Iterable[Grammar] = ()
) -> None:
    """Build the automaton, and those of the reasoning before its text, without holding up the event loop;
    ``constrained`` takes them later in the same task.

    Raises as ``grammar_of``, ``known_vocabulary`` and ``awaited_automaton``, and the error of ``end_waiting``.
    """
    grammar = grammar_of(structured)
    vocabulary = await asyncio.to_thread(known_vocabulary, tokenizer, _vocab_size(vllm_config))
    for before in reasoning:
        await _built(before, vocabulary, vllm_config)
    _prepared.set((grammar, vllm_config, await _built(grammar, vocabulary, vllm_config)))


async def _built(grammar: Grammar, vocabulary: Vocabulary, vllm_config: Any) -> Automaton:
    with awaited_automaton(grammar, vocabulary, _limits(vllm_config)) as future:
        waiting = asyncio.wrap_future(future)
        _waiting[waiting] = None
        try:
            return await waiting
        except asyncio.CancelledError:
            if (error := _waiting[waiting]) is not None:
                raise error from None
            raise
        finally:
            del _waiting[waiting]


def end_waiting(error: Exception) -> None:
    """End all requests that wait for their automata with an error. To be called in the event loop."""
    for waiting in _waiting:
        _waiting[waiting] = error
        waiting.cancel()


def is_prepared(structured: StructuredOutputsParams, vllm_config: Any) -> bool:
    """Return True if this task has the automaton, so that ``constrained`` need not wait."""
    return _prepared_for(grammar_of(structured), vllm_config) is not None


def _prepared_for(grammar: Grammar, vllm_config: Any) -> Automaton | None:
    prepared = _prepared.get()
    if prepared is None or prepared[0] != grammar or prepared[1] is not vllm_config:
        return None
    return prepared[2]


def constrained(
    params: SamplingParams, prompt_token_ids: Sequence[int], tokenizer: Any, vllm_config: Any
) -> SamplingParams:
    """The parameters with an automaton in place of ``structured_outputs``, of which vLLM would make a matcher of its
    own; and with one of the reasoning before it, if the response begins with that.

    Args:
        params: of vLLM's own class; not changed.
        tokenizer: the model's, or None.

    Raises as ``grammar_of``, ``automaton_of`` and ``reasoning_before``.
    """
    if params.structured_outputs is None:
        return params
    grammar = grammar_of(params.structured_outputs)
    automaton = _prepared_for(grammar, vllm_config) or _automaton(grammar, tokenizer, vllm_config)
    carried = {CONSTRAINT: automaton.packed}
    reasoning = reasoning_before(arguments_in(params), prompt_token_ids, tokenizer, vllm_config)
    if reasoning is not None:
        carried[REASONING] = _automaton(reasoning, tokenizer, vllm_config).packed
    asked = {
        name: value for name, value in (params.extra_args or {}).items() if not isinstance(value, ReasoningArguments)
    }
    params = params.clone()
    params.structured_outputs = None
    params.extra_args = carried | asked
    return params


def check_prompt_end(prompt_token_ids: Sequence[int], tokenizer: Any, vllm_config: Any) -> None:
    """Raise ``InvalidRequestError`` for a prompt that ends inside a character: the text of its response begins with
    that character, which no constraint knows of."""
    begun = begun_character(prompt_token_ids, tokenizer, _vocab_size(vllm_config))
    if begun:
        raise InvalidRequestError(
            f"structured_outputs: prompt_token_ids ends inside a character, with the bytes {begun.hex(' ')} of it, so "
            f"that the text of the response cannot match; end the prompt with a whole character"
        )


def _automaton(grammar: Grammar, tokenizer: Any, vllm_config: Any) -> Automaton:
    return automaton_of(grammar, tokenizer, _vocab_size(vllm_config), _limits(vllm_config))


def _vocab_size(vllm_config: Any) -> int:
    size: int = vllm_config.model_config.hf_config.vocab_size
    return size


def _limits(vllm_config: Any) -> Limits:
    engine = EngineOptions.from_vllm_config(vllm_config)
    return Limits(engine.max_automaton_states, engine.max_automaton_seconds, engine.max_automaton_search)
