"""Calibration, which ``dllm calibrate`` fits to labelled questions and servers apply."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple, get_args

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from dllm_engine.decisions.questions import Kind, Question
from dllm_engine.text import explain

KINDS: tuple[Kind, ...] = get_args(Kind)
SMALLEST = 1e-12
"""Lower limit of probabilities."""
MOST_ORDERS = 4
"""Limit on the orders of a choice's options over which a correction takes the mean."""


class Reading(NamedTuple):
    """One way to ask a question: the options in this order, about the input or without
    an input.
    """

    order: tuple[int, ...]
    is_blank: bool


class Readings(NamedTuple):
    """Probabilities of a question's options in several readings, with the input and
    without (``blank``). The order of the question comes first. ``blank`` is empty if no
    correction needs it.
    """

    with_input: list[list[float]]
    blank: list[list[float]]


@dataclass(frozen=True)
class Correction:
    """Correction of the answers to a kind of question: the mean over orders, divided by
    the prior, at a temperature.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """A temperature above 1 makes the answers less sure."""
    orders: Annotated[int, Field(ge=1, le=MOST_ORDERS)] = 1
    """Number of orders in which the options are listed, if they have so many."""
    has_prior: bool = False
    """Divide by the probabilities that the options have without an input."""

    def readings(self, question: Question) -> list[Reading]:
        """The readings of a question that are needed."""
        orders = _orders(question)
        count = min(self.orders, len(orders))
        chosen = [orders[i * len(orders) // count] for i in range(count)]
        blank = [False, True] if self.has_prior else [False]
        return [Reading(order, is_blank) for is_blank in blank for order in chosen]

    def applied(self, readings: Readings) -> np.ndarray:
        """Probabilities of the options of a question."""
        if self == Correction():
            return np.array(readings.with_input[0])
        logs = _log_mean(readings.with_input[: self.orders])
        if self.has_prior:
            logs = logs - _log_mean(readings.blank[: self.orders])
        logs = logs / self.temperature
        shares = np.exp(logs - logs.max())
        return shares / shares.sum()


def _orders(question: Question) -> list[tuple[int, ...]]:
    """Orders in which options may be listed: any rotation of a choice, a score from
    either end.
    """
    numbers = tuple(range(len(question.options)))
    if question.kind == "choice":
        return [numbers[i:] + numbers[:i] for i in numbers]
    return [numbers, numbers[::-1]] if question.kind == "score" else [numbers]


def _log_mean(shares: Sequence[Sequence[float]]) -> np.ndarray:
    return np.log(np.maximum(np.mean(shares, axis=0), SMALLEST))


@dataclass(frozen=True)
class Calibration:
    """A correction for each kind of question that needs one."""

    corrections: Mapping[Kind, Correction] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | None) -> "Calibration":
        """The calibration in a file. Raises ``ValueError`` if there is none in it."""
        return cls() if path is None else _read(path)

    def of(self, kind: Kind) -> Correction:
        return self.corrections.get(kind, Correction())

    def write(self, path: Path) -> None:
        content = {kind: asdict(each) for kind, each in self.corrections.items()}
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


_CORRECTIONS = TypeAdapter(dict[Kind, Correction])


@lru_cache(maxsize=4)
def _read(path: str) -> Calibration:
    try:
        content = Path(path).read_bytes()
        corrections = _CORRECTIONS.validate_json(content, strict=True)
    except ValidationError as error:
        raise ValueError(
            f"decision_calibration={path!r} is not a file that dllm calibrate wrote: "
            f"{explain(error, '')}"
        ) from None
    except OSError as error:
        raise ValueError(f"decision_calibration={path!r}: {error}") from None
    return Calibration(corrections)
