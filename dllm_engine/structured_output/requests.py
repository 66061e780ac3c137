"""Requests with structured output. An automaton replaces vLLM's field and travels in
``extra_args``, together with an automaton of the reasoning before the answer, which
follows a reasoning parser of vLLM."""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple, Self

from tokenizers import Tokenizer
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import TokenizerLike

from dllm_engine.options import EngineOptions
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.request_options.sampling_params import CONSTRAINT, REASONING
from dllm_engine.structured_output.automata import built, is_kept, when_built
from dllm_engine.structured_output.build import BuildInput, Grammar
from dllm_engine.structured_output.compiler import Vocabulary
from dllm_engine.structured_output.prompt_reasoning import ends_reasoning

LONGEST_GRAMMAR = 1 << 16
"""Limit on a regex, or on choices or a schema as JSON, in characters. A longer one
would give an automaton with too many states.
"""
_READER = ThreadPoolExecutor(1, "vocabulary")
"""Thread that reads tokenizers, which takes a while the first time. vLLM's threads have
to tokenize prompts, and asyncio's threads are needed to end the server."""
_SAMPLE_SIZE = 256
"""Number of tokens that are decoded for the check."""
_REFUSED = {
    "grammar": "context-free grammars are not supported; use regex, choice or json",
    "structural_tag": "structural tags are not supported; use regex, choice or json",
    "whitespace_pattern": "not supported; JSON is written with at most one space behind a comma or a colon, or, with "
    "disable_any_whitespace, with none",
    "disable_additional_properties": (
        "not supported; set additionalProperties to false in the schema"
    ),
}


def grammar_of(structured: StructuredOutputsParams) -> Grammar:
    """The grammar of a request. It is parsed only when its automaton is built, because
    this may take long.

    Raises ``InvalidRequestError`` for a kind that is not supported, and for a text that
    is too long or missing.
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
        grammar = Grammar(
            "choice",
            json.dumps(list(dict.fromkeys(structured.choice)), ensure_ascii=False),
        )
    elif structured.json is not None:
        grammar = Grammar(
            "json", schema_text(structured.json, "structured_outputs.json"), spaces
        )
    elif structured.json_object is True:
        grammar = Grammar("json_object", "", spaces)
    else:
        raise InvalidRequestError(
            "structured_outputs.json_object: only true is supported; leave it out "
            "otherwise"
        )
    check_size(
        grammar.text,
        f"structured_outputs.{grammar.kind}",
        "shorten it, or leave out descriptions",
    )
    return grammar


def schema_text(schema: Any, name: str) -> str:
    """JSON text of a schema, which may be a text already. Raises
    ``InvalidRequestError`` if it is not JSON.
    """
    try:
        text = json.dumps(
            json.loads(schema) if isinstance(schema, str) else schema,
            ensure_ascii=False,
        )
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name}: the schema is not JSON: {error}") from None
    return text


def check_size(text: str, name: str, remedy: str) -> None:
    """Raise ``InvalidRequestError`` for a text that is too long. The message ends with
    ``remedy``.
    """
    if len(text) > LONGEST_GRAMMAR:
        raise InvalidRequestError(
            f"{name}: its {len(text)} characters are more than the {LONGEST_GRAMMAR} "
            f"that are supported; {remedy}"
        )


class ReasoningArguments(NamedTuple):
    """A request's settings about reasoning. vLLM's front ends pass the first two beside
    the parameters.
    """

    ended: bool | None = None
    """True if reasoning has ended before the response; None: the prompt decides."""
    parser: Mapping[str, Any] | None = None
    """Arguments of the request's reasoning parser."""
    budget: int | None = None
    """The most tokens of reasoning; None: any number."""

    def within(self, length: int) -> "ReasoningArguments":
        """These settings for a response of ``length`` tokens, without a budget that is
        as large.
        """
        needs_budget = self.budget is not None and self.budget < length
        return self if needs_budget else self._replace(budget=None)


def has_grammar(params: Any) -> bool:
    """Return True if a request needs an automaton, for structured output or a budget of
    reasoning.
    """
    fields = (
        getattr(params, name, None)
        for name in ("structured_outputs", "thinking_token_budget")
    )
    return any(value is not None for value in fields)


def with_arguments(params: Any, arguments: Mapping[str, Any]) -> Any:
    """The parameters, with the arguments of ``AsyncLLM.generate`` about reasoning in
    ``extra_args``.
    """
    carried = ReasoningArguments(
        arguments.get("reasoning_ended"), arguments.get("reasoning_parser_kwargs")
    )
    if not has_grammar(params) or carried == ReasoningArguments():
        return params
    params = params.clone()
    params.extra_args = {**(params.extra_args or {}), REASONING: carried}
    return params


