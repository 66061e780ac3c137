"""The search of ``dllm tune``, and its report.

One factor of the settings is varied after the other. All variants answer a few examples, the better third three times
as many, and so on (successive halving); the best are varied in the next factor, and in the end answer all examples. A
setting whose loss is refuted answers no more. Only missing answers are asked for, so a run with the trials of an
earlier one takes the same way and goes on from there.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dllm_engine.evaluation.comparison import mean_and_error, table
from dllm_engine.evaluation.plots import TradeoffPoint, draw_tradeoff
from dllm_engine.evaluation.runner import Cost
from dllm_engine.evaluation.trials import PLAIN, Factor, Setting, Space, Trial, TrialFile
from dllm_engine.text import one_line

FACTORS: tuple[Factor, ...] = ("rule", "window", "block_length", "cache_method", "cache_options", "rule")
"""The rule again, because a cache changes what it may risk."""
KEPT = 2
"""Settings per batch size that the next factor is varied of."""
GROWTH = 3
FIRST_EXAMPLES = 32
"""Examples before a setting is judged at all."""
MIN_TIMED = 8
"""Requests that a speed is measured on, or twice the batch size if that is more."""
PLAIN_SHARE = 0.2
"""Share of the budget for the answers of plain decoding; they decide how many examples there are."""
SHOWN = 6
"""Settings per batch size in the table, and errors."""
COLUMNS = {
    "": ("mark", ""),
    "SETTING": ("setting", ""),
    "ACCURACY": ("accuracy", ".1%"),
    "±": ("accuracy_stderr", ".1%"),
    "LOSS": ("loss", ".1%"),
    "LOWEST": ("loss_lowest", ".1%"),
    "HIGHEST": ("loss_highest", ".1%"),
    "EXAMPLES": ("examples", ""),
    "PASSES/TOKEN": ("passes_per_token", ".2f"),
    "TOKENS/S": ("tokens_per_second", ".0f"),
}
Ask = Callable[[Setting, range, int], tuple[list[float], Cost]]
"""Scores of a setting on examples, so many at once, and the cost; raises ``ValueError`` if it cannot be run."""


class OutOfTimeError(Exception):
    """The budget is spent."""


class Search:
    """Finds the fastest setting within a loss, for each batch size.

    Args:
        ask: runs settings.
        file: trials so far; each is written as soon as it is measured.
        space: the settings that are tried.
        batches: numbers of requests at once.
        at_once: requests in the engine while examples are answered, on which accuracy does not depend.
        num_examples: all that there are.
        budget: seconds.
        clock: seconds.
    """

    def __init__(
        self,
        ask: Ask,
        file: TrialFile,
        space: Space,
        *,
        batches: Sequence[int],
        at_once: int,
        num_examples: int,
        budget: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.file, self.batches = file, tuple(dict.fromkeys(batches))
        self.tell: Callable[[str, float], None] = lambda what, left: None
        """Called with a setting that is measured and the seconds left at most."""
        self._run_setting, self._space, self._at_once, self._budget = ask, space, at_once, budget
        self._clock, self._deadline = clock, clock() + budget
        self._num_examples = num_examples
        self._chunk = max(FIRST_EXAMPLES, 2 * at_once)
        self._engine: dict[str, Any] = {}

    def run(self) -> bool:
        """Search within the budget, and return if it was enough. Interrupted, it leaves its trials in the file."""
        try:
            self._measure_plain()
            settings = [PLAIN]
            for factor in FACTORS:
                varied = [other for setting in settings for other in self._space.varied(setting, factor)]
                settings = self._halve([*settings, *varied])
            while unsettled := self._unsettled():
                self._measure(unsettled, self._num_examples)
        except OutOfTimeError:
            return False
        return True

    def _measure_plain(self) -> None:
        """Plain decoding answers first, and says how many examples the budget allows."""
        plain = self.file.plain
        self._measure([PLAIN], min(self._chunk, self._num_examples))
        if plain.error:
            raise ValueError(plain.error)
        affordable = int(PLAIN_SHARE * self._budget * len(plain.scores) / max(plain.cost.seconds, 1e-9))
        self._num_examples = min(self._num_examples, max(affordable, self._chunk, len(plain.scores)))
        self._measure([PLAIN], self._num_examples)

    def _halve(self, settings: list[Setting]) -> list[Setting]:
        """The best of some settings, at least ``KEPT`` per batch size."""
        examples, kept = self._chunk, len(settings)
        while True:
            examples = min(examples, self._num_examples)
            self._measure(settings, examples)
            kept = KEPT if examples == self._num_examples else max(KEPT, -(-kept // GROWTH))
            trials = [self.file.trial(setting) for setting in settings]
            best = [trial for b in self.batches for trial in self.file.ranked(b, trials, examples)[:kept]]
            settings = list({str(trial.setting): trial.setting for trial in best}.values()) or [PLAIN]
            if kept == KEPT:
                return settings
            examples *= GROWTH

    def _unsettled(self) -> list[Setting]:
        """The best settings of all that have not answered all examples."""
        best = [trial for batch in self.batches for trial in self.file.ranked(batch)[:KEPT]]
        return [trial.setting for trial in best if len(trial.scores) < self._num_examples]

    def _measure(self, settings: Iterable[Setting], examples: int) -> None:
        """Have settings answer so many examples, and measure their speeds; engine by engine, the running one first."""
        for setting in sorted(settings, key=lambda s: (s.engine != self._engine, str(s.engine))):
            trial = self.file.trial(setting)
            while (start := len(trial.scores)) < examples and not self.file.is_out(trial):
                scores, cost = self._ask(trial, range(start, min(start + self._chunk, examples)), self._at_once)
                trial.scores += scores
                trial.cost.add(cost)
                if scores and not start and self._at_once in self.batches:
                    trial.speeds[self._at_once] = cost.tokens_per_second
                self.file.save()
            for batch in self.batches:
                if batch not in trial.speeds and not self.file.is_out(trial):
                    timed = range(min(self._num_examples, max(MIN_TIMED, 2 * batch)))
                    trial.speeds[batch] = self._ask(trial, timed, batch)[1].tokens_per_second
                    self.file.save()

    def _ask(self, trial: Trial, indices: range, at_once: int) -> tuple[list[float], Cost]:
        left = self._deadline - self._clock()
        self.tell(str(trial.setting), left)
        if left < 0 and self.file.plain.speeds.keys() >= set(self.batches):
            raise OutOfTimeError
        self._engine = trial.setting.engine
        try:
            return self._run_setting(trial.setting, indices, at_once)
        except (ValueError, RuntimeError) as error:
            # A method and a rule may exclude each other, or memory may not suffice; the other settings go on.
            trial.error = one_line(error)
            return [], Cost()


def report(file: TrialFile, commands: dict[int, list[str]]) -> str:
    """Tables, the chosen settings, and the lines that use each, by batch size."""
    parts = []
    for batch, lines in commands.items():
        best = file.chosen(batch)
        shown = [t for place, t in enumerate(file.ranked(batch)) if place < SHOWN or t is best or t is file.plain]
        marked = [
            {"mark": "*" if t is best else "", "setting": "plain decoding" if t is file.plain else str(t.setting)}
            | file.figures(batch, t)
            for t in shown
        ]
        parts.append(f"Batch {batch}: settings by tokens/s and by how likely they are within the loss")
        parts.append(table(marked, COLUMNS))
        parts.append(_sentence(file.figures(batch, best), batch, 100 * file.limit))
        parts.append("\n".join(f"    {line}" for line in lines))
    asked, num_out = sum(len(trial.scores) for trial in file.scored), sum(map(file.is_out, file.scored))
    parts.append(f"{len(file.scored)} settings were asked {asked} examples in all; {num_out} lose too much.")
    errors = {trial.error: trial.setting for trial in file.trials.values() if trial.error}
    parts += [f"Cannot be run: {setting}: {error}" for error, setting in list(errors.items())[:SHOWN]]
    return "\n\n".join(parts)


def _sentence(values: dict[str, Any], batch: int, allowed: float) -> str:
    """The figures of a chosen setting, and how sure they are."""
    if values["is_plain"]:
        return f"At batch {batch}, nothing faster than plain decoding was found within {allowed:g} points."
    loss, *interval = (100 * values[name] for name in ("loss", "loss_lowest", "loss_highest"))
    sure = "shown to be" if values["shown"] else "not shown, but as observed"
    return (
        f"Chosen at batch {batch}: {values['tokens_per_second']:.0f} tokens/s, plain decoding "
        f"{values['plain_tokens_per_second']:.0f}.\nOn {values['examples']} examples it loses {loss:.1f} points (90 % "
        f"interval {interval[0]:.1f} … {interval[1]:.1f}): {sure} within the allowed {allowed:g}."
    )


def draw(file: TrialFile, batches: Iterable[int], path: Path) -> None:
    """A panel per batch size, a point per setting that was measured, a ring around the chosen one."""
    points = []
    for batch in batches:
        for trial in file.scored:
            if batch in trial.speeds:
                task, rule = f"accuracy at batch {batch}", next(iter(trial.setting.rule), "one")
                costs: dict[str, float | None] = {"response tokens per second": trial.speeds[batch]}
                names = (task, trial.setting.cache_method, rule)
                points.append(TradeoffPoint(*names, costs, *mean_and_error(trial.scores), trial is file.chosen(batch)))
    draw_tradeoff(points, path)
