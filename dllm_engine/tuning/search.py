"""The search: rungs that vary one factor after the other, give the best settings more examples, and drop the others.

A rung takes the best settings so far and everything that differs from them in one factor. All are asked a few examples,
the better half twice as many, and so on, up to the examples of the rung (successive halving). A setting whose accuracy
is refuted, or that is far behind, is asked nothing more. After the rungs, those on top are asked all examples, and the
winner is measured in turns with plain decoding.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from dllm_engine.evaluation.answering import Cost
from dllm_engine.text import one_line
from dllm_engine.tuning.runner import Answers, EngineRunner
from dllm_engine.tuning.space import PLAIN, Factor, Setting, Space
from dllm_engine.tuning.standings import Standings
from dllm_engine.tuning.trials import Trial, TrialFile, Turns


class Rung(NamedTuple):
    """A stage of the search."""

    factor: Factor
    """What is varied."""
    kept: int
    """How many settings per batch size are varied."""
    growth: int
    """Examples for the best, as a multiple of those that all are asked."""


RUNGS = (
    Rung("rule", 1, 4),
    Rung("window", 6, 2),
    Rung("block_length", 4, 2),
    Rung("cache_method", 3, 2),
    Rung("cache_options", 2, 2),
    Rung("rule", 2, 4),  # again, because a cache changes what a rule may risk
)
FIRST_EXAMPLES = 32
"""Asked before a setting is judged at all."""
MIN_TIMED = 8
"""Requests that a speed is measured on, or twice the batch size if that is more."""
SLOW = 0.6
"""A setting below this share of the best worth at every batch size is asked nothing more."""
SETTLED = 3
"""Settings on top, per batch size, that are asked all examples."""
SETTLING_RUNGS = 4
"""The time kept for that, in rungs."""
ROUNDS = 3
"""Turns of plain decoding and the chosen setting."""
SLACK = 1.25
"""Of a rung's share of the time; what it planned may take longer."""
PLAIN_SHARE = 0.2
"""Of the budget, for the answers of plain decoding; they decide how many examples there are."""


@dataclass(frozen=True)
class Goal:
    """What is searched for."""

    loss: float
    """The most accuracy that may be lost, as a fraction."""
    batches: tuple[int, ...]
    """Requests at once."""
    budget: float
    """Seconds."""
    num_examples: int
    """How many there are."""


class OutOfTimeError(Exception):
    """The budget is spent."""


