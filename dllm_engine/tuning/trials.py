"""Trials: what was measured of each setting, and the file that keeps it from run to run."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, TypeAdapter

from dllm_engine.evaluation.answering import Cost
from dllm_engine.evaluation.result_file import ResultFile, read_results
from dllm_engine.tuning.space import PLAIN, Setting

COMMAND, SCHEMA = "tune", 2


StoredSetting = Annotated[Setting, BeforeValidator(Setting.from_json), PlainSerializer(Setting.to_json)]


@dataclass
class Trial:
    """A setting and what was measured of it."""

    setting: StoredSetting
    scores: list[float] = field(default_factory=list)
    """Of the first examples, between 0 and 1."""
    cost: Cost = field(default_factory=Cost)
    """Of answering them."""
    speeds: dict[int, Cost] = field(default_factory=dict)
    """By batch size."""
    error: str | None = None
    """Why the setting cannot be run."""


@dataclass
class Turns:
    """Plain decoding and a setting, measured in turns on the same prompts. Tokens per second, a value per round."""

    setting: StoredSetting
    plain: list[float] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Of each round that both have finished."""
        return [chosen / plain for plain, chosen in zip(self.plain, self.chosen, strict=False) if plain]


_TRIALS, _TURNS = TypeAdapter(list[Trial]), TypeAdapter(dict[int, Turns])
_RUNGS = TypeAdapter(list[list[StoredSetting]])


class TrialFile(ResultFile):
    """All trials of a model on some tasks. A run goes on where the one before it stopped.

    Args:
        path: JSON; need not exist.
        subject: what trials depend on beside their setting: model, tasks, response length, engine arguments.

    Raises:
        ValueError: the file is of another model, of other tasks, or none of this command.
    """

    def __init__(self, path: Path, subject: dict[str, Any]) -> None:
        super().__init__(path, COMMAND, SCHEMA, subject)
        stored = self.stored
        self.trials = {trial.setting: trial for trial in _TRIALS.validate_python(stored.get("trials", []))}
        self.turns = _TURNS.validate_python(stored.get("turns", {}))
        self.goal: dict[str, Any] = stored.get("goal", {})
        self.rungs = _RUNGS.validate_python(stored.get("rungs", []))
        """Settings of each rung of the search for the goal, so that a run takes the same way as the one before it."""
        self.done: list[int] = stored.get("rungs_done", [])
        """Rungs that are through."""
        self.result: dict[str, Any] = {}
        """What is written beside them: the chosen settings, the machine."""

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
        """Write all of it."""
        measured = [trial for trial in self.trials.values() if trial.scores or trial.error]
        self.write(
            depth=2,
            goal=self.goal,
            **self.result,
            rungs_done=self.done,
            rungs=_RUNGS.dump_python(self.rungs, mode="json"),
            turns=_TURNS.dump_python(self.turns, mode="json"),
            trials=_TRIALS.dump_python(measured, mode="json"),
        )


def chosen_setting(path: Path, batch: int | None) -> tuple[str, dict[str, Any]]:
    """The model and the chosen setting in what ``dllm tune`` wrote; None takes the largest batch size.

    Raises ``ValueError`` for any other file, one without a chosen setting, or not at the batch size.
    """
    stored = read_results(path, COMMAND, SCHEMA)
    chosen = stored.get("chosen") or {}
    if not chosen:
        raise ValueError(f"{path} has no chosen setting yet; run its `dllm tune` again, which goes on")
    if batch is None:
        batch = max(map(int, chosen))
    if str(batch) not in chosen:
        raise ValueError(f"{path} has no setting for batch size {batch}; it has some for {', '.join(chosen)}")
    return stored["subject"]["model"], chosen[str(batch)]
