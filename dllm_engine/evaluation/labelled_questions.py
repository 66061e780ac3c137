"""Questions with right answers: accuracy of a model, and calibration of its
probabilities.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dllm_engine.batch import prompt_tokens, read_input, settings_digest
from dllm_engine.decisions.openai_form import read_input as read_messages
from dllm_engine.decisions.openai_form import read_question
from dllm_engine.decisions.questions import Question, QuestionError
from dllm_engine.evaluation.comparison import Result, Task, mean_and_error
from dllm_engine.evaluation.runner import MeasuredEngine

KEY = "question"
"""Key by which a line of a file is a question, not a prompt."""


@dataclass(frozen=True)
class LabelledQuestion:
    """A question about messages, and the index of its right option."""

    messages: list[dict[str, str]]
    question: Question
    answer: int


def is_labelled(path: Path) -> bool:
    """Return True for a file of labelled questions, by its first line."""
    with suppress(IndexError, ValueError, TypeError):
        return KEY in json.loads(read_input(path)[0].text)
    return False


def read_labelled(path: Path) -> list[LabelledQuestion]:
    """The questions of a file, one per line: ``{"input": …, "question": {…}, "answer":
    …}`` with OpenAI's input and question. Raises ``ValueError`` with the number of a
    wrong line.
    """
    labelled = []
    for line in read_input(path):
        try:
            fields = json.loads(line.text)
            question = read_question(fields[KEY], [KEY])
            answer = _index_of(fields["answer"], question)
            messages = read_messages(fields["input"])
        except QuestionError as error:
            reason = f"{error.path}: {error.message}"
            raise ValueError(f"{path}: line {line.index + 1}: {reason}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f'{path}: line {line.index + 1} must be {{"input": "…", "question": '
                f'{{…}}, "answer": …}}: {error!r}'
            ) from None
        labelled.append(LabelledQuestion(messages, question, answer))
    if not labelled:
        raise ValueError(f"{path} holds no questions; give it a line per question")
    return labelled


def _index_of(answer: Any, question: Question) -> int:
    """Index of the option that an answer names: true or false, the label, or for a
    score also the index of the level.
    """
    if question.kind == "yes_no":
        if not isinstance(answer, bool):
            raise QuestionError(["answer"], f"{answer!r} is neither true nor false")
        return 0 if answer else 1
    if question.kind == "score" and type(answer) is int:
        if not 0 <= answer < len(question.options):
            raise QuestionError(
                ["answer"], f"there is no level {answer}; they are counted from 0"
            )
        return answer
    for index, option in enumerate(question.options):
        if type(option.label) is type(answer) and option.label == answer:
            return index
    raise QuestionError(["answer"], f"{answer!r} is none of the labels")


@dataclass(frozen=True)
class Scores:
    """Scores of answers. Of the last two, lower is better."""

    right: list[float]
    """1 for each right answer, else 0."""
    bins: list[tuple[float, float, int]]
    """Result of ``reliability``."""
    brier: float
    """Mean squared difference of the probabilities from 1 for the right option and 0
    for the others, summed over options.
    """
    log_loss: float
    """Mean negative log-probability of the right option."""

    @property
    def accuracy(self) -> float:
        return float(np.mean(self.right))

    @property
    def calibration_error(self) -> float:
        return calibration_error(self.bins)


def scores_of(shares: Sequence[np.ndarray], answers: Sequence[int]) -> Scores:
    """Scores of the probabilities of each question's options."""
    right, best, squares, losses = [], [], [], []
    for probabilities, answer in zip(shares, answers, strict=True):
        is_right = np.arange(len(probabilities)) == answer
        right.append(float(np.argmax(probabilities) == answer))
        best.append(float(max(probabilities)))
        squares.append(float(((probabilities - is_right) ** 2).sum()))
        losses.append(-float(np.log(max(probabilities[answer], 1e-12))))
    bins = reliability(best, right)
    return Scores(right, bins, float(np.mean(squares)), float(np.mean(losses)))


def reliability(
    probabilities: Sequence[float], scores: Sequence[float]
) -> list[tuple[float, float, int]]:
    """Mean probability, share of right values, and number of values, for each tenth of
    probability with values."""
    pairs = np.column_stack((probabilities, scores))
    numbers = np.minimum(pairs[:, 0] * 10, 9).astype(int)
    bins = (pairs[numbers == number] for number in np.unique(numbers))
    return [
        (tenth[:, 0].mean().item(), tenth[:, 1].mean().item(), len(tenth))
        for tenth in bins
    ]


def calibration_error(bins: Sequence[tuple[float, float, int]]) -> float:
    """The expected calibration error: the weighted mean difference in ``bins``."""
    means, shares, sizes = zip(*bins, strict=True)
    return float(np.average(np.abs(np.subtract(means, shares)), weights=sizes))


@dataclass(frozen=True)
class QuestionTask(Task):
    """Task of labelled questions. Each is asked alone, with the engine's template."""

    questions: Sequence[LabelledQuestion]

    @property
    def digest(self) -> str:
        return settings_digest(repr(self.questions))

    def score(self, engine: MeasuredEngine, decoding: dict[str, Any]) -> Result:
        """The share of right answers, its calibration and Brier score."""
        unused = decoding.keys() - {"gen_length", "seed"}
        if unused:
            raise ValueError(
                f"{min(unused)}: a question is answered in one pass; leave it out"
            )
        asking = engine.llm.asking
        tokenizer = engine.llm.get_tokenizer()
        rows, requests = [], []
        for labelled in self.questions:
            rows.append(asking.rows(labelled.messages, [labelled.question], False))
            for row in rows[-1]:
                messages: list[Any] = row.messages
                requests.append((prompt_tokens(messages, tokenizer), row.params))
        completions, _ = engine.complete(requests)
        results = iter(completions)
        shares, masses = [], []
        for labelled, question_rows in zip(self.questions, rows, strict=True):
            decisions = [next(results).diffusion.decision for _ in question_rows]
            (answer,) = asking.answers([labelled.question], question_rows, decisions)
            shares.append(np.array(answer.probabilities))
            masses.append(answer.label_mass)
        scores = scores_of(shares, [labelled.answer for labelled in self.questions])
        details = {
            "scores": scores.right,
            "calibration_error": scores.calibration_error,
            "reliability": scores.bins,
            "brier": scores.brier,
            "log_loss": scores.log_loss,
            "label_mass": float(np.mean(masses)),
        }
        figures = mean_and_error(scores.right)
        return Result("answers", *figures, len(scores.right), details)
