"""A check, what came of it, and the table of all."""

import itertools
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dllm_engine.evaluation.machine import synchronize
from dllm_engine.text import format_table, one_line

OK, FAILED, NOT_RUN = "ok", "FAILED", "not run"
BOUNDS = {torch.int64: 0.0, torch.float64: 1e-12, torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest error that rounding explains, by the type of what was computed."""
_Error = tuple[float, float]
"""An error and its bound."""


class CannotRunError(Exception):
    """A check does not apply here; the text says why."""


def cannot_run(reason: str) -> _Error:
    """In place of a check that does not apply here."""
    raise CannotRunError(reason)


@dataclass(frozen=True)
class Check:
    """One comparison."""

    name: str
    """Checks of the same name share a line of the table where they went alike."""
    case: str
    """Its type and sizes."""
    run: Callable[[], _Error]
    """Returns the error and its bound. Raises ``CannotRunError`` where it does not apply; any other is a failure."""


@dataclass(frozen=True)
class Outcome:
    """What came of a check."""

    name: str
    case: str
    result: str
    """``OK``, ``FAILED`` or ``NOT_RUN``."""
    seconds: float
    """Of the whole check, with compiling and the CPU's part."""
    error: float | None = None
    bound: float | None = None
    reason: str = ""
    """Why it was not run, or what was raised."""
    traceback: str = ""


def compare(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> _Error:
    """Error and bound of a tensor that is beyond its bound, else of the one that is closest to it.

    The error is the largest difference over the largest expected number. Infinities and NaN must be in the same places.

    Args:
        actual: tensors of the device; their types decide the bounds.
        expected: tensors of the CPU, of the same shapes.
    """
    errors = [(_error(a, e), BOUNDS[a.dtype]) for a, e in zip(actual, expected, strict=True)]
    beyond = (each for each in errors if not each[0] <= each[1])
    return next(beyond, max(errors, key=lambda each: each[0] / (each[1] or 1.0)))


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape:
        raise ValueError(f"the shape is {list(actual.shape)}, not {list(expected.shape)}")
    a, e = actual.cpu().double(), expected.double()
    differences = (a - e).abs().masked_fill_((a == e) | (a.isnan() & e.isnan()), 0.0)
    largest = e.where(e.isfinite(), 0.0).abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    return float(differences.amax() / largest)


def run_checks(checks: Iterable[Check]) -> Iterator[Outcome]:
    """Run one after the other; what one raises does not stop the others."""
    for check in checks:
        start = time.perf_counter()
        try:
            error, bound = check.run()
            synchronize()
        except Exception as raised:
            seconds = time.perf_counter() - start
            if isinstance(raised, CannotRunError):
                yield Outcome(check.name, check.case, NOT_RUN, seconds, reason=one_line(raised))
            else:
                reason = f"{type(raised).__name__}: {(str(raised).strip().splitlines() or [''])[0]}"
                trace = "".join(traceback.format_exception(raised))
                yield Outcome(check.name, check.case, FAILED, seconds, reason=reason, traceback=trace)
        else:
            seconds = time.perf_counter() - start
            if math.isnan(error):
                yield Outcome(check.name, check.case, FAILED, seconds, reason="NaN where a number is expected")
            else:
                yield Outcome(check.name, check.case, OK if error <= bound else FAILED, seconds, error, bound)


def as_table(outcomes: Iterable[Outcome]) -> str:
    """By name, a line for each failure, and one for neighbours that went alike, which shows the case closest to its
    bound."""
    outcomes = list(outcomes)
    names = [each.name for each in outcomes]
    ordered = sorted(outcomes, key=lambda each: names.index(each.name))
    rows = [("CHECK", "CASE", "ERROR", "BOUND", "TIME", "RESULT")]
    for (name, result, reason), group in itertools.groupby(ordered, key=lambda o: (o.name, o.result, o.reason)):
        members = list(group)
        for line in [[each] for each in members] if result == FAILED else [members]:
            worst = max(line, key=lambda o: (o.error or 0.0) / (o.bound or 1.0))
            case = worst.case if len(line) == 1 else f"{len(line)} cases" + (f", {worst.case}" if worst.error else "")
            numbers = ["" if number is None else f"{number:.1e}" for number in (worst.error, worst.bound)]
            seconds = f"{sum(each.seconds for each in line):.2f} s"
            rows.append((name, case, *numbers, seconds, f"{result}: {reason}" if reason else result))
    return format_table(rows)
