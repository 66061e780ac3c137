"""The search of ``dllm tune``, and its report.

One factor of the settings is varied after the other. All variants answer a few examples, the better third three times
as many, and so on (successive halving); the best are varied in the next factor, and in the end answer all examples. A
setting whose loss is refuted answers no more. Only missing answers are asked for, so a run with the trials of an
earlier one takes the same way and goes on from there.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from dllm_engine.evaluation.comparison import mean_and_error, table
from dllm_engine.evaluation.plots import draw_tradeoff
from dllm_engine.evaluation.result_file import ResultFile, read_results
from dllm_engine.evaluation.runner import Cost
from dllm_engine.families import ModelFamily
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.scheduler.unmasking_policies import PARALLEL_RULES
from dllm_engine.text import one_line

Options = dict[str, Any]
Factor = Literal["rule", "window", "block_length", "cache_method", "cache_options"]
"""A part of a setting."""
FACTORS: tuple[Factor, ...] = ("rule", "window", "block_length", "cache_method", "cache_options", "rule")
"""The rule again, because a cache changes what it may risk."""
RULES: tuple[Options, ...] = tuple({name: value} for name, rule in PARALLEL_RULES.items() for value in rule.tuned)
WINDOWS = (0.75, 0.5, 0.1, 0.0)
"""Values of ``block_add_threshold``."""
BLOCK_LENGTHS = (1 / 8, 1 / 4, 1 / 2, 2, 4)
"""Multiples of the default block length."""
SHORTEST_BLOCK = 4
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


@dataclass(frozen=True)
class Setting:
    """A way to run a model. The defaults are plain decoding: no cache, a token per pass, one block at a time."""

    cache_method: str = "none"
    cache_options: Options = field(default_factory=dict)
    """Options that differ from the paper's."""
    rule: Options = field(default_factory=dict)
    """A request option and its value; empty: a token per pass."""
    blocks: Options = field(default_factory=dict)
    """``block_length`` and ``block_add_threshold``, where they differ from the defaults."""

    @property
    def engine(self) -> Options:
        return {"cache_method": self.cache_method, "cache_options": self.cache_options}

    @property
    def decoding(self) -> Options:
        return self.rule | self.blocks

    def __str__(self) -> str:
        options = (self.cache_options | self.decoding).items()
        return " ".join([self.cache_method, *(f"{name}={value}" for name, value in options)])


PLAIN = Setting()
Ask = Callable[[Setting, range, int], tuple[list[float], Cost]]
"""Scores of a setting on examples, so many at once, and the cost; raises ``ValueError`` if it cannot be run."""


@dataclass(frozen=True)
class Space:
    """The values of each factor that are tried."""

    methods: dict[str, list[Options]]
    """Cache methods with the options to try beside the paper's."""
    rules: Sequence[Options]
    windows: Sequence[float]
    block_lengths: Sequence[int]

    @classmethod
    def of_model(
        cls,
        model: str,
        family: ModelFamily,
        methods: Sequence[str],
        default_block: int,
        longest_block: int,
        rules: Sequence[Options] = RULES,
    ) -> "Space":
        """The space for a model whose blocks have ``default_block`` tokens; ``longest_block`` is a whole response.

        Where attention goes by blocks they keep their length, and run one at a time. Raises ``ValueError`` for an
        unknown cache method.
        """
        options = {}
        for method in methods:
            own = EngineOptions.parse({"cache_method": method}).with_paper_settings(model, family).cache
            tuned = CACHE_METHODS[method].tuned.items()
            options[method] = [{name: v} for name, values in tuned for v in values if v != getattr(own, name)]
        if family.attention_block is not None:
            return cls(options, rules, (), ())
        lengths = sorted({int(default_block * ratio) for ratio in BLOCK_LENGTHS} - {default_block})
        return cls(options, rules, WINDOWS, [n for n in lengths if SHORTEST_BLOCK <= n <= longest_block])

    def varied(self, setting: Setting, factor: Factor) -> list[Setting]:
        """The settings that have another value of a factor."""
        # Several blocks at once need a rule, because they have no fixed count of tokens.
        windows = self.windows if setting.rule.keys() & PARALLEL_RULES.keys() else ()
        changes: dict[Factor, list[Options]] = {
            "rule": [{"rule": rule} for rule in self.rules],
            "window": [{"blocks": setting.blocks | {"block_add_threshold": window}} for window in windows],
            "block_length": [{"blocks": setting.blocks | {"block_length": length}} for length in self.block_lengths],
            "cache_method": [{"cache_method": method, "cache_options": {}} for method in self.methods],
            "cache_options": [{"cache_options": options} for options in self.methods.get(setting.cache_method, ())],
        }
        return [other for change in changes[factor] if (other := replace(setting, **change)) != setting]