@dataclass(frozen=True)
class Constraints:
    """What the responses of a request must match: its structured output (None: any
    text), and the reasoning at their start.
    """

    structured: StructuredOutputsParams | None
    reasoning: ReasoningArguments
    tokenizer: Any
    vllm_config: Any

    @classmethod
    def of(cls, params: SamplingParams, tokenizer: Any, vllm_config: Any) -> Self:
        """Constraints of parameters that ``with_arguments`` has returned."""
        stored = (params.extra_args or {}).get(REASONING)
        reasoning = (
            stored if isinstance(stored, ReasoningArguments) else ReasoningArguments()
        )
        reasoning = reasoning._replace(budget=params.thinking_token_budget)
        return cls(params.structured_outputs, reasoning, tokenizer, vllm_config)

    def within(self, length: int) -> Self:
        """The constraints of a response of ``length`` tokens."""
        return replace(self, reasoning=self.reasoning.within(length))

    async def prepare(self, prompts: Iterable[Any]) -> None:
        """Build the automata for requests with these prompts without blocking the event
        loop. Raises as ``constrained``.
        """
        for grammar in self._grammars_of_all(prompts):
            await when_built(await reading(self.build_input, grammar))

    def is_prepared(self, prompt: Any) -> bool:
        """Return True if the automata are cached, so that ``constrained`` does not
        wait.
        """
        grammars = self._grammars_of_all([prompt])
        return all(is_kept(self.build_input(grammar)) for grammar in grammars)

    def _grammars_of_all(self, prompts: Iterable[Any]) -> list[Grammar]:
        """Grammars of requests with these prompts. For a prompt that is not rendered
        yet, reasoning is unknown.
        """
        grammars = [] if self.structured is None else [grammar_of(self.structured)]
        for prompt in prompts:
            if isinstance(prompt, dict) and (tokens := prompt.get("prompt_token_ids")):
                room = self.vllm_config.model_config.max_model_len - len(tokens)
                grammars += self.within(room).grammars(tokens).values()
        return list(dict.fromkeys(grammars))

    def grammars(self, prompt_token_ids: Sequence[int]) -> dict[str, Grammar]:
        """Grammars of a request, by the keys of their automata in ``extra_args``."""
        grammars = {}
        if self.structured is not None:
            grammars[CONSTRAINT] = grammar_of(self.structured)
        if self.structured is not None or self.reasoning.budget is not None:
            reasoning = self.reasoning_before(prompt_token_ids)
            if reasoning is not None:
                grammars[REASONING] = reasoning
        return grammars

    def reasoning_before(self, prompt_token_ids: Sequence[int]) -> Grammar | None:
        """The grammar of the reasoning at the start of a response; None if the response
        starts with its answer.

        Raises ``InvalidRequestError`` if the parser does not suit the tokenizer, or
        does not name the text that ends reasoning.
        """
        settings = self.vllm_config.structured_outputs_config
        ended = self.reasoning.ended
        is_free = self.structured is None
        is_included = settings.enable_in_reasoning and not is_free
        if not settings.reasoning_parser or is_included or ended:
            return None
        setting = "thinking_token_budget" if is_free else "structured_outputs"
        about = (
            f"{setting}: the engine's reasoning_parser={settings.reasoning_parser!r}"
        )
        try:
            parser_class = _parser(
                settings.reasoning_parser, settings.reasoning_parser_plugin
            )
            parser = parser_class(self.tokenizer, **(self.reasoning.parser or {}))
        except Exception as error:  # each parser raises other errors
            raise InvalidRequestError(f"{about} fails: {error}") from error
        if ended is None and (
            parser.is_reasoning_end(prompt_token_ids)
            or ends_reasoning(prompt_token_ids, parser, self.tokenizer)
        ):
            return None
        if parser.reasoning_end_str is None:
            raise InvalidRequestError(
                f"{about} does not name the text that ends reasoning "
                f"(reasoning_end_str); start the engine with another parser, or with "
                f"enable_in_reasoning in structured_outputs_config"
            )
        vocabulary = self.tokenizer.get_vocab()
        tokens = (
            vocabulary.get(marker)
            for marker in (parser.reasoning_end_str, parser.reasoning_start_str)
        )
        return Grammar(
            "reasoning", json.dumps([parser.reasoning_end_str, *tokens, is_free])
        )

    def check_budget(self) -> None:
        """Raise ``InvalidRequestError`` if there is a budget of reasoning, but
        reasoning and answer cannot be told apart.
        """
        if self.reasoning.budget is None:
            return
        settings = self.vllm_config.structured_outputs_config
        reason = ""
        if not settings.reasoning_parser:
            if self.structured is None:
                reason = (
                    "the server does not tell reasoning from answers; start it with "
                    "--reasoning-parser"
                )
        elif settings.enable_in_reasoning and self.structured is not None:
            reason = (
                "with enable_in_reasoning, reasoning is a part of the text that must "
                "match; start the server without it"
            )
        else:
            try:
                self.vocabulary()
            except InvalidRequestError as error:
                reason = f"reasoning is bounded as structured output is; {error}"
        if reason:
            raise InvalidRequestError(
                f"thinking_token_budget={self.reasoning.budget} "
                f"(thinking.budget_tokens of /v1/messages): {reason}, or leave it out"
            )

    def vocabulary(self) -> Vocabulary:
        vocab_size = self.vllm_config.model_config.hf_config.vocab_size
        return vocabulary_of(self.tokenizer, vocab_size)

    def build_input(self, grammar: Grammar) -> BuildInput:
        engine = EngineOptions.from_vllm_config(self.vllm_config)
        return BuildInput(
            grammar,
            self.vocabulary(),
            engine.max_automaton_states,
            engine.max_automaton_seconds,
            engine.max_automaton_search,
        )


