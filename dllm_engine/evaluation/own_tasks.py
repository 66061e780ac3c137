"""Tasks of prompts and answers, from a user's JSONL file or the demo model's, and when a response counts as right."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, StringConstraints

from dllm_engine.batch.files import BatchRequest, Message
from dllm_engine.demo.tasks import (
    LIST_TASKS,
    NEEDLE_DEPTHS,
    NEEDLE_LENGTHS,
    RECALL_TASKS,
    TASKS,
    hole_examples,
    make_examples,
    needle_examples,
)
from dllm_engine.evaluation.comparison import Result, Task, mean_and_error
from dllm_engine.evaluation.runner import Answer
from dllm_engine.text import did_you_mean, one_line

if TYPE_CHECKING:
    from dllm_engine.llm import LLM
    from dllm_engine.params import DiffusionParams

DEMO_TASKS = "demo"
"""All tasks of the demo model together."""
NEEDLE = "needle"
"""The demo model's needle in a haystack, by length of the prompt and depth of the needle."""
HOLES = "holes"
"""The demo model's tasks with several items, one of which is to be filled in."""


@dataclass(frozen=True)
class OwnTask:
    """A prompt and its answer."""

    request: BatchRequest
    answer: str
    """Without white space around it, unless it fills a hole."""
    part: str = ""
    """The demo model's task, or the cell of a heat map, that it belongs to."""
    given: tuple[str, str] | None = None
    """Text of the response before and behind a hole of as many tokens as the answer has; None: it is the response."""


def demo_tasks(name: str, count: int, seed: int) -> list[OwnTask]:
    """So many examples of a task of the demo model, with ``DEMO_TASKS`` of each of them, with ``NEEDLE`` for each
    length and depth, with ``HOLES`` of each that has items."""
    if name == HOLES:
        return [
            OwnTask(BatchRequest(prompt=example.prompt), item, part, (before, after))
            for part in (*RECALL_TASKS, *LIST_TASKS)
            for example, before, item, after in hole_examples(part, count, seed)
        ]
    if name == NEEDLE:
        cells = itertools.product(NEEDLE_LENGTHS, NEEDLE_DEPTHS)
        examples = {f"{length}@{depth}%": needle_examples(length, depth, count, seed) for length, depth in cells}
    elif name in (DEMO_TASKS, *TASKS):
        examples = {part: make_examples(part, count, seed) for part in (TASKS if name == DEMO_TASKS else [name])}
    else:
        known = (DEMO_TASKS, *TASKS, NEEDLE, HOLES)
        raise ValueError(
            f"unknown task {name!r}{did_you_mean(name, known)} (tasks: {', '.join(known)}, or a FILE.jsonl); tasks of "
            f"lm_eval are named by --lm-eval"
        )
    return [OwnTask(BatchRequest(prompt=e.prompt), e.answer, part) for part, made in examples.items() for e in made]


@dataclass(frozen=True)
class OwnTasks(Task):
    """Tasks that are scored together; ``match`` is a key of ``MATCHES``."""

    tasks: Sequence[OwnTask]
    match: str

    @property
    def size(self) -> int:
        return len(self.tasks)

    def score(self, llm: "LLM", answer: Answer, decoding: dict[str, Any]) -> Result:
        """The share of tasks answered right. The standard error takes the tasks for a random sample of each part."""
        parts: dict[str, list[float]] = {}
        for task, score in zip(self.tasks, self.scores(llm, answer, decoding, range(self.size)), strict=True):
            parts.setdefault(task.part, []).append(score)
        means = {part: mean_and_error(scores) for part, scores in parts.items()}
        stderr = sum((len(parts[part]) * error) ** 2 for part, (_, error) in means.items()) ** 0.5 / self.size
        details = {part: mean for part, (mean, _) in means.items() if len(means) > 1}
        return Result(self.match, sum(map(sum, parts.values())) / self.size, stderr, self.size, details)

    def scores(self, llm: "LLM", answer: Answer, decoding: dict[str, Any], examples: Sequence[int]) -> list[float]:
        """1 for each task that is answered right, 0 for the others. Raises ``ValueError`` for messages without a chat
        template."""
        from dllm_engine.params import DiffusionParams

        tasks, tokenizer = [self.tasks[index] for index in examples], llm.get_tokenizer()
        if not llm.has_chat_template and any(task.request.messages for task in tasks):
            raise ValueError("a prompt is a list of messages, but the model has no chat template; give text")
        params = DiffusionParams(**decoding)
        texts = answer(llm, [(t.request.prompt_tokens(tokenizer), _with_hole(params, t, llm)) for t in tasks])
        return [float(MATCHES[self.match](text, t.answer.strip())) for text, t in zip(texts, tasks, strict=True)]


def _with_hole(params: "DiffusionParams", task: OwnTask, llm: "LLM") -> "DiffusionParams":
    """``params`` with the given parts of the response. Behind them, the model is to end it."""
    from dllm_engine.infill.template import response_template

    if task.given is None:
        return params
    tokenizer = llm.get_tokenizer()
    size = len(tokenizer.encode(task.answer, add_special_tokens=False))
    template = response_template([task.given[0], size, task.given[1]], tokenizer, llm.model_config.max_model_len)
    params = params.clone()
    template += [None] * ((params.gen_length or 0) - len(template))
    params.gen_length, params.response_template, params.return_given = template.count(None), template, False
    return params


class TaskLine(BaseModel):
    """A line of a file of tasks. Other keys are ignored."""

    prompt: str | Annotated[list[Message], Field(min_length=1)]
    answer: Annotated[str, StringConstraints(strict=True, strip_whitespace=True, min_length=1)]


def read_tasks(path: Path) -> list[OwnTask]:
    """The tasks of a file with a line ``{"prompt": …, "answer": …}`` each; a prompt is text, or a list of messages.

    Raises ``ValueError`` with the number of a line that is none, and for a file without any.
    """
    tasks = []
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = TaskLine.model_validate_json(text)
        except ValueError as error:
            raise ValueError(
                f'{path}: task {number} must be {{"prompt": "…", "answer": "…"}}: {one_line(error)}'
            ) from None
        key = "messages" if isinstance(line.prompt, list) else "prompt"
        tasks.append(OwnTask(BatchRequest.model_validate({key: line.prompt}), line.answer))
    if not tasks:
        raise ValueError(f"{path} holds no tasks; give it a line per task")
    return tasks


_NUMBER = re.compile(r"(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """The last number in a text, without the commas between thousands; None where there is none."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


MATCHES: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda response, answer: response.strip() == answer,
    "contains": lambda response, answer: answer in response,
    "last-number": lambda response, answer: last_number(response) == last_number(answer) is not None,
}
"""When a response is right: it equals the answer but for white space around it, contains it, or has the same last
number."""
