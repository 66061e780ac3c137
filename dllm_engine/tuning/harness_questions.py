"""Questions of a task of lm-evaluation-harness: its prompts, stop strings and scores, one example at a time."""

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dllm_engine.evaluation.answering import Answer, Request, answer_all
from dllm_engine.evaluation.harness import HarnessSettings, HarnessTask, check_data, evaluate, headline, task_manager
from dllm_engine.evaluation.lm_eval_model import DiffusionLM
from dllm_engine.tuning.questions import ORDER_SEED, Answers

if TYPE_CHECKING:
    from dllm_engine.llm import LLM


class HarnessQuestions:
    """The examples of a task, or of all tasks of a group."""

    def __init__(self, task: HarnessTask, settings: HarnessSettings) -> None:
        """Raises ``ValueError`` where the task is unknown, its data is missing, or it asks for no responses."""
        self.task, self.settings = task, settings
        self.manager = task_manager([task], settings.include_path)
        self._tasks = check_data(self.manager, task.name)
        for name, loaded in self._tasks.items():
            if (kind := loaded.get_config("output_type")) != "generate_until":
                raise ValueError(
                    f"task {name!r} asks for {kind}, which is computed without a cache: there is nothing to tune; take "
                    f"a task that asks for responses"
                )
        self._examples = [(name, i) for name, loaded in self._tasks.items() for i in range(len(loaded.eval_docs))]
        random.Random(ORDER_SEED).shuffle(self._examples)
        self._examples = self._examples[: settings.count]
        self.size = len(self._examples)
        self.default_decoding = task.decoding

    def answer(self, llm: "LLM", decoding: dict[str, Any], indices: range, at_once: int) -> Answers:
        answers = Answers([])

        def answer(llm: "LLM", requests: Sequence[Request]) -> list[str]:
            texts, cost = answer_all(llm, requests, at_once)
            answers.cost.add(cost)
            return texts

        found: dict[tuple[str, int], float] = {}
        results = self._evaluate(llm, decoding, answer, indices)
        metric, _, _ = headline(results, self.task.name, self.task.metric)
        name, _, chosen_filter = metric.partition(",")
        for task, samples in results["samples"].items():
            for sample in samples:
                if sample["filter"] == chosen_filter:
                    found[task, sample["doc_id"]] = self._score(sample, name)
        answers.scores = [found[example] for example in self._examples[indices.start : indices.stop]]
        return answers

    def requests(self, llm: "LLM", decoding: dict[str, Any], indices: range) -> list[Request]:
        asked: list[Request] = []

        def note(llm: "LLM", requests: Sequence[Request]) -> list[str]:
            asked.extend(requests)
            return [""] * len(requests)

        self._evaluate(llm, decoding, note, indices)
        return asked

    def subject(self) -> dict[str, Any]:
        settings = {name: str(value) for name, value in vars(self.settings).items()}
        task = {"num_fewshot": self.task.num_fewshot, "metric": self.task.metric, **self.task.decoding}
        return {"tasks": self.task.name, "examples": self.size, "task_options": task, "harness": settings}

    def _evaluate(self, llm: "LLM", decoding: dict[str, Any], answer: Answer, indices: range) -> dict[str, Any]:
        """lm_eval's results on these examples, with a score of each."""
        prompt_tokens = self.task.max_prompt_tokens
        model = DiffusionLM(llm, self.task.decoding | decoding, max_prompt_tokens=prompt_tokens, answer=answer)
        samples = defaultdict(list)
        for name, index in self._examples[indices.start : indices.stop]:
            samples[name].append(index)
        # A task from a file is known by its path alone; of a group, only the tasks that have an example here are run.
        asked = [self.task.name] if len(self._tasks) == 1 else list(samples)
        return evaluate(
            model,
            self.task,
            self.manager,
            self.settings,
            tasks=asked,
            samples=dict(samples),
            log_samples=True,
            bootstrap_iters=0,
        )

    def _score(self, sample: dict[str, Any], metric: str) -> float:
        score = sample.get(metric)
        if isinstance(score, bool | int | float) and 0 <= score <= 1:
            return float(score)
        raise ValueError(
            f"task {self.task.name!r}: {metric} of an example is {score!r}, and settings are compared by a score from "
            f"0 to 1 per example; name another with --metric"
        )
