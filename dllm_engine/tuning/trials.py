"""Trials: what was measured of each setting, and the file that keeps it from run to run."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dllm_engine.text import json_rows
from dllm_engine.tuning.space import PLAIN, Setting

SCHEMA = 1
"""Of result files; raised where a reader of older ones would go wrong."""


@dataclass
class Timing:
    """Requests answered at one batch size."""

    requests: int = 0
    tokens: int = 0
    """Before the first end token of each response; never the prompt's."""
    seconds: float = 0.0

    def add(self, other: "Timing") -> None:
        """Count another measurement in."""
        self.requests += other.requests
        self.tokens += other.tokens
        self.seconds += other.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Trial:
    """A setting and what was measured of it."""

    setting: Setting
    scores: list[float] = field(default_factory=list)
    """Of the first examples, between 0 and 1."""
    forward_passes: int = 0
    tokens_unmasked: int = 0
    seconds: float = 0.0
    """That answering took."""
    speeds: dict[int, Timing] = field(default_factory=dict)
    """By batch size."""
    error: str | None = None
    """Why the setting cannot be run."""

    def to_json(self) -> dict[str, Any]:
        """As ``from_json`` reads it."""
        scores = [int(score) if score in (0, 1) else score for score in self.scores]
        return asdict(self) | {"setting": self.setting.to_json(), "scores": scores}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Trial":
        """Raises ``KeyError`` or ``TypeError`` for what ``to_json`` did not make."""
        speeds = {int(batch): Timing(**timing) for batch, timing in value["speeds"].items()}
        return cls(**value | {"setting": Setting.from_json(value["setting"]), "speeds": speeds})


@dataclass
class Turns:
    """Plain decoding and a setting, measured in turns on the same prompts. Tokens per second, a value per round."""

    setting: Setting
    plain: list[float] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Of each round that both have finished."""
        return [chosen / plain for plain, chosen in zip(self.plain, self.chosen, strict=False) if plain]

    def to_json(self) -> dict[str, Any]:
        """As ``from_json`` reads it."""
        return asdict(self) | {"setting": self.setting.to_json()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Turns":
        """Raises ``KeyError`` or ``TypeError`` for what ``to_json`` did not make."""
        return cls(**value | {"setting": Setting.from_json(value["setting"])})


class TrialFile:
    """All trials of a model on some tasks. A run goes on where the one before it stopped.

    Args:
        path: JSON; need not exist.
        subject: what trials depend on beside their setting: model, tasks, response length, engine arguments.

    Raises:
        ValueError: the file is of another model, of other tasks, or none of this command.
    """

    def __init__(self, path: Path, subject: dict[str, Any]) -> None:
        self.path = path
        self.subject: dict[str, Any] = json.loads(json.dumps(subject))
        self.trials: dict[Setting, Trial] = {}
        self.turns: dict[int, Turns] = {}
        self.goal: dict[str, Any] = {}
        self.rungs: list[list[Setting]] = []
        """Settings of each rung of the search for the goal, so that a run takes the same way as the one before it."""
        self.done: list[int] = []
        """Rungs that are through."""
        self.result: dict[str, Any] = {}
        """What is written beside them: the chosen settings, the machine."""
        if not path.parent.is_dir():
            raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
        if path.exists():
            self._read()

    def trial(self, setting: Setting) -> Trial:
        """The trial of a setting, empty if it is new."""
        return self.trials.setdefault(setting, Trial(setting))

    @property
    def plain(self) -> Trial:
        return self.trial(PLAIN)

    def start(self, goal: dict[str, Any]) -> None:
        """Search for a goal; what another goal has led to is forgotten, but no trial."""
        goal = json.loads(json.dumps(goal))
        if goal != self.goal:
            self.goal, self.rungs, self.done = goal, [], []

    def save(self) -> None:
        """Write all of it, so that an interruption leaves the old file or the new one."""
        written = {
            "schema": SCHEMA,
            "subject": self.subject,
            "goal": self.goal,
            **self.result,
            "rungs_done": self.done,
            "rungs": [[setting.to_json() for setting in rung] for rung in self.rungs],
            "turns": {str(batch): turns.to_json() for batch, turns in self.turns.items()},
            "trials": [trial.to_json() for trial in self._measured()],
        }
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(json_rows(written, depth=2) + "\n", encoding="utf-8")
        os.replace(beside, self.path)

    def _measured(self) -> Iterable[Trial]:
        return (trial for trial in self.trials.values() if trial.scores or trial.error)

    def _read(self) -> None:
        stored = read_results(self.path)
        for name, value in self.subject.items():
            if stored["subject"].get(name) != value:
                raise ValueError(
                    f"{self.path} has trials with {name}={stored['subject'].get(name)!r}, this run has {value!r}; "
                    f"choose another --output, or remove the file"
                )
        self.turns = {int(batch): Turns.from_json(turns) for batch, turns in stored["turns"].items()}
        self.goal, self.done = stored["goal"], stored["rungs_done"]
        self.rungs = [list(map(Setting.from_json, rung)) for rung in stored["rungs"]]
        trials = map(Trial.from_json, stored["trials"])
        self.trials = {trial.setting: trial for trial in trials}


def chosen_setting(path: Path, batch: int | None) -> tuple[str, dict[str, Any]]:
    """The model and the chosen setting in what ``dllm tune`` wrote; None takes the largest batch size.

    Raises ``ValueError`` for any other file, one without a chosen setting, or not at the batch size.
    """
    stored = read_results(path)
    chosen = stored.get("chosen") or {}
    if not chosen:
        raise ValueError(f"{path} has no chosen setting yet; run its `dllm tune` again, which goes on")
    if batch is None:
        batch = max(map(int, chosen))
    if str(batch) not in chosen:
        raise ValueError(f"{path} has no setting for batch size {batch}; it has some for {', '.join(chosen)}")
    return stored["subject"]["model"], chosen[str(batch)]


def read_results(path: Path) -> dict[str, Any]:
    """What ``dllm tune`` wrote; raises ``ValueError`` for any other file."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA or "subject" not in stored:
        raise ValueError(f"{path} is no result of this version's `dllm tune`; give another file, or tune again")
    return stored
