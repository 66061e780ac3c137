"""Calibration of a model's probabilities on labelled questions: a correction for each
kind of question, fitted on one half of the questions and tested on the other.
"""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from dllm_engine.batch import settings_digest
from dllm_engine.decisions.asking import (
    Asking,
    Row,
    readings_of,
)
from dllm_engine.decisions.calibration import (
    KINDS,
    MOST_ORDERS,
    SMALLEST,
    Calibration,
    Correction,
    Readings,
)
from dllm_engine.evaluation.labelled_questions import (
    LabelledQuestion,
    Scores,
    scores_of,
)
from dllm_engine.output_lock import replace_output

LEAST_QUESTIONS = 10
"""Minimum number of questions of a kind, in the half that corrections are fitted on."""
LEAST_GAIN, WORTH_ITS_ROWS = 0.001, 0.01
"""Minimum decrease of the mean log loss of held-back questions, in nats, for any
correction, and for a correction that reads more rows. If all answers are right and
sure, any lower temperature gains a little.
"""
ALL = "all"
"""Questions of all kinds."""
_AT_ONCE = 16
_TEMPERATURES = np.geomspace(0.1, 20.0, 107)  # 5 % apart
_ALL = Correction(orders=MOST_ORDERS, has_prior=True)
"""Correction that needs all readings."""


class Measured(NamedTuple):
    """Measured probabilities of the options of a labelled question."""

    plain: Readings
    rotated: Readings
    """Readings with the first option listed last, if the order is free."""


class Judged(NamedTuple):
    """Scores of held-back questions. ``flips``: share of choices whose answer changes
    with the order of options; None without choices.
    """

    scores: Scores
    flips: float | None


@dataclass(frozen=True)
class Fitted:
    """A calibration, and scores of the held-back questions without and with it, by kind
    and for ``ALL``.
    """

    calibration: Calibration
    before: dict[str, Judged]
    after: dict[str, Judged]


def measure(
    asking: Asking,
    ask: Callable[[list[Row]], Iterable[Any]],
    questions: Sequence[LabelledQuestion],
    path: Path,
) -> list[Measured]:
    """Measure all questions. Results are kept in the file ``path``, so that an
    interrupted run can be resumed.
    """
    asking.calibration = Calibration(dict.fromkeys(KINDS, _ALL))
    settings = repr(questions), asking.way, asking.options.model_dump(mode="json")
    digest = settings_digest(settings)
    measured = _kept(path, digest)
    with tqdm(total=len(questions), initial=len(measured), leave=False) as bar:
        while len(measured) < len(questions):
            part = questions[len(measured) : len(measured) + _AT_ONCE]
            plain = _readings(asking, ask, part)
            rotated = _readings(asking, ask, [_rotated(labelled) for labelled in part])
            for labelled, reading, rotated_reading in zip(
                part, plain, rotated, strict=True
            ):
                if labelled.question.kind == "choice":
                    rotated_reading = Readings(*map(_rotated_back, rotated_reading))
                measured.append(Measured(reading, rotated_reading))
            replace_output(path, json.dumps({"digest": digest, "readings": measured}))
            bar.update(len(part))
    return measured


def _rotated_back(shares: list[list[float]]) -> list[list[float]]:
    return [[last, *others] for *others, last in shares]


def _kept(path: Path, digest: str) -> list[Measured]:
    """The stored results of an earlier run with the same questions and settings."""
    if not path.exists():
        return []
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["digest"] != digest:
        return []
    return [
        Measured(Readings(*plain), Readings(*rotated))
        for plain, rotated in kept["readings"]
    ]


def _readings(
    asking: Asking,
    ask: Callable[[list[Row]], Iterable[Any]],
    questions: Sequence[LabelledQuestion],
) -> list[Readings]:
    row_groups = [
        asking.rows(labelled.messages, [labelled.question], False)
        for labelled in questions
    ]
    outputs = iter(ask([row for rows in row_groups for row in rows]))
    readings = []
    for rows in row_groups:
        decisions = [next(outputs).outputs[0].diffusion.decision for _ in rows]
        read, _ = readings_of(rows, decisions)
        # A question with one option is not asked.
        readings.append(read.get(0, Readings([[1.0]], [[1.0]])))
    return readings


