"""Calibration of a model's probabilities on labelled questions: a temperature for each
kind of question, fitted on one half of them and judged on the other.
"""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dllm_engine.batch import settings_digest
from dllm_engine.decisions.asking import Asking, Row, fields_by_question
from dllm_engine.decisions.calibration import KINDS, SMALLEST, Calibration
from dllm_engine.decisions.questions import Answer, Question
from dllm_engine.evaluation.labelled_questions import (
    LabelledQuestion,
    Scores,
    scores_of,
)

LEAST_QUESTIONS = 10
"""Of a kind, in the half that a temperature is fitted on."""
_AT_ONCE = 64
_TEMPERATURES = np.geomspace(0.1, 20.0, 107)  # 5 % apart


@dataclass(frozen=True)
class Measured:
    """A model's answer to a labelled question."""

    shares: list[float]
    """Probability of each option."""
    is_flipped: bool
    """True if it chooses another option when they are listed in another order."""


@dataclass(frozen=True)
class Fitted:
    """A calibration, and scores of the held-back questions without it and with it."""

    calibration: Calibration
    before: Scores
    after: Scores
    flips: float
    """Share of all questions with several options in any order whose answer changes
    with the order.
    """


def measure(
    asking: Asking,
    ask: Callable[[list[Row]], Iterable[Any]],
    questions: Sequence[LabelledQuestion],
    path: Path,
) -> list[Measured]:
    """Answers to all questions. They are kept in the file ``path``, so that the same
    run goes on from there.
    """
    settings = repr(questions), asking.way, asking.options.model_dump(mode="json")
    digest = settings_digest(settings)
    measured = _kept(path, digest)
    if not measured:
        path.write_text(json.dumps({"digest": digest}) + "\n", encoding="utf-8")
    with (
        path.open("a", encoding="utf-8") as kept,
        tqdm(total=len(questions), initial=len(measured), leave=False) as bar,
    ):
        while len(measured) < len(questions):
            part = questions[len(measured) : len(measured) + _AT_ONCE]
            plain = _answers(asking, ask, part)
            rotated = _answers(asking, ask, [_rotated(each) for each in part])
            for own, other in zip(plain, rotated, strict=True):
                count = len(own.probabilities)
                is_flipped = (other.best + 1) % count != own.best
                is_flipped &= own.question.kind == "choice"
                measured.append(Measured([*own.probabilities], is_flipped))
                kept.write(json.dumps(asdict(measured[-1])) + "\n")
            kept.flush()
            bar.update(len(part))
    return measured


def _kept(path: Path, digest: str) -> list[Measured]:
    """Answers of an earlier run; none of one with other questions or settings."""
    if not path.exists():
        return []
    first, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    if first != json.dumps({"digest": digest}):
        return []
    return [Measured(**json.loads(line)) for line in lines]


def _answers(
    asking: Asking,
    ask: Callable[[list[Row]], Iterable[Any]],
    labelled: Sequence[LabelledQuestion],
) -> list[Answer]:
    rows_of = [asking.rows(each.messages, [each.question], False) for each in labelled]
    outputs = iter(ask([row for rows in rows_of for row in rows]))
    answers = []
    for each, rows in zip(labelled, rows_of, strict=True):
        decisions = [next(outputs).outputs[0].diffusion.decision for _ in rows]
        read = fields_by_question(rows, decisions)
        answers += asking.answers([each.question], read)
    return answers


def _rotated(labelled: LabelledQuestion) -> LabelledQuestion:
    """The question with its first option listed last, where the order is free."""
    question: Question = labelled.question
    if question.kind != "choice":
        return labelled
    first, *others = question.options
    return replace(labelled, question=replace(question, options=(*others, first)))


def fit(
    questions: Sequence[LabelledQuestion], measured: Sequence[Measured], seed: int
) -> Fitted:
    """A temperature for each kind whose held-back questions it makes more probable.

    Raises ``ValueError`` where there are too few questions.
    """
    order = list(range(len(questions)))
    random.Random(seed).shuffle(order)
    fitted_on, held_back = order[::2], order[1::2]
    if len(held_back) < LEAST_QUESTIONS:
        raise ValueError(
            f"{len(questions)} questions are too few to calibrate; give at least "
            f"{2 * LEAST_QUESTIONS}"
        )
    temperatures = {}
    for kind in KINDS:
        own = [i for i in fitted_on if questions[i].question.kind == kind]
        others = [i for i in held_back if questions[i].question.kind == kind]
        if len(own) < LEAST_QUESTIONS or not others:
            continue
        losses = [_log_loss(questions, measured, own, t) for t in _TEMPERATURES]
        best = float(_TEMPERATURES[int(np.argmin(losses))])
        plain = _log_loss(questions, measured, others, 1.0)
        if _log_loss(questions, measured, others, best) < plain:
            temperatures[kind] = best
    calibration = Calibration(temperatures)
    answers = [questions[i].answer for i in held_back]
    before = [np.array(measured[i].shares) for i in held_back]
    after = [
        calibration.applied(questions[i].question.kind, measured[i].shares)
        for i in held_back
    ]
    free = [
        each.is_flipped
        for each, labelled in zip(measured, questions, strict=True)
        if labelled.question.kind == "choice"
    ]
    return Fitted(
        calibration,
        scores_of(before, answers),
        scores_of(after, answers),
        float(np.mean(free)) if free else 0.0,
    )


def _log_loss(
    questions: Sequence[LabelledQuestion],
    measured: Sequence[Measured],
    numbers: Sequence[int],
    temperature: float,
) -> float:
    """Mean negative log-probability of the right options at a temperature."""
    losses = []
    for i in numbers:
        logs = np.log(np.maximum(measured[i].shares, SMALLEST)) / temperature
        losses.append(np.logaddexp.reduce(logs) - logs[questions[i].answer])
    return float(np.mean(losses))