class Search:
    """Finds the fastest setting within a loss, for each batch size.

    Args:
        runner: runs settings.
        file: trials so far; each is written as soon as it is measured.
        space: what is varied.
        goal: what is searched for.
        tell: called with what is measured now and the seconds left at most.
        clock: seconds.
    """

    def __init__(
        self,
        runner: EngineRunner,
        file: TrialFile,
        space: Space,
        goal: Goal,
        tell: Callable[[str, float], None] = lambda what, left: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner, self.file, self.space, self.goal = runner, file, space, goal
        self.standings = Standings(file, goal.loss)
        file.start({"loss": goal.loss, "batches": list(goal.batches), "space": asdict(space)})
        self.ran_out = False
        """Whether the budget ended the search before it was through."""
        self.tell, self._clock = tell, clock
        self._deadline = clock() + goal.budget
        self._chunk = max(FIRST_EXAMPLES, 2 * runner.at_once)
        self._num_examples = goal.num_examples
        self._trial_seconds: list[float] = []
        self._stage = ""

    @property
    def time_left(self) -> float:
        return self._deadline - self._clock()

    # The search

    def run(self) -> None:
        """Search within the budget. Interrupted, it leaves what it has measured in the file."""
        try:
            self._measure_plain()
            for number, rung in enumerate(RUNGS):
                self._stage = f"{number + 1}/{len(RUNGS) + 2} {rung.factor}"
                if number not in self.file.done:
                    self._climb(number, rung)
            self._stage = f"{len(RUNGS) + 1}/{len(RUNGS) + 2} settling"
            self._settle()
        except OutOfTimeError:
            self.ran_out = True
        self._stage = f"{len(RUNGS) + 2}/{len(RUNGS) + 2} turns"
        self._take_turns()

    def _measure_plain(self) -> None:
        """Plain decoding answers first, and says how many examples the budget allows."""
        plain = self.file.plain
        self._stage = "plain decoding"
        self._measure(plain, min(self._chunk, self._num_examples))
        if plain.error:
            raise ValueError(plain.error)
        affordable = int(PLAIN_SHARE * self.goal.budget * len(plain.scores) / max(plain.cost.seconds, 1e-9))
        self._num_examples = min(self._num_examples, max(affordable, self._chunk, len(plain.scores)))
        self._measure(plain, self._num_examples)

    def _climb(self, number: int, rung: Rung) -> None:
        """One rung. Its time is a share of what is left; what does not fit is left to a later run."""
        share = (self.time_left - self._time_for_turns()) / (len(RUNGS) - number + SETTLING_RUNGS)
        until = self._clock() + SLACK * share
        if number == len(self.file.rungs):
            self.file.rungs.append(self._candidates(rung, share))
        settings, examples = self.file.rungs[number], self._chunk
        through = self._measure_all(settings, min(examples, self._num_examples), until)
        while through and examples < min(self._chunk * rung.growth, self._num_examples):
            examples *= 2
            settings = self._better_half(settings)
            through = self._measure_all(settings, min(examples, self._num_examples), until)
        if through:
            self.file.done.append(number)
        else:
            self.ran_out = True

    def _better_half(self, settings: Sequence[Setting]) -> list[Setting]:
        """For each batch size."""
        kept = -(-len(settings) // 2)
        ranked = [[trial.setting for trial in self.standings.ranked(batch)] for batch in self.goal.batches]
        halves = [[setting for setting in order if setting in settings][:kept] for order in ranked]
        return list(dict.fromkeys(itertools.chain(*halves)))

    def _candidates(self, rung: Rung, share: float) -> list[Setting]:
        """The best settings and what differs from them in the rung's factor, as many as there are seconds for."""
        made: list[Setting] = []
        for kept in range(rung.kept, 0, -1):
            parents = [trial.setting for batch in self.goal.batches for trial in self.standings.ranked(batch)[:kept]]
            varied = [other for parent in parents for other in self.space.varied(parent, rung.factor)]
            made = list(dict.fromkeys([*parents, *varied]))
            if self._estimate(made) <= share:
                break
        return made

    def _estimate(self, settings: Iterable[Setting]) -> float:
        """Seconds that the trials of these settings take."""
        new = [setting for setting in settings if not self.file.trial(setting).scores]
        starts = {str(setting.engine) for setting in new if not self.runner.runs(setting)}
        recent = self._trial_seconds[-20:]
        return len(starts) * self.runner.start_seconds + len(new) * (sum(recent) / len(recent) if recent else 0.0)

    def _measure_all(self, settings: Iterable[Setting], examples: int, until: float = math.inf) -> bool:
        """Engine by engine, the running one first. Returns whether all were measured before a time."""
        by_engine: dict[str, list[Setting]] = {}
        for setting in sorted(settings, key=lambda setting: not self.runner.runs(setting)):
            by_engine.setdefault(str(setting.engine), []).append(setting)
        for of_engine in by_engine.values():
            for setting in of_engine:
                if self._clock() > until:
                    return False
                self._measure(self.file.trial(setting), examples)
        return True

    def _settle(self) -> None:
        while unsettled := [
            trial.setting
            for batch in self.goal.batches
            for trial in self.standings.ranked(batch)[:SETTLED]
            if len(trial.scores) < self._num_examples and not self._is_slow(trial)
        ]:
            self._measure_all(dict.fromkeys(unsettled), self._num_examples)

    def _is_slow(self, trial: Trial) -> bool:
        """Whether the setting is far from the best at every batch size, of those that have answered as much: the best
        of many that have answered little is mostly lucky."""
        known = [other for other in self.file.trials.values() if len(other.scores) >= len(trial.scores)]
        return all(
            self.standings.worth(trial, batch) < SLOW * max(self.standings.worth(other, batch) for other in known)
            for batch in self.goal.batches
        )

    def _measure(self, trial: Trial, examples: int) -> None:
        """Ask a setting until it has answered so many examples, or is refuted, or slow.

        Raises ``OutOfTimeError`` when the budget, less what the turns need, is spent.
        """
        if not self._needs_more(trial, examples):
            return
        start, is_new, has_started = self._clock(), not trial.scores, not self.runner.runs(trial.setting)
        try:
            while self._needs_more(trial, examples):
                self._check_time(trial.setting)
                self._ask(trial, range(len(trial.scores), min(len(trial.scores) + self._chunk, examples)))
        finally:
            self.file.save()
        if is_new and trial.scores and trial.setting != PLAIN:
            self._trial_seconds.append(self._clock() - start - has_started * self.runner.start_seconds)

    def _needs_more(self, trial: Trial, examples: int) -> bool:
        if trial.error or (trial.scores and self.standings.is_refuted(trial)):
            return False
        if not trial.scores or self._untimed(trial):
            return True
        return len(trial.scores) < examples and (trial.setting == PLAIN or not self._is_slow(trial))

    def _untimed(self, trial: Trial) -> list[int]:
        return [batch for batch in self.goal.batches if batch not in trial.speeds]

    def _ask(self, trial: Trial, indices: range) -> None:
        """The next examples, or where some were asked already, a speed that is missing."""
        untimed = self._untimed(trial) if trial.scores else []
        try:
            if untimed:
                trial.speeds[untimed[0]] = self.runner.measure(trial.setting, _timed(untimed[0]), untimed[0])
            else:
                self._count(trial, self.runner.answer(trial.setting, indices))
        except (ValueError, RuntimeError) as error:
            # A method and a rule may exclude each other, or memory may not suffice; the other settings go on.
            trial.error = one_line(error)
            if isinstance(error, RuntimeError):
                self.runner.stop()  # it may be in any state

    def _count(self, trial: Trial, answers: Answers) -> None:
        trial.scores += answers.scores
        trial.cost.add(answers.cost)
        at_once = self.runner.at_once
        if at_once in self.goal.batches and answers.cost.requests >= 2 * at_once:
            trial.speeds.setdefault(at_once, Cost()).add(answers.cost)

    def _check_time(self, setting: Setting) -> None:
        left = self.time_left
        self.tell(f"{self._stage}: {setting}", left)
        start = 0.0 if self.runner.runs(setting) else self.runner.start_seconds
        if self.file.plain.scores and left - start < self._time_for_turns():
            raise OutOfTimeError

    # In turns with plain decoding

    def _time_for_turns(self) -> float:
        """Seconds that the turns will take, about."""
        speeds = self.file.plain.speeds
        answers = sum(
            _timed(batch) * 1.5 * speeds[batch].seconds / max(speeds[batch].requests, 1)
            for batch in self.goal.batches
            if batch in speeds
        )
        return ROUNDS * (answers + (1 + len(self.goal.batches)) * self.runner.start_seconds)

    def _take_turns(self) -> None:
        """Round by round, every second one backwards, so that a machine that slows down meets both alike and engines
        are started less often."""
        pairs: dict[int, Turns] = {}
        for batch in self.goal.batches:
            setting = self.standings.chosen(batch).setting
            stored = self.file.turns.get(batch)
            pairs[batch] = stored if stored is not None and stored.setting == setting else Turns(setting)
        self.file.turns = {batch: turns for batch, turns in pairs.items() if turns.setting != PLAIN}
        while missing := [turns for turns in self.file.turns.values() if len(turns.ratios) < ROUNDS]:
            number = min(len(turns.ratios) for turns in missing)
            if number and self.time_left < 0:
                self.ran_out = True
                break
            order = [PLAIN, *dict.fromkeys(turns.setting for turns in missing)]
            for setting in order if number % 2 == 0 else reversed(order):
                self._turn(setting, number)
            self.file.save()

    def _turn(self, setting: Setting, number: int) -> None:
        for batch, turns in self.file.turns.items():
            rates = turns.plain if setting == PLAIN else turns.chosen
            if len(rates) == number and setting in (PLAIN, turns.setting):
                self.tell(f"{self._stage}: {setting}", self.time_left)
                rates.append(self.runner.measure(setting, _timed(batch), batch).tokens_per_second)


def _timed(batch: int) -> int:
    """Requests that a speed is measured on."""
    return max(MIN_TIMED, 2 * batch)
