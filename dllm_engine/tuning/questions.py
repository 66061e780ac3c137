"""What settings are compared on: questions, and how right their answers are."""

import hashlib
import random
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from dllm_engine.evaluation.answering import Answer
from dllm_engine.evaluation.harness import HarnessTask, headline
from dllm_engine.evaluation.own_tasks import OwnTasks

if TYPE_CHECKING:
    from dllm_engine.llm import LLM

ORDER_SEED = 0
"""Questions are asked in a random order, the same in every run, so that the first ones are like all."""


class Questions(Protocol):
    """Questions in a fixed order. ``decoding`` holds arguments of ``DiffusionParams``."""

    size: int
    default_decoding: dict[str, Any]
    """What questions bring with them, where a setting leaves it open."""

    def scores(self, llm: "LLM", decoding: dict[str, Any], indices: range, answer: Answer) -> list[float]:
        """How right the answers to these questions are, from 0 to 1; raises ``ValueError`` for what cannot be asked."""

    def subject(self) -> dict[str, Any]:
        """What identifies them, in the result file."""


class OwnQuestions:
    """A file of prompts and answers, or the demo model's examples. A task that is there twice is asked once."""

    def __init__(self, tasks: OwnTasks) -> None:
        unique = {task.request.model_dump_json() + task.answer: task for task in tasks.tasks}
        shuffled = list(unique.values())
        random.Random(ORDER_SEED).shuffle(shuffled)
        self.tasks, self.size = replace(tasks, tasks=shuffled), len(shuffled)
        self.default_decoding: dict[str, Any] = {}

    def scores(self, llm: "LLM", decoding: dict[str, Any], indices: range, answer: Answer) -> list[float]:
        asked = replace(self.tasks, tasks=self.tasks.tasks[indices.start : indices.stop])
        return asked.scores(llm, decoding, answer)

    def subject(self) -> dict[str, Any]:
        text = "\n".join(task.request.model_dump_json() + task.answer for task in self.tasks.tasks)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return {"tasks": self.tasks.name, "tasks_digest": digest, "match": self.tasks.match}


class HarnessQuestions:
    """The examples of a task of lm-evaluation-harness, or of all tasks of a group."""

    def __init__(self, task: HarnessTask) -> None:
        """Raises ``ValueError`` where the task is unknown, its data is missing, or it asks for no responses."""
        self.task, loaded = task, task.load()
        for name, of_task in loaded.items():
            if (kind := of_task.get_config("output_type")) != "generate_until":
                raise ValueError(
                    f"task {name!r} asks for {kind}, which is computed without a cache: there is nothing to tune; take "
                    f"a task that asks for responses"
                )
        examples = [(name, i) for name, of_task in loaded.items() for i in range(len(of_task.eval_docs))]
        random.Random(ORDER_SEED).shuffle(examples)
        self._examples, self._is_group = examples[: task.settings.count], len(loaded) > 1
        self.size, self.default_decoding = len(self._examples), task.decoding

    def scores(self, llm: "LLM", decoding: dict[str, Any], indices: range, answer: Answer) -> list[float]:
        asked, samples = self._examples[indices.start : indices.stop], defaultdict(list)
        for name, index in asked:
            samples[name].append(index)
        which = {
            # A task from a file is known by its path alone; of a group, only tasks that have an example here are run.
            "tasks": list(samples) if self._is_group else [self.task.name],
            "samples": dict(samples),
            "log_samples": True,
            "bootstrap_iters": 0,
        }
        results = self.task.evaluate(llm, self.task.decoding | decoding, answer, **which)
        metric, _, chosen_filter = headline(results, self.task.name, self.task.metric)[0].partition(",")
        found = {
            (name, sample["doc_id"]): self._score(sample, metric)
            for name, of_task in results["samples"].items()
            for sample in of_task
            if sample["filter"] == chosen_filter
        }
        return [found[example] for example in asked]

    def _score(self, sample: dict[str, Any], metric: str) -> float:
        score = sample.get(metric)
        if isinstance(score, bool | int | float) and 0 <= score <= 1:
            return float(score)
        raise ValueError(
            f"task {self.task.name!r}: {metric} of an example is {score!r}, and settings are compared by a score from "
            f"0 to 1 per example; name another with --metric"
        )

    def subject(self) -> dict[str, Any]:
        settings = {name: str(value) for name, value in vars(self.task.settings).items()}
        task = {"num_fewshot": self.task.num_fewshot, "metric": self.task.metric, **self.task.decoding}
        return {"tasks": self.task.name, "examples": self.size, "task_options": task, "harness": settings}
