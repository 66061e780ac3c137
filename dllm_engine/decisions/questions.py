"""Questions with a probability for each possible answer, in any protocol: yes or no, a
choice of labels, a score over ordered levels.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

Message = dict[str, Any]
"""A message of a chat: ``role`` and ``content``."""

MOST_QUESTIONS = 400
"""The most questions of a request."""
MOST_OPTIONS = 255
"""The most labels of a question."""


Kind = Literal["yes_no", "choice", "score"]


class QuestionError(ValueError):
    """A question that cannot be answered, and where it stands in the request."""

    def __init__(self, place: Sequence[str | int], message: str) -> None:
        """``place``: keys and indices of the wrong value in the request."""
        super().__init__(message)
        self.place = tuple(place)
        self.message = message

    @property
    def path(self) -> str:
        """The place as OpenAI writes it, ``questions[0].choices``."""
        path = ""
        for part in self.place:
            path += f"[{part}]" if isinstance(part, int) else f".{part}"
        return path.removeprefix(".")


@dataclass(frozen=True)
class Option:
    """A possible answer."""

    label: str | bool
    description: str = ""


@dataclass(frozen=True)
class Question:
    """A question and its options. Yes comes before no; the levels of a score begin with
    0.
    """

    kind: Kind
    instructions: str
    options: tuple[Option, ...]

    @property
    def labels(self) -> list[str]:
        """The text of each option's label. If two texts would be equal, or one empty,
        all are written as JSON. Levels that are still equal are numbered.
        """
        texts = [_plain(option.label) for option in self.options]
        if not all(texts) or len({*texts}) < len(texts):
            labels = [option.label for option in self.options]
            texts = [json.dumps(label, ensure_ascii=False) for label in labels]
        if len({*texts}) < len(texts):
            texts = [f"{number}: {text}" for number, text in enumerate(texts)]
        return texts


def yes_no(instructions: str, if_true: str = "", if_false: str = "") -> Question:
    """``if_true``, ``if_false``: criteria for either answer."""
    options = Option("Yes", if_true), Option("No", if_false)
    return Question("yes_no", instructions, options)


def as_text(content: Any) -> str:
    """The text of a content, which may be a text or any JSON value."""
    return (
        content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    )


def _plain(label: str | bool) -> str:
    return label if isinstance(label, str) else json.dumps(label)


@dataclass(frozen=True)
class Answer:
    """The probability of each option of a question, float64, in their order."""

    question: Question
    probabilities: tuple[float, ...]
    label_mass: float
    """Share of the model's probability that the offered answers have together. If it is
    small, the model would have answered something else.
    """

    @property
    def best(self) -> int:
        """Index of the most probable option, the first of equals."""
        return int(np.argmax(self.probabilities))

    @property
    def value(self) -> Any:
        """The label of a choice, True for yes, or the number of a level."""
        if self.question.kind == "choice":
            return self.question.options[self.best].label
        return self.best == 0 if self.question.kind == "yes_no" else self.best

    @property
    def score(self) -> float:
        """The expectation of the number of the option, counted from 0."""
        last = len(self.probabilities) - 1
        mean = float(np.dot(np.arange(last + 1), self.probabilities))
        return min(max(mean, 0.0), float(last))

    @property
    def confidence(self) -> float:
        """A number from 0 (all options are equally probable) to 1: how much a choice
        prefers its best option, or how near the probability of a score is to its best
        level.
        """
        count = len(self.probabilities)
        if count == 1:
            return 1.0
        if self.question.kind != "score":
            return _clamped((count * max(self.probabilities) - 1) / (count - 1))
        numbers = np.arange(count)
        distance = np.dot(self.probabilities, np.abs(numbers - self.best))
        uniform = np.abs(numbers - (count - 1) / 2).mean()
        return _clamped(1 - distance / uniform)


def _clamped(share: float) -> float:
    return min(max(float(share), 0.0), 1.0)


def answered(
    question: Question, shares: Sequence[float] | np.ndarray, label_mass: float
) -> Answer:
    """The answer whose options have these shares of probability."""
    total = np.asarray(shares, np.float64)
    probabilities = (total / total.sum()).clip(0.0, 1.0)
    return Answer(question, tuple(probabilities.tolist()), _clamped(label_mass))


class Answered(NamedTuple):
    """Answers to questions. The prompts of all rows have ``num_tokens`` tokens;
    ``num_shared`` of them were read from pages that rows share.
    """

    answers: list[Answer]
    num_tokens: int
    num_shared: int
