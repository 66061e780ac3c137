"""The search on made-up settings, whose accuracy and speed are known."""

import itertools
import random

import pytest

from dllm_engine.evaluation.answering import Cost
from dllm_engine.tuning import search as module
from dllm_engine.tuning.runner import Answers
from dllm_engine.tuning.search import Goal, Search
from dllm_engine.tuning.space import PLAIN, Setting, Space
from dllm_engine.tuning.trials import TrialFile

NUM_EXAMPLES = 400
SPACE = Space(
    methods={"none": [], "dual": [], "sparse": [(("retention_ratio", 0.25),)]},
    rules=[("threshold", 0.9), ("threshold", 0.5), ("factor", 1.0)],
    windows=[0.25],
    block_lengths=[16],
)
START, TOKENS = 2.0, 10


class MadeUpRunner:
    """Answers wrongly as often as ``losses`` say, as fast as ``speeds`` say, for what a setting has of their keys."""

    at_once = 16
    start_seconds = START

    def __init__(self, speeds, losses, accuracy=0.9):
        self.speeds, self.losses, self.accuracy = speeds, losses, accuracy
        self.seconds = 0.0
        self.asked, self.started, self.measured = {}, [], []
        self.stops = 0

    def runs(self, setting):
        return bool(self.started) and self.started[-1] == setting.engine

    def stop(self):
        self.stops += 1

    def _start(self, setting):
        if not self.runs(setting):
            self.started.append(setting.engine)
            self.seconds += START

    def rate(self, setting, batch):
        rate = 100.0 * batch**0.5
        for part, factor in self.speeds.items():
            rate *= factor if part in str(setting) else 1.0
        return rate

    def answer(self, setting, indices):
        self._start(setting)
        lost = sum(loss for part, loss in self.losses.items() if part in str(setting))
        scores = []
        for index in indices:
            draw = random.Random(index).random()
            wrong = random.Random(f"{setting} {index}").random() < lost
            scores.append(float(draw < self.accuracy and not wrong))
        self.asked[setting] = self.asked.get(setting, 0) + len(indices)
        return Answers(scores, self._cost(setting, len(indices), self.at_once))

    def measure(self, setting, count, batch):
        self._start(setting)
        self.measured.append((setting, batch))
        return self._cost(setting, count, batch)

    def _cost(self, setting, count, batch):
        seconds = count * TOKENS / self.rate(setting, batch)
        self.seconds += seconds
        return Cost(count, count * TOKENS, seconds, count * TOKENS, count)


@pytest.fixture
def searched(tmp_path):
    def search(runner, *, loss=0.02, batches=(1, 16), budget=10_000.0, space=SPACE, run=True, name="tune.json"):
        file = TrialFile(tmp_path / name, {"model": "made up"})
        found = Search(runner, file, space, Goal(loss, batches, budget, NUM_EXAMPLES), clock=lambda: runner.seconds)
        if run:
            found.run()
        return found

    return search


FAST = {"threshold=0.9": 4.0, "threshold=0.5": 8.0, "factor": 3.0, "dual": 2.0, "sparse": 1.5, "block_length=16": 1.3}


def test_the_fastest_setting_within_the_loss_is_found(searched):
    runner = MadeUpRunner(FAST, {"threshold=0.5": 0.2})
    search = searched(runner)
    best = Setting("dual", rule=("threshold", 0.9), block_length=16)
    for batch in (1, 16):
        assert search.standings.chosen(batch).setting == best
        turns = search.file.turns[batch]
        assert turns.ratios == pytest.approx([4 * 2 * 1.3] * module.ROUNDS)
    assert not search.ran_out
    assert len(search.file.trial(best).scores) == NUM_EXAMPLES
    assert search.standings.loss(search.file.trial(best)).observed == 0


def test_batch_sizes_get_settings_of_their_own(searched):
    class Runner(MadeUpRunner):
        def rate(self, setting, batch):
            return super().rate(setting, batch) * (0.3 if batch == 16 and setting.cache_method == "dual" else 1)

    search = searched(Runner(FAST, {"threshold=0.5": 0.2}))
    assert [search.standings.chosen(batch).setting.cache_method for batch in (1, 16)] == ["dual", "sparse"]


def test_losers_are_stopped_early(searched):
    runner = MadeUpRunner(FAST, {"threshold=0.5": 0.5})
    search = searched(runner)
    wrong = Setting(rule=("threshold", 0.5))
    assert search.standings.is_refuted(search.file.trial(wrong))
    assert runner.asked[wrong] == 32
    # What is right but slow is not asked on either.
    assert runner.asked[Setting(rule=("factor", 1.0))] < NUM_EXAMPLES / 2