@cache
def _parser(name: str, plugin: str) -> Any:
    if plugin:
        ReasoningParserManager.import_reasoning_parser(plugin)
    return ReasoningParserManager.get_reasoning_parser(name)


async def reading(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that reads a tokenizer or a schema, in a thread for this purpose."""
    return await asyncio.get_running_loop().run_in_executor(_READER, function, *args)


def constrained(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    length: int,
    tokenizer: Any,
    vllm_config: Any,
) -> SamplingParams:
    """The parameters with an automaton in place of ``structured_outputs``, so that vLLM
    makes no matcher, and with an automaton of the reasoning at the start of the
    response, if there is any. ``length``: tokens of the response. A budget of reasoning
    is dropped if there is nothing to limit.

    Raises as ``grammar_of``, ``vocabulary_of``, ``built`` and ``Constraints``, and for
    a budget that cannot be enforced.
    """
    if not has_grammar(params):
        return params
    constraints = Constraints.of(params, tokenizer, vllm_config).within(length)
    constraints.check_budget()
    automata = {
        name: built(constraints.build_input(grammar))
        for name, grammar in constraints.grammars(prompt_token_ids).items()
    }
    budget = constraints.reasoning.budget if REASONING in automata else None
    others = {
        name: value
        for name, value in (params.extra_args or {}).items()
        if not isinstance(value, ReasoningArguments)
    }
    params = params.clone()
    params.structured_outputs = None
    params.thinking_token_budget = budget
    params.extra_args = {**automata, **others}
    return params


@lru_cache(maxsize=4)
def vocabulary_of(tokenizer: TokenizerLike | None, vocab_size: int) -> Vocabulary:
    """The bytes of the tokenizer's tokens, for as many tokens as the model predicts.
    Reading them takes a while the first time.

    Raises ``InvalidRequestError`` for a tokenizer whose texts are not the concatenated
    bytes of their tokens. ``tokenizer`` is None with ``skip_tokenizer_init``.
    """
    if tokenizer is None:
        raise InvalidRequestError(
            "structured_outputs needs a tokenizer: start the engine without "
            "skip_tokenizer_init"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise _refused("it is not one of Hugging Face's fast tokenizers")
    # Imported here, because it is slow, and only structured output needs it.
    from xgrammar import (
        TokenizerInfo,
        VocabType,
    )

    vocabulary = TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=0
    )
    if vocabulary.vocab_type == VocabType.RAW:
        raise _refused("its tokens are not bytes")
    added = backend.get_added_tokens_decoder()
    spelled = [
        b"" if number in added else text
        for number, text in enumerate(vocabulary.decoded_vocab)
    ]
    # Check that a sample of tokens decodes to its bytes, alone and together.
    used = [
        number
        for number, text in enumerate(spelled)
        if text and text.decode(errors="ignore").encode() == text
    ]
    sample = used[:: max(1, len(used) // _SAMPLE_SIZE)]
    spaced = [number for number in used if spelled[number].startswith(b" ")][:8]
    for numbers in (sample, *([number] for number in (*spaced, *sample[:32]))):
        text = b"".join(spelled[number] for number in numbers).decode()
        if backend.decode(numbers) != text:
            raise _refused("it decodes tokens to other text than the bytes of each")
    return Vocabulary(spelled)


@lru_cache(maxsize=4)
def serialized_tokenizer(tokenizer: TokenizerLike) -> bytes:
    """A fast tokenizer as bytes, for a process that imports little."""
    serialized: str = tokenizer.backend_tokenizer.to_str()
    return serialized.encode()


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"structured_outputs is not supported with this model's tokenizer: {reason}; "
        f"byte-level BPE is supported"
    )
