"""Settings that ``dllm tune`` tries, the scores and speeds of each, and the file that keeps them from run to run."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from dllm_engine.evaluation.comparison import mean_and_error
from dllm_engine.evaluation.result_file import ResultFile, read_results
from dllm_engine.evaluation.runner import Cost
from dllm_engine.families import ModelFamily
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.scheduler.unmasking_policies import PARALLEL_RULES

Factor = Literal["rule", "window", "block_length", "cache_method", "cache_options"]
"""A part of a setting."""
Options = dict[str, Any]
RULES: tuple[Options, ...] = tuple({name: value} for name, rule in PARALLEL_RULES.items() for value in rule.tuned)
WINDOWS = (0.75, 0.5, 0.1, 0.0)
"""Values of ``block_add_threshold``."""
BLOCK_LENGTHS = (1 / 8, 1 / 4, 1 / 2, 2, 4)
"""Multiples of the default block length."""
SHORTEST_BLOCK = 4
COMMAND, SCHEMA = "tune", 3


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
        **rest: Any,
    ) -> "Space":
        """The space for a model whose blocks have ``default_block`` tokens; ``longest_block`` is a whole response.

        Where attention goes by blocks they keep their length, and run one at a time. ``rest`` replaces other fields.

        Raises ``ValueError`` for an unknown cache method.
        """
        is_free, options = family.attention_block is None, {}
        for method in methods:
            own = EngineOptions.parse({"cache_method": method}).with_paper_settings(model, family).cache
            tuned = CACHE_METHODS[method].tuned.items()
            options[method] = [{name: v} for name, values in tuned for v in values if v != getattr(own, name)]
        lengths = sorted({int(default_block * ratio) for ratio in BLOCK_LENGTHS if is_free} - {default_block})
        lengths = [length for length in lengths if SHORTEST_BLOCK <= length <= longest_block]
        return cls(
            **{"rules": RULES} | rest, methods=options, windows=WINDOWS if is_free else (), block_lengths=lengths
        )

    def varied(self, setting: Setting, factor: Factor) -> list[Setting]:
        """The settings that have another value of a factor."""
        changes: list[Options]
        if factor == "rule":
            changes = [{"rule": rule} for rule in self.rules]
        elif factor == "window":
            # Several blocks at once need a rule, because they have no fixed count of tokens.
            windows = self.windows if setting.rule.keys() & PARALLEL_RULES.keys() else ()
            changes = [{"blocks": setting.blocks | {"block_add_threshold": window}} for window in windows]
        elif factor == "block_length":
            changes = [{"blocks": setting.blocks | {"block_length": length}} for length in self.block_lengths]
        elif factor == "cache_method":
            changes = [{"cache_method": method, "cache_options": {}} for method in self.methods]
        else:
            changes = [{"cache_options": options} for options in self.methods.get(setting.cache_method, ())]
        return [other for change in changes if (other := replace(setting, **change)) != setting]


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


class TrialFile(ResultFile):
    """All trials of a model on some tasks, judged by the loss that is allowed.

    Args:
        path: JSON; need not exist.
        subject: what trials depend on beside their setting: model, tasks, response length, engine arguments.
        limit: the most accuracy to lose, as a fraction.

    Raises:
        ValueError: the file is of another model, of other tasks, or none of this command.
    """

    def __init__(self, path: Path, subject: dict[str, Any], limit: float) -> None:
        super().__init__(path, COMMAND, SCHEMA, subject)
        self.limit = limit
        stored = TypeAdapter(list[Trial]).validate_python(self.stored.get("trials", []))
        self.trials = {str(trial.setting): trial for trial in stored}

    def trial(self, setting: Setting) -> Trial:
        """The trial of a setting, empty if it is new."""
        return self.trials.setdefault(str(setting), Trial(setting))

    @property
    def plain(self) -> Trial:
        return self.trial(PLAIN)

    @property
    def scored(self) -> list[Trial]:
        """Trials that have answered."""
        return [trial for trial in self.trials.values() if trial.scores]

    def save(self, **about: Any) -> None:
        """Write all of it, after ``about``."""
        self.write(**about, trials=[asdict(trial) for trial in self.trials.values() if trial.scores or trial.error])

    # Judgements

    def loss(self, trial: Trial, examples: int | None = None) -> Loss:
        """The loss against plain decoding, on the first ``examples`` of both."""
        if trial.setting == PLAIN:
            return Loss(0.0, 0.0, 0.0, 1.0)
        return Loss.between(self.plain.scores, trial.scores[:examples], self.limit)

    def is_out(self, trial: Trial, examples: int | None = None) -> bool:
        """True if the setting cannot be run, or the interval of its loss is beyond the limit."""
        return trial.error is not None or self.loss(trial, examples).lowest > self.limit

    def ranked(self, batch: int, trials: Sequence[Trial] | None = None, examples: int | None = None) -> list[Trial]:
        """The trials that may be chosen, by default of all, the best first.

        Better is a higher product of tokens per second and the probability that the loss is allowed. Speed alone would
        prefer settings whose errors have not shown yet.
        """
        able = [t for t in trials or self.trials.values() if batch in t.speeds and not self.is_out(t, examples)]
        worth = {id(t): t.speeds[batch] * self.loss(t, examples).probability for t in able}
        return sorted(able, key=lambda trial: -worth[id(trial)])

    def chosen(self, batch: int) -> Trial:
        """The best trial whose observed loss is allowed, of those with the most examples; plain if there is none."""
        allowed = [trial for trial in self.ranked(batch) if self.loss(trial).observed <= self.limit]
        settled = [trial for trial in allowed if len(trial.scores) >= len(self.plain.scores)]
        others = [trial for trial in settled if trial.setting != PLAIN]
        # Out of time: a setting that was asked less is still better than none.
        return (settled if others else allowed or [self.plain])[0]

    def figures(self, batch: int, trial: Trial) -> dict[str, Any]:
        """Scores and speed of a trial beside those of plain decoding. Rates are fractions."""
        loss, plain = self.loss(trial), self.plain
        accuracy, stderr = mean_and_error(trial.scores)
        return {
            "is_plain": trial.setting == PLAIN,
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


def chosen_setting(path: Path, batch: int | None) -> tuple[str, dict[str, Any]]:
    """The model and the chosen setting in a file of ``dllm tune``; None takes the largest batch size.

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
