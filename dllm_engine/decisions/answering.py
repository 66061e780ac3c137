"""Answers to questions, from an engine in this program or behind a server."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.exceptions import GenerationError, RetryableRequestError

from dllm_engine.decisions.asking import Asking, Message, Row, fields_by_question
from dllm_engine.decisions.openai_form import read_questions
from dllm_engine.decisions.questions import Answer, Question
from dllm_engine.figures import DiffusionFigures
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.sampling_params import InvalidRequestError
from dllm_engine.structured_output.requests import reading
from dllm_engine.vllm_hooks.server.prompts import PromptRequest, prompt_tokens

if TYPE_CHECKING:
    from dllm_engine.llm import LLM

COUNTS = (
    "decision_questions",
    "decision_rows",
    "decision_prompt_tokens",
    "decision_shared_tokens",
)
"""Names of metrics."""


class _Counter:
    """Counts of this process since they were last taken."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(COUNTS, 0.0)
        self._lock = Lock()

    def add(self, *amounts: int) -> None:
        with self._lock:
            for name, amount in zip(COUNTS, amounts, strict=True):
                self._counts[name] += amount

    def take(self) -> dict[str, float]:
        with self._lock:
            counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0.0)
        return counts


counter = _Counter()


@dataclass(frozen=True)
class Questions:
    """Questions in OpenAI's form, for ``LLM.decide``: dictionaries of ``type``
    (``"predicate"``, ``"choice"`` or ``"score"``), ``instructions``, and ``choices`` or
    ``levels``.
    """

    questions: Sequence[Mapping[str, Any]]
    joint: bool | None = None
    """Answer all in one canvas; None: as the engine was started."""

    @cached_property
    def read(self) -> list[Question]:
        return read_questions([dict(each) for each in self.questions])


class Answered(NamedTuple):
    """``num_tokens``: of the prompts of all rows; ``num_shared`` of them were read from
    pages that other rows share.
    """

    answers: list[Answer]
    num_tokens: int
    num_shared: int


def as_messages(prompt: Any) -> list[Message]:
    """A prompt that may be a text."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def answer_all(
    llm: "LLM", asked: Sequence[tuple[Sequence[Message], Questions]]
) -> list[list[Answer]]:
    """Answers to questions about messages, all in one batch."""
    config = llm.llm_engine.vllm_config
    options, tokenizer = EngineOptions.from_vllm_config(config), llm.get_tokenizer()
    asking = Asking(options, config.model_config.model, tokenizer)
    rows_of = [asking.rows(messages, each.read, each.joint) for messages, each in asked]
    rows = [row for own in rows_of for row in own]
    prompts: list[Any] = [row.messages for row in rows]
    if not llm.has_chat_template:
        prompts = [_plain_text(messages) for messages in prompts]
    ask = llm.chat if llm.has_chat_template else llm.generate
    outputs = ask(prompts, [row.params for row in rows], use_tqdm=False) if rows else []
    results = iter(_result(output) for output in outputs)
    answers = []
    for own, (_, each) in zip(rows_of, asked, strict=True):
        decisions = [result.decision for result in islice(results, len(own))]
        read = fields_by_question(own, decisions)
        answers.append(asking.answers(each.read, read))
    return answers


async def answer_over_http(
    state: Any,
    model: str,
    messages: Sequence[Message],
    questions: Sequence[Question],
    joint: bool | None,
    request_id: str,
) -> Answered:
    """Answers to questions about messages. ``state``: of vLLM's application. If the
    client goes away, the engine drops what it has not answered.
    """
    engine = state.engine_client
    tokenizer = state.openai_serving_completion.renderer.tokenizer
    options = EngineOptions.from_vllm_config(engine.vllm_config)
    asking = await reading(Asking, options, engine.model_config.model, tokenizer)
    rows = await reading(asking.rows, messages, questions, joint)
    has_template = bool(tokenizer.chat_template or state.args.chat_template)

    async def prompt_of(row: Row) -> list[int]:
        if has_template:
            request = PromptRequest(model=model, messages=row.messages)
        else:
            request = PromptRequest(model=model, prompt=_plain_text(row.messages))
        return await prompt_tokens(request, state)

    async def ask(number: int, prompt: list[int]) -> tuple[int, DiffusionFigures]:
        results = engine.generate(
            {"prompt_token_ids": prompt}, rows[number].params, f"{request_id}-{number}"
        )
        (output,) = [result async for result in results]
        return len(prompt), _result(output)

    async def ask_later(number: int) -> tuple[int, DiffusionFigures]:
        return await ask(number, await prompt_of(rows[number]))

    results = []
    waiting = [ask_later(number) for number in range(1, len(rows))]
    if rows:
        # It tells what is wrong with the model's name or the text.
        first = ask(0, await prompt_of(rows[0]))
        if options.method.keeps_for_good:
            results.append(await first)  # then its pages can be shared
        else:
            waiting.insert(0, first)
    results += await _all_of(waiting)
    read = fields_by_question(rows, [figures.decision for _, figures in results])
    num_tokens = sum(length for length, _ in results)
    num_shared = sum(
        _num_shared(row, length, figures)
        for row, (length, figures) in zip(rows, results, strict=True)
    )
    num_rows = sum(figures.tokens_computed for _, figures in results)
    counter.add(len(questions), num_rows, num_tokens, num_shared)
    return Answered(asking.answers(questions, read), num_tokens, num_shared)


async def _all_of(waiting: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of all together. If one fails, the others end."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in waiting]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _result(output: Any) -> DiffusionFigures:
    """What the engine says of a row; raises ``GenerationError`` where it failed."""
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


def _num_shared(row: Row, prompt_length: int, figures: DiffusionFigures) -> int:
    """Tokens of a prompt that no forward pass computed."""
    canvas = prompt_length + row.params.max_tokens
    return min(max(canvas - figures.tokens_computed, 0), prompt_length)


def _plain_text(messages: Sequence[Message]) -> str:
    """A prompt for a model without a chat template."""
    texts = [message["content"] for message in messages]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("messages: this model reads texts only")
    return "\n\n".join(texts) + "\n"
