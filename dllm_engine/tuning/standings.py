"""How settings stand: what each loses against plain decoding, what it is worth, and which one is chosen."""

from dllm_engine.tuning.loss import NO_LOSS, Loss
from dllm_engine.tuning.space import PLAIN, Setting
from dllm_engine.tuning.trials import Trial, TrialFile


class Standings:
    """The trials of a file, judged by a limit of the loss, which is a fraction."""

    def __init__(self, file: TrialFile, limit: float) -> None:
        self.file, self.limit = file, limit
        self._losses: dict[tuple[Setting, int], Loss] = {}

    def loss(self, trial: Trial) -> Loss:
        """Against plain decoding, on the examples of both."""
        if trial.setting == PLAIN:
            return NO_LOSS
        key = trial.setting, min(len(trial.scores), len(self.file.plain.scores))
        if key not in self._losses:
            self._losses[key] = Loss.between(self.file.plain.scores, trial.scores)
        return self._losses[key]

    def is_refuted(self, trial: Trial) -> bool:
        """Whether the setting loses too much, by its confidence interval."""
        return self.loss(trial).lowest > self.limit

    def worth(self, trial: Trial, batch: int) -> float:
        """Tokens per second times the probability that the loss is allowed. Speed alone would keep what has not been
        caught yet."""
        if trial.error or batch not in trial.speeds or self.is_refuted(trial):
            return 0.0
        return trial.speeds[batch].tokens_per_second * self.loss(trial).probability_within(self.limit)

    def ranked(self, batch: int) -> list[Trial]:
        """The settings that may be run, the best first."""
        worths = {setting: self.worth(trial, batch) for setting, trial in self.file.trials.items()}
        return [self.file.trials[s] for s in sorted(worths, key=lambda s: -worths[s]) if worths[s] > 0]

    def chosen(self, batch: int) -> Trial:
        """The best setting whose observed loss is allowed, of those with the most examples; plain if there is none."""
        allowed = [trial for trial in self.ranked(batch) if self.loss(trial).observed <= self.limit]
        settled = [trial for trial in allowed if len(trial.scores) >= len(self.file.plain.scores)]
        others = [trial for trial in settled if trial.setting != PLAIN]
        # Out of time: what has been asked less is still better than to have found nothing.
        return (settled if others else allowed or [self.file.plain])[0]