class Loss(NamedTuple):
    """The accuracy that a setting loses per example, in fractions; negative where it is better."""

    observed: float
    """Mean difference."""
    lowest: float
    """Lower bound of the 90 % interval."""
    highest: float
    probability: float
    """Probability of a loss within the limit. A gain over plain decoding counts as luck: otherwise settings with few
    examples would seem the safest."""

    @classmethod
    def between(cls, plain: Sequence[float], scores: Sequence[float], limit: float) -> "Loss":
        """The loss on the first examples, as many as have a score in both.

        The interval is that of a mean of differences between pairs, with two examples added, one lost and one won. For
        answers that are right or wrong it is the adjusted Wald interval of Bonett and Price (2012, Journal of
        Educational and Behavioral Statistics 37), which holds for few examples and for none that differ.
        """
        differences = [a - b for a, b in zip(plain, scores, strict=False)]
        count, total = len(differences) + 2, sum(differences)
        centre = total / count
        error = math.sqrt(((sum(value**2 for value in differences) + 2) / count - centre**2) / count)
        bound, probability = NormalDist().inv_cdf(0.95) * error, NormalDist(max(centre, 0.0), error).cdf(limit)
        return cls(total / max(len(differences), 1), centre - bound, centre + bound, probability)


@dataclass
class Trial:
    """A setting and its figures."""

    setting: Setting
    scores: list[float] = field(default_factory=list)
    """Scores of the first examples, from 0 to 1."""
    cost: Cost = field(default_factory=Cost)
    """Cost of answering them."""
    speeds: dict[int, float] = field(default_factory=dict)
    """Tokens per second by batch size."""
    error: str | None = None
    """Why the setting cannot be run."""


class OutOfTimeError(Exception):
    """The budget is spent."""


