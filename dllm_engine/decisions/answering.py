"""Answers to questions, from an engine in this program or behind a server."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from vllm import RequestOutput
from vllm.exceptions import (
    GenerationError,
    RetryableRequestError,
    VLLMValidationError,
)
from vllm.inputs.engine import tokens_input

from dllm_engine.decisions.asking import Asking, Row
from dllm_engine.decisions.openai_form import read_questions
from dllm_engine.decisions.questions import Answer, Answered, Message, Question
from dllm_engine.figures import DiffusionFigures
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.structured_output.requests import reading
from dllm_engine.vllm_hooks.server.prompts import PromptRequest, prompt_tokens

COUNTS = (
    "decision_questions",
    "decision_rows",
    "decision_prompt_tokens",
    "decision_shared_tokens",
)
"""Names of metrics."""


_AT_ONCE = 16
"""Number of rows of a request that the engine has at a time. It is busy with so many,
and the event loop and its steps still have room for other requests.
"""
_counts = dict.fromkeys(COUNTS, 0)
"""Counts since ``take_counts`` was last called."""


def take_counts() -> dict[str, int]:
    """Return the counts of this process since the last call."""
    counts = dict(_counts)
    _counts.update(dict.fromkeys(COUNTS, 0))
    return counts


@dataclass(frozen=True)
class Questions:
    """Questions in OpenAI's form, for ``LLM.decide``: dictionaries of ``type``
    (``"predicate"``, ``"choice"`` or ``"score"``), ``instructions``, and ``choices`` or
    ``levels``.
    """

    questions: Sequence[Mapping[str, Any]]
    joint: bool | None = None
    """Answer all questions in one canvas; None: as the engine was started."""

    @cached_property
    def read(self) -> list[Question]:
        return read_questions([dict(each) for each in self.questions])


def as_messages(prompt: Any) -> list[Message]:
    """The messages of a prompt, which may be a text."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def answer_all(
    asking: Asking,
    ask: Callable[[list[Row]], Iterable[Any]],
    asked: Sequence[tuple[Sequence[Message], Questions]],
) -> list[list[Answer]]:
    """Answers to questions about messages, all in one batch. ``ask`` gives the engine's
    output for each row.
    """
    rows_of = [asking.rows(messages, each.read, each.joint) for messages, each in asked]
    results = map(_result, ask([row for own in rows_of for row in own]))
    answers = []
    for own, (_, each) in zip(rows_of, asked, strict=True):
        decisions = [result.decision for result in islice(results, len(own))]
        answers.append(asking.answers(each.read, own, decisions))
    return answers


async def answer_over_http(
    state: Any,
    model: str,
    messages: Sequence[Message],
    questions: Sequence[Question],
    joint: bool | None,
    request_id: str,
) -> Answered:
    """Answers to questions about messages. ``state`` is the state of vLLM's
    application. If the client leaves, the engine drops the rows that it has not
    answered.
    """
    engine = state.engine_client
    tokenizer = state.openai_serving_completion.renderer.tokenizer
    options = EngineOptions.from_vllm_config(engine.vllm_config)
    asking = await reading(Asking, options, engine.model_config.model, tokenizer)
    rows = await reading(asking.rows, messages, questions, joint)
    has_template = bool(tokenizer.chat_template or state.args.chat_template)

    async def prompt_of(asked: Sequence[Message]) -> list[int]:
        if has_template:
            request = PromptRequest(model=model, messages=list(asked))
        else:
            request = PromptRequest(model=model, prompt=plain_text(asked))
        return await prompt_tokens(request, state)

    # The first prompt checks the model's name and the text, also if each question has
    # one option and needs no row.
    first = await prompt_of(rows[0].messages if rows else messages)
    places = asyncio.Semaphore(_AT_ONCE)
    turn = asyncio.Lock()

    async def ask(number: int, row: Row) -> tuple[RequestOutput, DiffusionFigures]:
        async with places:
            async with turn:  # Other requests are read between two prompts.
                prompt = await prompt_of(row.messages) if number else first
            _check_length(len(prompt), row, engine.model_config.max_model_len)
            results = engine.generate(
                tokens_input(prompt), row.params, f"{request_id}-{number}"
            )
            (output,) = [result async for result in results]
        return output, _result(output)

    results = await _all_of([ask(number, row) for number, row in enumerate(rows)])
    decisions = [figures.decision for _, figures in results]
    # The first prompt is read also where no question needs a row.
    num_tokens = sum(len(output.prompt_token_ids) for output, _ in results) or len(
        first
    )
    num_shared = sum(output.num_cached_tokens or 0 for output, _ in results)
    num_rows = sum(figures.tokens_computed for _, figures in results)
    amounts = len(questions), num_rows, num_tokens, num_shared
    for name, amount in zip(COUNTS, amounts, strict=True):
        _counts[name] += amount
    answers = asking.answers(questions, rows, decisions)
    return Answered(answers, num_tokens, num_shared)


def _check_length(prompt_length: int, row: Row, limit: int) -> None:
    length = prompt_length + row.params.max_tokens
    if length > limit:
        raise VLLMValidationError(
            f"the input and a question take {length} tokens, max_model_len is {limit}; "
            f"shorten one, or ask fewer questions together",
            parameter="input_tokens",
            value=length,
        )


async def _all_of(waiting: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Wait for all results. If one fails, cancel the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in waiting]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _result(output: Any) -> DiffusionFigures:
    """The engine's answer to a row. Raises ``GenerationError`` if it failed."""
    completion = output.outputs[0]
    if completion.finish_reason == "abort":
        raise RetryableRequestError(
            "the server ended the request before all questions were answered; send it "
            "again"
        )
    figures: DiffusionFigures = completion.diffusion
    if figures.error is not None:
        raise GenerationError(figures.error)
    return figures


def plain_text(messages: Sequence[Message]) -> str:
    """A prompt for a model without a chat template."""
    texts = [message["content"] for message in messages]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("messages: this model reads texts only")
    return "\n\n".join(texts) + "\n"
