"""Tasks of prompts and answers, from a user's JSONL file or the demo model's, and when a response counts as right."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, StringConstraints

from dllm_engine.batch import Message, prompt_tokens, read_input
from dllm_engine.demo.tasks import TASKS, make_examples
from dllm_engine.evaluation.comparison import Result, Task, mean_and_error
from dllm_engine.evaluation.runner import MeasuredEngine
from dllm_engine.text import did_you_mean, one_line

DEMO_TASKS = "demo"
"""All tasks of the demo model together."""


class OwnTask(BaseModel):
    """A prompt and its answer. Other keys of a line of a file are ignored."""

    prompt: str | Annotated[list[Message], Field(min_length=1)]
    answer: Annotated[str, StringConstraints(strict=True, strip_whitespace=True, min_length=1)]


@dataclass(frozen=True)
class OwnTasks(Task):
    """Tasks that are scored together; ``match`` is a key of ``MATCHES``."""

    tasks: Sequence[OwnTask]
    match: str

    def score(self, engine: MeasuredEngine, decoding: dict[str, Any]) -> Result:
        """The share of tasks answered right. Raises ``ValueError`` for messages without a chat template."""
        from dllm_engine.params import DiffusionParams

        if not engine.llm.has_chat_template and any(isinstance(task.prompt, list) for task in self.tasks):
            raise ValueError("a prompt is a list of messages, but the model has no chat template; give text")
        tokenizer, params = engine.llm.get_tokenizer(), DiffusionParams(**decoding)
        answers, _ = engine.complete([(prompt_tokens(task.prompt, tokenizer), params) for task in self.tasks])
        is_right = MATCHES[self.match]
        scores = [float(is_right(own.text, task.answer)) for own, task in zip(answers, self.tasks, strict=True)]
        return Result(self.match, *mean_and_error(scores), len(scores), {"scores": scores})


def demo_tasks(name: str, count: int, seed: int) -> list[OwnTask]:
    """``count`` examples of a task of the demo model, with ``DEMO_TASKS`` of each of them."""
    known = (DEMO_TASKS, *TASKS)
    if name not in known:
        raise ValueError(
            f"unknown task {name!r}{did_you_mean(name, known)} (tasks: {', '.join(known)}, or a FILE.jsonl); tasks of "
            f"lm_eval are named by --lm-eval"
        )
    parts = TASKS if name == DEMO_TASKS else (name,)
    examples = (example for part in parts for example in make_examples(part, count, seed))
    return [OwnTask(prompt=example.prompt, answer=example.answer) for example in examples]


def read_tasks(path: Path) -> list[OwnTask]:
    """The tasks of a file with a line ``{"prompt": …, "answer": …}`` each; a prompt is text, or a list of messages.

    Raises ``ValueError`` with the number of a line that is none, and for a file without any.
    """
    tasks = []
    for line in read_input(path):
        try:
            tasks.append(OwnTask.model_validate_json(line.text))
        except ValueError as error:
            raise ValueError(
                f'{path}: task {line.index + 1} must be {{"prompt": "…", "answer": "…"}}: {one_line(error)}'
            ) from None
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