def _rotated(labelled: LabelledQuestion) -> LabelledQuestion:
    """The question with its first option listed last, if the order is free."""
    question = labelled.question
    if question.kind != "choice":
        return labelled
    first, *others = question.options
    return replace(labelled, question=replace(question, options=(*others, first)))


def fit(
    questions: Sequence[LabelledQuestion], measured: Sequence[Measured], seed: int
) -> Fitted:
    """Fit a correction for each kind of question. It is used only if it makes the
    answers of held-back questions more probable.

    Raises ``ValueError`` if there are too few questions.
    """
    order = list(range(len(questions)))
    random.Random(seed).shuffle(order)
    fitted_on, held_back = order[::2], order[1::2]
    if len(held_back) < LEAST_QUESTIONS:
        raise ValueError(
            f"{len(questions)} questions are too few to calibrate; give at least "
            f"{2 * LEAST_QUESTIONS}"
        )

    def of_kind(numbers: Sequence[int], kind: str) -> list[int]:
        return [i for i in numbers if questions[i].question.kind == kind]

    def answered(numbers: Sequence[int]) -> list[tuple[Readings, int]]:
        return [(measured[i].plain, questions[i].answer) for i in numbers]

    corrections = {}
    for kind in KINDS:
        fitting, others = of_kind(fitted_on, kind), of_kind(held_back, kind)
        if len(fitting) >= LEAST_QUESTIONS and others:
            correction = _best_correction(answered(fitting), answered(others))
            if correction != Correction():
                corrections[kind] = correction
    groups = {kind: of_kind(held_back, kind) for kind in KINDS} | {ALL: held_back}
    calibration = Calibration(corrections)
    before, after = (
        {
            name: _judged(
                corrected, [questions[i] for i in group], [measured[i] for i in group]
            )
            for name, group in groups.items()
            if group
        }
        for corrected in (Calibration(), calibration)
    )
    return Fitted(calibration, before, after)


def _judged(
    calibration: Calibration,
    questions: Sequence[LabelledQuestion],
    measured: Sequence[Measured],
) -> Judged:
    shares, flipped = [], []
    for labelled, result in zip(questions, measured, strict=True):
        correction = calibration.of(labelled.question.kind)
        shares.append(correction.applied(result.plain))
        if labelled.question.kind == "choice":
            rotated = correction.applied(result.rotated)
            flipped.append(np.argmax(shares[-1]) != np.argmax(rotated))
    scores = scores_of(shares, [labelled.answer for labelled in questions])
    return Judged(scores, float(np.mean(flipped)) if flipped else None)


def _best_correction(
    fitting: Sequence[tuple[Readings, int]], held_back: Sequence[tuple[Readings, int]]
) -> Correction:
    """The correction with which the right options of ``held_back`` are most probable.
    Temperatures are fitted on ``fitting``, pairs of readings and right option.
    """
    best, least_loss = Correction(), _log_loss(Correction(), held_back)
    for orders in (1, MOST_ORDERS):
        for has_prior in (False, True):
            correction = _fitted(Correction(1.0, orders, has_prior), fitting)
            loss = _log_loss(correction, held_back)
            margin = WORTH_ITS_ROWS if orders > 1 or has_prior else LEAST_GAIN
            if loss < least_loss - margin:
                best, least_loss = correction, loss
    return best


def _fitted(
    correction: Correction, answered: Sequence[tuple[Readings, int]]
) -> Correction:
    """The correction with its best temperature."""
    candidates = [replace(correction, temperature=float(t)) for t in _TEMPERATURES]
    losses = [_log_loss(candidate, answered) for candidate in candidates]
    return candidates[int(np.argmin(losses))]


def _log_loss(
    correction: Correction, answered: Sequence[tuple[Readings, int]]
) -> float:
    """Mean negative log-probability of right options."""
    right = [correction.applied(readings)[answer] for readings, answer in answered]
    return -float(np.log(np.maximum(right, SMALLEST)).mean())
