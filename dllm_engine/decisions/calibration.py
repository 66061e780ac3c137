"""Calibration: what ``dllm calibrate`` fitted on labelled questions, and servers apply."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

KINDS = ("yes_no", "choice", "score")
SMALLEST = 1e-12
"""Probabilities below it count as this much."""


@dataclass(frozen=True)
class Calibration:
    """A temperature for each kind of question; above 1 the answers are less sure."""

    temperatures: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | None) -> "Calibration":
        """The calibration in a file; raises ``ValueError`` for one that has none."""
        return cls() if path is None else _read(path)

    def applied(self, kind: str, shares: Sequence[float]) -> np.ndarray:
        """Probabilities of the options of a question, from the model's."""
        logs = np.log(np.maximum(shares, SMALLEST)) / self.temperatures.get(kind, 1.0)
        scaled = np.exp(logs - logs.max())
        return scaled / scaled.sum() if kind in self.temperatures else np.array(shares)

    def write(self, path: Path) -> None:
        path.write_text(
            json.dumps({"temperatures": dict(self.temperatures)}, indent=2) + "\n",
            encoding="utf-8",
        )


@lru_cache(maxsize=4)
def _read(path: str) -> Calibration:
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
        temperatures = {
            kind: float(value) for kind, value in given["temperatures"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"decision_calibration={path!r} is no file that dllm calibrate wrote: "
            f"{error!r}"
        ) from None
    for kind, value in temperatures.items():
        if kind not in KINDS or not 0 < value < np.inf:
            raise ValueError(
                f"decision_calibration={path!r}: temperature {kind}={value}; allowed "
                f"are positive numbers for {', '.join(KINDS)}"
            )
    return Calibration(temperatures)
