"""What settings are compared on: questions, and how right their answers are."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dllm_engine.evaluation.answering import Cost, Request, answer_all
from dllm_engine.evaluation.own_tasks import MATCHES, OwnTask, requests_of

if TYPE_CHECKING:
    from dllm_engine.llm import LLM

ORDER_SEED = 0
"""Questions are asked in a random order, the same in every run, so that the first ones are like all."""


@dataclass
class Answers:
    """The answers to some questions."""

    scores: list[float]
    """Between 0 and 1, in the order of the questions."""
    cost: Cost = field(default_factory=Cost)


class Questions(Protocol):
    """Questions in a fixed order. ``decoding`` holds arguments of ``DiffusionParams``."""

    size: int
    default_decoding: dict[str, Any]
    """What questions bring with them, where a setting leaves it open."""

    def answer(self, llm: "LLM", decoding: dict[str, Any], indices: range, at_once: int) -> Answers:
        """Ask these questions, ``at_once`` at a time; raises ``ValueError`` for what cannot be asked."""

    def requests(self, llm: "LLM", decoding: dict[str, Any], indices: range) -> list[Request]:
        """The same questions unasked."""

    def subject(self) -> dict[str, Any]:
        """What identifies them, in the result file."""


class OwnQuestions:
    """A file of prompts and answers, or the demo model's examples."""

    def __init__(self, name: str, tasks: Sequence[OwnTask], match: str) -> None:
        """``match`` is a key of ``MATCHES``. A task that is there twice is asked once."""
        unique = {task.request.model_dump_json() + task.answer: task for task in tasks}
        self.name, self.match = name, match
        self.tasks = list(unique.values())
        random.Random(ORDER_SEED).shuffle(self.tasks)
        self.size = len(self.tasks)
        self.default_decoding: dict[str, Any] = {}

    def answer(self, llm: "LLM", decoding: dict[str, Any], indices: range, at_once: int) -> Answers:
        texts, cost = answer_all(llm, self.requests(llm, decoding, indices), at_once)
        is_right, asked = MATCHES[self.match], self.tasks[indices.start : indices.stop]
        return Answers([float(is_right(text, task.answer)) for text, task in zip(texts, asked, strict=True)], cost)

    def requests(self, llm: "LLM", decoding: dict[str, Any], indices: range) -> list[Request]:
        return requests_of(self.tasks[indices.start : indices.stop], llm, decoding)

    def subject(self) -> dict[str, Any]:
        text = "\n".join(task.request.model_dump_json() + task.answer for task in self.tasks)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return {"tasks": self.name, "tasks_digest": digest, "match": self.match}
