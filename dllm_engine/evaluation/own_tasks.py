"""A user's own tasks: a JSONL file of prompts and answers, and when a response counts as right."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from dllm_engine.batch.files import BatchRequest
from dllm_engine.text import one_line


@dataclass(frozen=True)
class OwnTask:
    """One line of the file."""

    request: BatchRequest
    answer: str
    """Without white space around it."""


def read_tasks(path: Path) -> list[OwnTask]:
    """The tasks of a file with a line ``{"prompt": …, "answer": …}`` each; a prompt is text, or a list of messages.

    Raises ``ValueError`` with the number of a line that is none, and for a file without any.
    """
    tasks = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            tasks.append(_parse(line))
        except ValueError as error:
            raise ValueError(
                f'{path}: task {number} must be {{"prompt": "…", "answer": "…"}}: {one_line(error)}'
            ) from None
    if not tasks:
        raise ValueError(f"{path} holds no tasks; give it a line per task")
    return tasks


def _parse(line: str) -> OwnTask:
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("it is no object")
    for key in ("prompt", "answer"):
        if key not in fields:
            raise ValueError(f"{key!r} is missing")
    prompt, answer = fields["prompt"], fields["answer"]
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f"'answer' is {answer!r}; it must be text")
    key = "messages" if isinstance(prompt, list) else "prompt"
    try:
        return OwnTask(BatchRequest.model_validate({key: prompt}), answer.strip())
    except ValidationError as error:
        raise ValueError(f"'prompt' is neither text nor messages: {one_line(error)}") from None


_NUMBER = re.compile(r"(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """The last number in a text, without the commas between thousands; None where there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _equal_numbers(response: str, answer: str) -> bool:
    number = last_number(response)
    return number is not None and number == last_number(answer)


MATCHES: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda response, answer: response.strip() == answer,
    "contains": lambda response, answer: answer in response,
    "last-number": _equal_numbers,
}
"""Whether a response is right, by its answer: equal but for white space around it, with the answer somewhere inside, or
with the same last number."""
