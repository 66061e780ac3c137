"""Tasks without lm_eval: prompts and answers from a user's file or of the demo model,
and decisions about them.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, StringConstraints

from dllm_engine.batch import Message, prompt_tokens, read_input, settings_digest
from dllm_engine.decisions.openai_form import read_question
from dllm_engine.demo.questions import QUESTION_KINDS, ask
from dllm_engine.demo.tasks import CITIES, RECALL_TASKS, TASKS, make_examples
from dllm_engine.evaluation.comparison import Result, Task, mean_and_error
from dllm_engine.evaluation.intents import INTENTS, read_intents
from dllm_engine.evaluation.labelled_questions import (
    LabelledQuestion,
    QuestionTask,
    calibration_error,
    is_labelled,
    read_labelled,
    reliability,
)
from dllm_engine.evaluation.runner import MeasuredEngine
from dllm_engine.text import did_you_mean, one_line

DEMO_TASKS = "demo"
"""Name of all tasks of the demo model together."""
DEMO_COUNT = 50
"""Default number of examples of each task of the demo model."""
DECISIONS = {"decisions": False, "decisions-json": True}
"""Tasks of decisions; True for the one in JSON."""
QUESTIONS = {f"questions-{kind}": kind for kind in QUESTION_KINDS}
"""Tasks of questions to the demo model, with their kinds."""


def named_task(name: str, count: int | None, seed: int, match: str) -> Task:
    """A task of the demo model, of intents, or from a JSONL file. Raises ``ValueError``
    for an unknown task.
    """
    if name.endswith(".jsonl"):
        path = Path(name)
        if is_labelled(path):
            return QuestionTask(name, read_labelled(path)[:count])
        return OwnTasks(name, read_tasks(Path(name))[:count], match)
    if name in INTENTS:
        return QuestionTask(name, read_intents(name)[:count])
    if name in DECISIONS:
        return DecisionTask(
            name, demo_questions(count or DEMO_COUNT, seed, as_json=DECISIONS[name])
        )
    if name in QUESTIONS:
        questions = labelled_questions(QUESTIONS[name], count or DEMO_COUNT, seed)
        return QuestionTask(name, questions)
    return OwnTasks(name, demo_tasks(name, count or DEMO_COUNT, seed), match)


class OwnTask(BaseModel):
    """A prompt and its answer. Other keys of a line are ignored."""

    prompt: str | Annotated[list[Message], Field(min_length=1)]
    answer: Annotated[
        str, StringConstraints(strict=True, strip_whitespace=True, min_length=1)
    ]


@dataclass(frozen=True)
class OwnTasks(Task):
    """Tasks that are scored together. ``match``: a key of ``MATCHES``."""

    tasks: Sequence[OwnTask]
    match: str

    @property
    def digest(self) -> str:
        return settings_digest([task.model_dump() for task in self.tasks])

    def shared_part(self, page_size: int) -> float:
        texts = sorted(
            task.prompt
            if isinstance(task.prompt, str)
            else "".join(message["content"] for message in task.prompt)
            for task in self.tasks
        )
        # commonprefix compares characters, not folders.
        sizes = (len(commonprefix(pair)) for pair in pairwise(texts))  # noqa: RUF071
        # Only whole pages are shared, and a token has at least one character.
        num_shared = sum(size for size in sizes if size >= page_size)
        return num_shared / max(sum(map(len, texts)), 1)

    def score(self, engine: MeasuredEngine, decoding: dict[str, Any]) -> Result:
        """Share of right answers. Raises ``ValueError`` for messages without a chat
        template.
        """
        from dllm_engine.params import DiffusionParams

        if not engine.llm.has_chat_template and any(
            isinstance(task.prompt, list) for task in self.tasks
        ):
            raise ValueError(
                "a prompt is a list of messages, but the model has no chat template; "
                "give text"
            )
        tokenizer = engine.llm.get_tokenizer()
        params = DiffusionParams(**decoding)
        answers, _ = engine.complete(
            [(prompt_tokens(task.prompt, tokenizer), params) for task in self.tasks]
        )
        is_right = MATCHES[self.match]
        scores = [
            float(is_right(answer.text, task.answer))
            for answer, task in zip(answers, self.tasks, strict=True)
        ]
        return Result(
            self.match, *mean_and_error(scores), len(scores), {"scores": scores}
        )


def demo_tasks(name: str, count: int, seed: int) -> list[OwnTask]:
    """``count`` examples of a task of the demo model; for ``DEMO_TASKS``, of each task."""
    known = (DEMO_TASKS, *TASKS, *DECISIONS, *INTENTS)
    if name not in known:
        raise ValueError(
            f"unknown task {name!r}{did_you_mean(name, known)} (tasks: "
            f"{', '.join(known)}, or a FILE.jsonl); tasks of lm_eval are named by "
            f"--lm-eval"
        )
    parts = TASKS if name == DEMO_TASKS else (name,)
    examples = (
        example for part in parts for example in make_examples(part, count, seed)
    )
    return [
        OwnTask(prompt=example.prompt, answer=example.answer) for example in examples
    ]


def read_tasks(path: Path) -> list[OwnTask]:
    """The tasks of a file, one per line. Raises ``ValueError`` with the number of a
    wrong line, and for an empty file."""
    tasks = []
    for line in read_input(path):
        try:
            tasks.append(OwnTask.model_validate_json(line.text))
        except ValueError as error:
            raise ValueError(
                f'{path}: task {line.index + 1} must be {{"prompt": "…", "answer": '
                f'"…"}}: {one_line(error)}'
            ) from None
    if not tasks:
        raise ValueError(f"{path} holds no tasks; give it a line per task")
    return tasks


def last_number(text: str) -> float | None:
    """The last number in a text, without commas between thousands; None if there is
    none.
    """
    numbers = re.findall(r"(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?", text)
    return float(numbers[-1].replace(",", "")) if numbers else None


MATCHES: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda response, answer: response.strip() == answer,
    "contains": lambda response, answer: answer in response,
    "last-number": lambda response, answer: (
        last_number(response) == last_number(answer) is not None
    ),
}
"""Functions that decide if a response is right."""


@dataclass(frozen=True)
class Question:
    """A prompt, and fields with choices and right values."""

    prompt: str
    choices: dict[str, list[str]]
    values: dict[str, str]
    template: str | None = None
    """Text of the response, as the model was trained to write it; None: a JSON object.
    """

    @property
    def constraint(self) -> dict[str, Any]:
        """Structured output with the same texts."""
        from dllm_engine.decisions.requests import schema_of

        if self.template is None:
            return {"json": schema_of(self.choices)}
        groups = {
            name: f"(?P<{name}>{'|'.join(choices)})"
            for name, choices in self.choices.items()
        }
        return {"regex": self.template.replace(".", r"\.").format(**groups)}

    def scores(self, text: str) -> list[float]:
        """1 for each field with the right value in a response, else 0."""
        if self.template is None:
            answer = json.loads(text)
        else:
            match = re.fullmatch(self.constraint["regex"], text)
            answer = match.groupdict() if match else {}
        return [float(answer.get(name) == value) for name, value in self.values.items()]


@dataclass(frozen=True)
class DecisionTask(Task):
    """Task of questions that are decided in ``passes``, or without passes answered by
    generated text.
    """

    questions: Sequence[Question]

    def score(self, engine: MeasuredEngine, decoding: dict[str, Any]) -> Result:
        """Share of fields with the right value."""
        from vllm.sampling_params import StructuredOutputsParams

        from dllm_engine.decisions.requests import decision_params, schema_of
        from dllm_engine.params import DiffusionParams

        tokenizer = engine.llm.get_tokenizer()
        config = engine.llm.llm_engine.vllm_config
        passes = decoding.get("passes")
        unused = ("passes", "gen_length", "seed")
        others = {k: value for k, value in decoding.items() if k not in unused}
        if passes is not None and others:
            raise ValueError(
                f"{min(others)}: a decision commits whole fields; leave it out beside "
                f"passes"
            )

        def params_of(question: Question) -> DiffusionParams:
            if passes is not None:
                schema = schema_of(question.choices)
                return decision_params(
                    schema, tokenizer, config, template=question.template, passes=passes
                )
            text = StructuredOutputsParams(**question.constraint)
            # Enough for four fields.
            return DiffusionParams(gen_length=64, structured_outputs=text, **others)

        requests = [
            (prompt_tokens(question.prompt, tokenizer), params_of(question))
            for question in self.questions
        ]
        completions, _ = engine.complete(requests)
        scores: list[float] = []
        for completion, question in zip(completions, self.questions, strict=True):
            scores += question.scores(completion.text)
        details: dict[str, Any] = {"scores": scores}
        if passes is not None:
            chosen = [
                field["probability"]
                for completion in completions
                for field in completion.diffusion.decision.values()
            ]
            bins = reliability(chosen, scores)
            details["calibration_error"] = calibration_error(bins)
            details["reliability"] = bins
        return Result("fields", *mean_and_error(scores), len(scores), details)


def labelled_questions(kind: str, count: int, seed: int) -> list[LabelledQuestion]:
    """``count`` questions of a kind, each about another text."""
    labelled = []
    for asked_text in ask(seed, count, [kind]):
        (item,) = asked_text.asked
        messages = [{"role": "user", "content": asked_text.text}]
        question = read_question(item.question, ["question"])
        labelled.append(LabelledQuestion(messages, question, item.option))
    return labelled


def demo_questions(count: int, seed: int, *, as_json: bool) -> list[Question]:
    """``count`` questions from each recall task, answered in JSON, which the demo model
    has never seen, or in its trained form.
    """
    statement = re.compile(r"(\w+)(=| lives in )(\w+)")
    questions = []
    for task in RECALL_TASKS:
        for example in make_examples(task, count, seed):
            statements, names = (
                {m[1]: m[3] for m in statement.finditer(text)}
                for text in (example.prompt, example.answer)
            )
            choices = (
                list(CITIES) if task == "facts" else sorted({*statements.values()})
            )
            template = (
                None if as_json else " " + statement.sub(r"\1\2{\1}", example.answer)
            )
            questions.append(
                Question(example.prompt, dict.fromkeys(names, choices), names, template)
            )
    return questions
