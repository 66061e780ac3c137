"""The search of ``dllm tune``, and its report.

One factor of the settings is varied after the other. All variants answer a few examples, the better third three times
as many, and so on (successive halving); the best are varied in the next factor, and in the end answer all examples. A
setting whose loss is refuted answers no more. Only missing answers are asked for, so a run with the trials of an
earlier one goes on from there.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from dllm_engine.evaluation.comparison import mean_and_error, table
from dllm_engine.evaluation.result_file import ResultFile, read_results
from dllm_engine.evaluation.runner import Cost
from dllm_engine.families import ModelFamily
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.scheduler.options.request_fields import COUNT_OPTIONS, PARALLEL_OPTIONS
from dllm_engine.scheduler.unmasking_policies import PARALLEL_RULES
from dllm_engine.text import one_line

Options = dict[str, Any]
FACTORS = ("rule", "block_add_threshold", "block_length", "cache_method", "cache_options", "rule")
"""Parts of a setting; the rule again, because a cache changes what it may risk."""
RULES: tuple[Options, ...] = tuple({name: value} for name, rule in PARALLEL_RULES.items() for value in rule.tuned)
RULE_NAMES = {*COUNT_OPTIONS, *PARALLEL_OPTIONS}
WINDOWS = (0.75, 0.5, 0.1, 0.0)
"""Values of ``block_add_threshold``."""
BLOCK_LENGTHS = (1 / 8, 1 / 4, 1 / 2, 2, 4)
"""Multiples of the default block length."""
SHORTEST_BLOCK = 4
KEPT = 2
"""Settings that the next factor is varied of."""
GROWTH = 3
SHOWN = 6
"""Settings in the table, and errors."""
COLUMNS = {
    "": ("mark", ""),
    "SETTING": ("setting", ""),
    "ACCURACY": ("accuracy", ".1%"),
    "LOSS": ("loss", ".1%"),
    "LOWEST": ("loss_lowest", ".1%"),
    "HIGHEST": ("loss_highest", ".1%"),
    "EXAMPLES": ("examples", ""),
    "PASSES/TOKEN": ("passes_per_token", ".2f"),
    "TOKENS/S": ("tokens_per_second", ".0f"),
}


@dataclass(frozen=True)
class Setting:
    """A way to run a model, as arguments of ``LLM`` and of ``DiffusionParams``. The defaults are plain decoding: no
    cache, a token per pass, one block at a time."""

    engine: Options = field(default_factory=lambda: {"cache_method": "none", "cache_options": {}})
    decoding: Options = field(default_factory=dict)

    def __str__(self) -> str:
        options = (self.engine["cache_options"] | self.decoding).items()
        return " ".join([self.engine["cache_method"], *(f"{name}={value}" for name, value in options)])


PLAIN = Setting()
Ask = Callable[[Setting, range], tuple[list[float], Cost]]
"""Scores of a setting on examples, and the cost; raises ``ValueError`` if it cannot be run."""


@dataclass(frozen=True)
class Space:
    """The values of each factor that are tried."""

    methods: dict[str, list[Options]]
    """Cache methods with the options to try beside the paper's."""
    rules: Sequence[Options]
    windows: Sequence[float] = ()
    block_lengths: Sequence[int] = ()

    def varied(self, setting: Setting, factor: str) -> list[Setting]:
        """The settings that have another value of a factor."""
        engine, decoding = setting.engine, setting.decoding
        without_rule = {name: value for name, value in decoding.items() if name not in RULE_NAMES}
        others: list[Setting] = []
        if factor == "rule":
            others = [Setting(engine, rule | without_rule) for rule in self.rules]
        elif factor == "block_length":
            others = [Setting(engine, decoding | {factor: length}) for length in self.block_lengths]
        elif factor == "block_add_threshold" and decoding.keys() & set(PARALLEL_OPTIONS):  # a count allows one block
            others = [Setting(engine, decoding | {factor: threshold}) for threshold in self.windows]
        elif factor == "cache_method":
            others = [Setting({factor: method, "cache_options": {}}, decoding) for method in self.methods]
        elif factor == "cache_options":
            tried = self.methods.get(engine["cache_method"], ())
            others = [Setting(engine | {factor: options}, decoding) for options in tried]
        return [other for other in others if other != setting]


