"""Decisions about the demo model's prompts: accuracy, and whether probabilities are the shares of right answers."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dllm_engine.batch import prompt_tokens
from dllm_engine.demo.tasks import CITIES, RECALL_TASKS, make_examples
from dllm_engine.evaluation.comparison import Result, Task, mean_and_error
from dllm_engine.evaluation.runner import MeasuredEngine

DECISIONS = {"decisions": False, "decisions-json": True}
"""Names of the tasks, and True for the one with JSON."""


@dataclass(frozen=True)
class Question:
    """A prompt, and fields with their choices and right values."""

    prompt: str
    choices: dict[str, list[str]]
    values: dict[str, str]
    template: str | None = None
    """Text of the response, as the model was trained to write it; None: a JSON object."""

    @property
    def constraint(self) -> dict[str, Any]:
        """Structured output of the same texts."""
        from dllm_engine.decisions.fields import schema_of

        if self.template is None:
            return {"json": schema_of(self.choices)}
        groups = {name: f"(?P<{name}>{'|'.join(choices)})" for name, choices in self.choices.items()}
        return {"regex": self.template.replace(".", r"\.").format(**groups)}

    def values_in(self, text: str) -> dict[str, str]:
        """The value of each field in a response."""
        if self.template is None:
            return json.loads(text)
        match = re.fullmatch(self.constraint["regex"], text)
        return match.groupdict() if match else {}


@dataclass(frozen=True)
class DecisionTask(Task):
    """Questions that are decided in ``passes``, or without them answered by generating the JSON text."""

    questions: Sequence[Question]

    def score(self, engine: MeasuredEngine, decoding: dict[str, Any]) -> Result:
        """The share of fields that have the right value."""
        from vllm.sampling_params import StructuredOutputsParams

        from dllm_engine.decisions.fields import schema_of
        from dllm_engine.decisions.requests import decision_params
        from dllm_engine.params import DiffusionParams

        tokenizer, requests = engine.llm.get_tokenizer(), []
        others = {name: value for name, value in decoding.items() if name not in ("passes", "gen_length", "seed")}
        passes = decoding.get("passes")
        if passes is not None and others:
            raise ValueError(f"{min(others)}: a decision commits whole fields; leave it out beside passes")
        for question in self.questions:
            if passes is not None:
                schema, config = schema_of(question.choices), engine.llm.llm_engine.vllm_config
                params = decision_params(schema, tokenizer, config, template=question.template, passes=passes)
            else:
                text = StructuredOutputsParams(**question.constraint)
                params = DiffusionParams(gen_length=64, structured_outputs=text, **others)  # enough for four fields
            requests.append((prompt_tokens(question.prompt, tokenizer), params))
        completions, _ = engine.complete(requests)
        rights = []
        for completion, question in zip(completions, self.questions, strict=True):
            answer = question.values_in(completion.text)
            rights += [float(answer.get(name) == value) for name, value in question.values.items()]
        details: dict[str, Any] = {"scores": rights}
        if passes is not None:
            decisions = (completion.diffusion.decision for completion in completions)
            bins = reliability([field["probability"] for fields in decisions for field in fields.values()], rights)
            error = sum(size * abs(mean - share) for mean, share, size in bins) / len(rights)
            details |= {"calibration_error": error, "reliability": bins}
        return Result("fields", *mean_and_error(rights), len(rights), details)


def reliability(probabilities: Sequence[float], rights: Sequence[float]) -> list[tuple[float, float, int]]:
    """Mean probability, share of right values, and number of fields, of each tenth of probability that has fields.

    The mean of their differences, weighted by the numbers, is the expected calibration error.
    """
    pairs = np.column_stack((probabilities, rights))
    numbers = np.minimum(pairs[:, 0] * 10, 9).astype(int)
    bins = (pairs[numbers == number] for number in np.unique(numbers))
    return [(each[:, 0].mean().item(), each[:, 1].mean().item(), len(each)) for each in bins]


def demo_questions(count: int, seed: int, *, as_json: bool) -> list[Question]:
    """``count`` questions from each recall task: a code for each name, or a city. In JSON, which the demo model has
    never seen, or in the form of its answers."""
    questions = []
    for task in RECALL_TASKS:
        for example in make_examples(task, count, seed):
            said = dict(re.findall(r"(\w+)(?:=| lives in )(\w+)\.", example.prompt))
            asked = dict(re.findall(r"(\w+)(?:=| lives in )(\w+)", example.answer))
            choices = list(CITIES) if task == "facts" else sorted({*said.values()})
            form, separator = ("{0} lives in {{{0}}}.", " ") if task == "facts" else ("{0}={{{0}}}", ", ")
            template = None if as_json else " " + separator.join(form.format(name) for name in asked)
            questions.append(Question(example.prompt, dict.fromkeys(asked, choices), asked, template))
    return questions