def test_a_loss_between_the_bounds_takes_more_examples(searched):
    runner = MadeUpRunner(FAST, {"threshold=0.5": 0.06})
    search = searched(runner)
    risky = [setting for setting in runner.asked if setting.rule == ("threshold", 0.5)]
    assert max(runner.asked[setting] for setting in risky) > 32
    assert search.standings.chosen(1).setting.rule == ("threshold", 0.9)


def test_plain_decoding_is_chosen_where_all_else_is_wrong(searched):
    names = ("threshold", "factor", "dual", "sparse", "block_length", "block_add")
    search = searched(MadeUpRunner(FAST, dict.fromkeys(names, 0.5)))
    assert search.standings.chosen(1).setting == PLAIN
    assert search.file.turns == {}


def test_of_equals_one_is_chosen(searched):
    search = searched(MadeUpRunner({" threshold": 4.0, " factor": 4.0}, {}))
    assert search.standings.chosen(1).setting.rule is not None
    assert search.file.turns[1].ratios == pytest.approx([4.0] * module.ROUNDS)


@pytest.mark.parametrize("budget", [30.0, 40.0, 60.0, 120.0, 240.0])
def test_the_budget_is_kept_and_a_short_search_finds_something_fast_already(searched, budget):
    runner = MadeUpRunner(FAST, {"threshold=0.5": 0.2})
    search = searched(runner, budget=budget)
    assert runner.seconds <= budget + 10
    assert search.standings.chosen(1).scores
    if budget == 40:
        assert search.ran_out
        assert search.standings.chosen(16).setting != PLAIN


def test_an_engine_is_started_once_per_rung(searched):
    runner = MadeUpRunner(FAST, {"threshold=0.5": 0.2})
    searched(runner)
    methods = [engine["cache_method"] for engine in runner.started]
    assert len(methods) <= len(module.RUNGS) * 4 + module.ROUNDS * 2
    assert all(a != b or a == "sparse" for a, b in itertools.pairwise(methods))


def test_a_finished_search_measures_nothing_again(searched):
    first = searched(MadeUpRunner(FAST, {"threshold=0.5": 0.2}))
    again = MadeUpRunner(FAST, {"threshold=0.5": 0.2})
    second = searched(again)
    assert (again.asked, again.measured, again.started) == ({}, [], [])
    for batch in (1, 16):
        assert second.standings.chosen(batch).setting == first.standings.chosen(batch).setting


def test_an_interrupted_search_goes_on(searched):
    class Interrupted(MadeUpRunner):
        def answer(self, setting, indices):
            if len(self.asked) == 6:
                raise KeyboardInterrupt
            return super().answer(setting, indices)

    before = Interrupted(FAST, {"threshold=0.5": 0.2})
    with pytest.raises(KeyboardInterrupt):
        searched(before)
    after = MadeUpRunner(FAST, {"threshold=0.5": 0.2})
    search = searched(after)
    whole = MadeUpRunner(FAST, {"threshold=0.5": 0.2})
    other = searched(whole, name="whole.json")
    assert search.standings.chosen(1).setting == other.standings.chosen(1).setting
    both = {setting: before.asked.get(setting, 0) + after.asked.get(setting, 0) for setting in whole.asked}
    assert both == whole.asked


def test_another_batch_size_reuses_the_answers(searched):
    searched(MadeUpRunner(FAST, {}), batches=(16,))
    again = MadeUpRunner(FAST, {})
    search = searched(again, batches=(1, 16))
    assert PLAIN not in again.asked
    assert (PLAIN, 1) in again.measured
    assert 1 in search.file.turns


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_setting_that_cannot_be_run_is_left_out(searched, error):
    class Runner(MadeUpRunner):
        def answer(self, setting, indices):
            if setting.cache_method == "dual":
                raise error("dual is not for this model")
            return super().answer(setting, indices)

    runner = Runner(FAST, {"threshold=0.5": 0.2})
    search = searched(runner)
    # An engine that failed by itself may be in any state.
    assert (runner.stops > 0) == (error is RuntimeError)
    assert search.standings.chosen(1).setting.cache_method == "sparse"
    errors = {trial.error for trial in search.file.trials.values() if trial.setting.cache_method == "dual"}
    assert errors == {"dual is not for this model"}


def test_plain_decoding_that_fails_is_an_error(searched):
    class Runner(MadeUpRunner):
        def answer(self, setting, indices):
            raise ValueError("a prompt is too long")

    with pytest.raises(ValueError, match="a prompt is too long"):
        searched(Runner({}, {}))