def space_of(
    model: str,
    family: ModelFamily,
    methods: Sequence[str],
    default_block: int,
    longest_block: int,
    rules: Sequence[Options] = RULES,
) -> Space:
    """The space for a model whose blocks have ``default_block`` tokens; ``longest_block`` is a whole response.

    Where attention goes by blocks they keep their length, and run one at a time. Raises ``ValueError`` for an unknown
    cache method.
    """
    options = {}
    for method in methods:
        own = EngineOptions.parse({"cache_method": method}).with_paper_settings(model, family).cache
        tuned = CACHE_METHODS[method].tuned.items()
        options[method] = [{name: v} for name, values in tuned for v in values if v != getattr(own, name)]
    if family.attention_block is not None:
        return Space(options, rules)
    lengths = sorted({int(default_block * ratio) for ratio in BLOCK_LENGTHS} - {default_block})
    return Space(options, rules, WINDOWS, [n for n in lengths if SHORTEST_BLOCK <= n <= longest_block])


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
    error: str | None = None
    """Why the setting cannot be run."""


class OutOfTimeError(Exception):
    """The budget is spent."""


class Search:
    """Finds the fastest setting within a loss.

    Args:
        ask: runs settings.
        file: trials so far; each is written as soon as it is measured.
        limit: the most accuracy to lose, as a fraction.
        chunk: examples that are asked together, and before a setting is judged at all.
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
        chunk: int,
        num_examples: int,
        budget: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.file, self.limit = file, limit
        stored = TypeAdapter(list[Trial]).validate_python(file.stored.get("trials", []))
        self.trials = {str(trial.setting): trial for trial in stored}
        self.plain = self.trial(PLAIN)
        self._ask, self._space = ask, space
        self._clock, self._deadline = clock, clock() + budget
        self._num_examples, self._chunk = num_examples, chunk
        self._engine: Options = {}

    def trial(self, setting: Setting) -> Trial:
        """The trial of a setting, empty if it is new."""
        return self.trials.setdefault(str(setting), Trial(setting))

    def save(self, **about: Any) -> None:
        """Write all of it, after ``about``."""
        tried = [trial for trial in self.trials.values() if trial.scores or trial.error]
        self.file.write(**about, trials=[asdict(trial) for trial in tried])

    def run(self) -> bool:
        """Search within the budget, and return if it was enough. Interrupted, it leaves its trials in the file.

        Raises:
            ValueError: plain decoding cannot be run.
        """
        try:
            self._measure([self.plain], self._num_examples)
            if self.plain.error:
                raise ValueError(self.plain.error)
            best = [self.plain]
            for factor in FACTORS:
                varied = [other for trial in best for other in self._space.varied(trial.setting, factor)]
                best = self._halve([*best, *map(self.trial, varied)])
            while unsettled := [t for t in self.ranked()[:KEPT] if len(t.scores) < self._num_examples]:
                self._measure(unsettled, self._num_examples)
        except OutOfTimeError:
            return False
        return True

    def _halve(self, trials: list[Trial]) -> list[Trial]:
        """The best ``KEPT`` of some trials."""
        examples = self._chunk
        while True:
            self._measure(trials, min(examples, self._num_examples))
            kept = KEPT if examples >= self._num_examples else max(KEPT, len(trials) // GROWTH)
            trials = self.ranked(trials)[:kept]
            if kept == KEPT:
                return trials or [self.plain]
            examples *= GROWTH

    def _measure(self, trials: Iterable[Trial], examples: int) -> None:
        """Have settings answer so many examples; engine by engine, the running one first."""
        for trial in sorted(trials, key=lambda t: (t.setting.engine != self._engine, str(t.setting.engine))):
            while (start := len(trial.scores)) < examples and not self.is_out(trial):
                if self._clock() > self._deadline and self.plain.scores:
                    raise OutOfTimeError
                self._engine = trial.setting.engine
                try:
                    scores, cost = self._ask(trial.setting, range(start, min(start + self._chunk, examples)))
                except (ValueError, RuntimeError) as error:
                    # A method and a rule may exclude each other, or memory may not suffice; the others go on.
                    trial.error = one_line(error)
                else:
                    trial.scores += scores
                    trial.cost.add(cost)
                self.save()

    def loss(self, trial: Trial) -> Loss:
        """The loss against plain decoding."""
        if trial is self.plain:
            return Loss(0.0, 0.0, 0.0, 1.0)
        return Loss.between(self.plain.scores, trial.scores, self.limit)

    def is_out(self, trial: Trial) -> bool:
        """True if the setting cannot be run, or the interval of its loss is beyond the limit."""
        return trial.error is not None or self.loss(trial).lowest > self.limit

    def ranked(self, trials: Iterable[Trial] | None = None) -> list[Trial]:
        """The trials that may be chosen, by default of all, the best first.

        Better is a higher product of tokens per second and the probability that the loss is allowed. Speed alone would
        prefer settings whose errors have not shown yet.
        """
        able = [t for t in trials or self.trials.values() if t.scores and not self.is_out(t)]
        return sorted(able, key=lambda trial: -trial.cost.tokens_per_second * self.loss(trial).probability)

    @property
    def chosen(self) -> Trial:
        """The best trial whose observed loss is allowed, of those with the most examples; plain if there is none."""
        allowed = [trial for trial in self.ranked() if self.loss(trial).observed <= self.limit]
        settled = [trial for trial in allowed if len(trial.scores) >= len(self.plain.scores)]
        # Out of time: a setting that was asked less is still better than none.
        return (settled if any(t is not self.plain for t in settled) else allowed or [self.plain])[0]

    def figures(self, trial: Trial) -> dict[str, Any]:
        """Scores and speed of a trial beside those of plain decoding. Rates are fractions."""
        loss = self.loss(trial)
        return {
            "accuracy": mean_and_error(trial.scores)[0],
            "loss": loss.observed,
            "loss_lowest": loss.lowest,
            "loss_highest": loss.highest,
            "shown": loss.highest <= self.limit,
            "examples": len(trial.scores),
            "passes_per_token": trial.cost.forward_passes / max(trial.cost.tokens_unmasked, 1),
            "tokens_per_second": trial.cost.tokens_per_second,
            "plain_tokens_per_second": self.plain.cost.tokens_per_second,
        }


def report(search: Search) -> str:
    """The best settings as a table, the one that was chosen and how sure it is, and errors."""
    best, allowed, rows = search.chosen, 100 * search.limit, []
    for place, trial in enumerate(search.ranked()):
        if place < SHOWN or trial in (best, search.plain):
            name = "plain decoding" if trial is search.plain else str(trial.setting)
            rows.append({"mark": "*" if trial is best else "", "setting": name} | search.figures(trial))
    parts = ["Settings by tokens/s and by how likely they are within the loss", table(rows, COLUMNS)]
    if best is search.plain:
        parts.append(f"Nothing faster than plain decoding was found within {allowed:g} points.")
    else:
        figures = search.figures(best)
        loss, lowest, highest = (100 * figures[name] for name in ("loss", "loss_lowest", "loss_highest"))
        sure = "shown to be" if figures["shown"] else "not shown, but as observed"
        parts.append(
            f"Chosen: {figures['tokens_per_second']:.0f} tokens/s, plain decoding "
            f"{figures['plain_tokens_per_second']:.0f}.\nOn {figures['examples']} examples it loses {loss:.1f} points "
            f"(90 % interval {lowest:.1f} … {highest:.1f}): {sure} within the allowed {allowed:g}."
        )
    errors = {trial.error: trial.setting for trial in search.trials.values() if trial.error}
    parts += [f"Cannot be run: {setting}: {error}" for error, setting in list(errors.items())[:SHOWN]]
    return "\n\n".join(parts)


def chosen_setting(path: Path) -> tuple[str, dict[str, Any]]:
    """The model and the chosen setting in a file of ``dllm tune``; raises ``ValueError`` if there is none."""
    stored = read_results(path, "tune")
    if not stored.get("chosen"):
        raise ValueError(f"{path} has no chosen setting yet; run its `dllm tune` again, which goes on")
    return stored["subject"]["model"], stored["chosen"]