class Search:
    """Finds the fastest setting within a loss, for each batch size.

    Args:
        ask: runs settings.
        file: trials so far; each is written as soon as it is measured.
        limit: the most accuracy to lose, as a fraction.
        batches: numbers of requests at once.
        at_once: requests in the engine while examples are answered, on which accuracy does not depend.
        num_examples: all that there are.
        budget: seconds of ``clock``.
    """

    def __init__(
        self,
        ask: Ask,
        file: ResultFile,
        limit: float,
        space: Space,
        *,
        batches: Sequence[int],
        at_once: int,
        num_examples: int,
        budget: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.file, self.limit, self.batches = file, limit, tuple(dict.fromkeys(batches))
        stored = TypeAdapter(list[Trial]).validate_python(file.stored.get("trials", []))
        self.trials = {str(trial.setting): trial for trial in stored}
        self.plain = self.trial(PLAIN)
        self.tell: Callable[[str, float], None] = lambda what, left: None
        """Called with a setting that is measured and the seconds left at most."""
        self._run_setting, self._space, self._at_once, self._budget = ask, space, at_once, budget
        self._clock, self._deadline = clock, clock() + budget
        self._num_examples, self._chunk = num_examples, max(FIRST_EXAMPLES, 2 * at_once)
        self._engine: dict[str, Any] = {}

    def trial(self, setting: Setting) -> Trial:
        """The trial of a setting, empty if it is new."""
        return self.trials.setdefault(str(setting), Trial(setting))

    @property
    def scored(self) -> list[Trial]:
        """Trials that have answered."""
        return [trial for trial in self.trials.values() if trial.scores]

    def save(self, **about: Any) -> None:
        """Write all of it, after ``about``."""
        tried = [trial for trial in self.trials.values() if trial.scores or trial.error]
        self.file.write(**about, trials=[asdict(trial) for trial in tried])

    def run(self) -> bool:
        """Search within the budget, and return if it was enough. Interrupted, it leaves its trials in the file."""
        try:
            self._measure_plain()
            best = [self.plain]
            for factor in FACTORS:
                varied = [other for trial in best for other in self._space.varied(trial.setting, factor)]
                best = self._halve([*best, *map(self.trial, varied)])
            while unsettled := [t for t in self._best(KEPT) if len(t.scores) < self._num_examples]:
                self._measure(unsettled, self._num_examples)
        except OutOfTimeError:
            return False
        return True

    def _measure_plain(self) -> None:
        """Plain decoding answers first, and says how many examples the budget allows."""
        self._measure([self.plain], min(self._chunk, self._num_examples))
        if self.plain.error:
            raise ValueError(self.plain.error)
        affordable = int(PLAIN_SHARE * self._budget * len(self.plain.scores) / max(self.plain.cost.seconds, 1e-9))
        self._num_examples = min(self._num_examples, max(affordable, self._chunk, len(self.plain.scores)))
        self._measure([self.plain], self._num_examples)

    def _halve(self, trials: list[Trial]) -> list[Trial]:
        """The best of some trials, at least ``KEPT`` per batch size."""
        examples, kept = self._chunk, len(trials)
        while True:
            examples = min(examples, self._num_examples)
            self._measure(trials, examples)
            kept = KEPT if examples == self._num_examples else max(KEPT, -(-kept // GROWTH))
            trials = self._best(kept, trials, examples) or [self.plain]
            if kept == KEPT:
                return trials
            examples *= GROWTH

    def _best(self, count: int, trials: Iterable[Trial] | None = None, examples: int | None = None) -> list[Trial]:
        """The best for each batch size, by default of all, each once."""
        best = [trial for batch in self.batches for trial in self.ranked(batch, trials, examples)[:count]]
        return list({id(trial): trial for trial in best}.values())

    def _measure(self, trials: Iterable[Trial], examples: int) -> None:
        """Have settings answer so many examples, and measure their speeds; engine by engine, the running one first."""
        for trial in sorted(trials, key=lambda t: (t.setting.engine != self._engine, str(t.setting.engine))):
            while (start := len(trial.scores)) < examples and not self.is_out(trial):
                scores, cost = self._ask(trial, range(start, min(start + self._chunk, examples)), self._at_once)
                trial.scores += scores
                trial.cost.add(cost)
                if scores and not start and self._at_once in self.batches:
                    trial.speeds[self._at_once] = cost.tokens_per_second
                self.save()
            for batch in self.batches:
                if batch not in trial.speeds and not self.is_out(trial):
                    timed = range(min(self._num_examples, max(MIN_TIMED, 2 * batch)))
                    trial.speeds[batch] = self._ask(trial, timed, batch)[1].tokens_per_second
                    self.save()

    def _ask(self, trial: Trial, indices: range, at_once: int) -> tuple[list[float], Cost]:
        left = self._deadline - self._clock()
        self.tell(str(trial.setting), left)
        if left < 0 and self.plain.speeds.keys() >= set(self.batches):
            raise OutOfTimeError
        self._engine = trial.setting.engine
        try:
            return self._run_setting(trial.setting, indices, at_once)
        except (ValueError, RuntimeError) as error:
            # A method and a rule may exclude each other, or memory may not suffice; the other settings go on.
            trial.error = one_line(error)
            return [], Cost()

    # Judgements

    def loss(self, trial: Trial, examples: int | None = None) -> Loss:
        """The loss against plain decoding, on the first ``examples`` of both."""
        if trial is self.plain:
            return Loss(0.0, 0.0, 0.0, 1.0)
        return Loss.between(self.plain.scores, trial.scores[:examples], self.limit)

    def is_out(self, trial: Trial, examples: int | None = None) -> bool:
        """True if the setting cannot be run, or the interval of its loss is beyond the limit."""
        return trial.error is not None or self.loss(trial, examples).lowest > self.limit

    def ranked(self, batch: int, trials: Iterable[Trial] | None = None, examples: int | None = None) -> list[Trial]:
        """The trials that may be chosen, by default of all, the best first.

        Better is a higher product of tokens per second and the probability that the loss is allowed. Speed alone would
        prefer settings whose errors have not shown yet.
        """
        able = [t for t in trials or self.trials.values() if batch in t.speeds and not self.is_out(t, examples)]
        return sorted(able, key=lambda trial: -trial.speeds[batch] * self.loss(trial, examples).probability)

    def chosen(self, batch: int) -> Trial:
        """The best trial whose observed loss is allowed, of those with the most examples; plain if there is none."""
        allowed = [trial for trial in self.ranked(batch) if self.loss(trial).observed <= self.limit]
        settled = [trial for trial in allowed if len(trial.scores) >= len(self.plain.scores)]
        # Out of time: a setting that was asked less is still better than none.
        return (settled if any(t is not self.plain for t in settled) else allowed or [self.plain])[0]

    def figures(self, batch: int, trial: Trial) -> dict[str, Any]:
        """Scores and speed of a trial beside those of plain decoding. Rates are fractions."""
        loss, plain = self.loss(trial), self.plain
        accuracy, stderr = mean_and_error(trial.scores)
        return {
            "is_plain": trial is plain,
            "accuracy": accuracy,
            "accuracy_stderr": stderr,
            "plain_accuracy": mean_and_error(plain.scores[: len(trial.scores)])[0],
            "loss": loss.observed,
            "loss_lowest": loss.lowest,
            "loss_highest": loss.highest,
            "shown": loss.highest <= self.limit,
            "examples": len(trial.scores),
            "passes_per_token": trial.cost.forward_passes / max(trial.cost.tokens_unmasked, 1),
            "tokens_per_second": trial.speeds.get(batch),
            "plain_tokens_per_second": plain.speeds[batch],
        }


def report(search: Search, commands: dict[int, list[str]]) -> str:
    """Tables, the chosen settings, and the lines that use each, by batch size."""
    parts = []
    for batch, lines in commands.items():
        best, rows = search.chosen(batch), []
        for place, trial in enumerate(search.ranked(batch)):
            if place < SHOWN or trial in (best, search.plain):
                name = "plain decoding" if trial is search.plain else str(trial.setting)
                rows.append({"mark": "*" if trial is best else "", "setting": name} | search.figures(batch, trial))
        parts.append(f"Batch {batch}: settings by tokens/s and by how likely they are within the loss")
        parts += [table(rows, COLUMNS), _sentence(search.figures(batch, best), batch, 100 * search.limit)]
        parts.append("\n".join(f"    {line}" for line in lines))
    asked, num_out = sum(len(trial.scores) for trial in search.scored), sum(map(search.is_out, search.scored))
    parts.append(f"{len(search.scored)} settings were asked {asked} examples in all; {num_out} lose too much.")
    errors = {trial.error: trial.setting for trial in search.trials.values() if trial.error}
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


def draw(search: Search, batches: Iterable[int], path: Path) -> None:
    """A panel per batch size, a point per setting that was measured, a ring around the chosen one."""
    rows = [
        {
            "task": f"batch {batch}",
            "metric": "accuracy",
            "method": trial.setting.cache_method,
            "unmasking": next(iter(trial.setting.rule), "one"),
            **dict(zip(("score", "stderr"), mean_and_error(trial.scores), strict=True)),
            "tokens_per_second": trial.speeds[batch],
            "is_chosen": trial is search.chosen(batch),
        }
        for batch in batches
        for trial in search.scored
        if batch in trial.speeds
    ]
    draw_tradeoff(rows, path, ["tokens_per_second"])


def chosen_setting(path: Path, batch: int | None) -> tuple[str, dict[str, Any]]:
    """The model and the chosen setting in a file of ``dllm tune``; None takes the largest batch size.

    Raises ``ValueError`` for any other file, one without a chosen setting, or not at the batch size.
    """
    stored = read_results(path, "tune")
    chosen = stored.get("chosen") or {}
    if not chosen:
        raise ValueError(f"{path} has no chosen setting yet; run its `dllm tune` again, which goes on")
    if batch is None:
        batch = max(map(int, chosen))
    if str(batch) not in chosen:
        raise ValueError(f"{path} has no setting for batch size {batch}; it has some for {', '.join(chosen)}")
    return stored["subject"]["model"], chosen[str(batch)]
