"""Questions of a task of lm-evaluation-harness: its prompts, stop strings and scores, one example at a time."""

import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from dllm_engine.evaluation.harness import HarnessSettings, HarnessTask, check_data, evaluate, headline, task_manager
from dllm_engine.evaluation.lm_eval_model import DiffusionLM
from dllm_engine.params import DiffusionParams
from dllm_engine.tuning.questions import ORDER_SEED, Answers, Request, run_requests

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
        model = _AskingLM(llm, self._decoding(decoding), self.task.max_prompt_tokens, at_once)
        found: dict[tuple[str, int], float] = {}
        results = self._evaluate(model, indices)
        metric, _, _ = headline(results, self.task.name, self.task.metric)
        name, _, chosen_filter = metric.partition(",")
        for task, samples in results["samples"].items():
            for sample in samples:
                if sample["filter"] == chosen_filter:
                    found[task, sample["doc_id"]] = self._score(sample, name)
        model.answers.scores = [found[example] for example in self._examples[indices.start : indices.stop]]
        return model.answers

    def requests(self, llm: "LLM", decoding: dict[str, Any], indices: range) -> list[Request]:
        model = _AskingLM(llm, self._decoding(decoding), self.task.max_prompt_tokens, None)
        self._evaluate(model, indices)
        return model.requests

    def subject(self) -> dict[str, Any]:
        settings = {name: str(value) for name, value in vars(self.settings).items()}
        task = {"num_fewshot": self.task.num_fewshot, "metric": self.task.metric, **self.task.decoding}
        return {"tasks": self.task.name, "examples": self.size, "task_options": task, "harness": settings}

    def _decoding(self, decoding: dict[str, Any]) -> dict[str, Any]:
        return self.task.decoding | decoding

    def _evaluate(self, model: "_AskingLM", indices: range) -> dict[str, Any]:
        """lm_eval's results on these examples, with a score of each."""
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


class _AskingLM(DiffusionLM):
    """Asks ``at_once`` requests at a time, or none at all to see which there are; keeps what they cost."""

    def __init__(
        self, llm: "LLM", decoding: dict[str, Any], max_prompt_tokens: int | None, at_once: int | None
    ) -> None:
        super().__init__(llm, decoding, max_prompt_tokens=max_prompt_tokens)
        self.at_once = at_once
        self.requests: list[Request] = []
        self.answers = Answers([])

    def _answer(self, prompts: list[list[int]], params: list[DiffusionParams], *, use_tqdm: bool) -> list[str]:
        self.requests += zip(prompts, params, strict=True)
        if self.at_once is None:
            return [""] * len(prompts)
        outputs, timing = run_requests(self.llm, self.requests[-len(prompts) :], self.at_once)
        self.answers.timing.add(timing)
        self.answers.count(outputs)
        return [output.outputs[0].text for output in outputs]
