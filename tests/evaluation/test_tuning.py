"""The search on made-up settings, whose accuracy and speed are known."""

import itertools
import random

import pytest

from dllm_engine.evaluation import tuning as module
from dllm_engine.evaluation.result_file import ResultFile
from dllm_engine.evaluation.runner import Cost
from dllm_engine.evaluation.tuning import PLAIN, Search, Setting, Space

NUM_EXAMPLES = 400
SPACE = Space(
    methods={"none": [], "dual": [], "sparse": [{"retention_ratio": 0.25}]},
    rules=[{"threshold": 0.9}, {"threshold": 0.5}, {"factor": 1.0}],
    windows=[0.25],
    block_lengths=[16],
)
START, TOKENS = 2.0, 10


class MadeUpModel:
    """Answers wrongly as often as ``losses`` say, as fast as ``speeds`` say, for what a setting has of their keys."""

    def __init__(self, speeds, losses, accuracy=0.9):
        self.speeds, self.losses, self.accuracy = speeds, losses, accuracy
        self.seconds = 0.0
        self.asked, self.started = {}, []

    def rate(self, setting, batch):
        rate = 100.0 * batch**0.5
        for part, factor in self.speeds.items():
            rate *= factor if part in str(setting) else 1.0
        return rate

    def __call__(self, setting, indices, at_once):
        if self.started[-1:] != [setting.engine]:
            self.started.append(setting.engine)
            self.seconds += START
        lost = sum(loss for part, loss in self.losses.items() if part in str(setting))
        scores = []
        for index in indices:
            draw = random.Random(index).random()
            wrong = random.Random(f"{setting} {index}").random() < lost
            scores.append(float(draw < self.accuracy and not wrong))
        if at_once == 16:
            self.asked[str(setting)] = self.asked.get(str(setting), 0) + len(indices)
        tokens = len(indices) * TOKENS
        cost = Cost(requests=len(indices), tokens=tokens, seconds=tokens / self.rate(setting, at_once))
        self.seconds += cost.seconds
        return scores, cost


@pytest.fixture
def searched(tmp_path):
    def search(model, *, loss=0.02, batches=(1, 16), budget=10_000.0, name="tune.json"):
        file = ResultFile(tmp_path / name, "tune", {"model": "made up"})
        how = {"batches": batches, "at_once": 16, "num_examples": NUM_EXAMPLES, "budget": budget}
        made = Search(model, file, loss, SPACE, **how, clock=lambda: model.seconds)
        made.is_through = made.run()
        return made

    return search


FAST = {"threshold=0.9": 4.0, "threshold=0.5": 8.0, "factor": 3.0, "dual": 2.0, "sparse": 1.5, "block_length=16": 1.3}


def test_the_fastest_setting_within_the_loss_is_found(searched):
    file = searched(MadeUpModel(FAST, {"threshold=0.5": 0.2}))
    best = Setting("dual", rule={"threshold": 0.9}, blocks={"block_length": 16})
    for batch in (1, 16):
        assert file.chosen(batch).setting == best
        figures = file.figures(batch, file.chosen(batch))
        assert figures["tokens_per_second"] / figures["plain_tokens_per_second"] == pytest.approx(4 * 2 * 1.3)
        assert (figures["loss"], figures["shown"], figures["examples"]) == (0, True, NUM_EXAMPLES)
    assert file.is_through


def test_batch_sizes_get_settings_of_their_own(searched):
    class Model(MadeUpModel):
        def rate(self, setting, batch):
            return super().rate(setting, batch) * (0.3 if batch == 16 and setting.cache_method == "dual" else 1)

    file = searched(Model(FAST, {"threshold=0.5": 0.2}))
    assert [file.chosen(batch).setting.cache_method for batch in (1, 16)] == ["dual", "sparse"]


def test_losers_are_stopped_early(searched):
    model = MadeUpModel(FAST, {"threshold=0.5": 0.5})
    file = searched(model)
    wrong = Setting(rule={"threshold": 0.5})
    assert file.is_out(file.trial(wrong))
    assert model.asked[str(wrong)] == 32
    # Right but slow settings are not asked on either.
    assert model.asked[str(Setting(rule={"factor": 1.0}))] < NUM_EXAMPLES / 2


def test_a_loss_between_the_bounds_takes_more_examples(searched):
    model = MadeUpModel(FAST, {"threshold=0.5": 0.06})
    file = searched(model)
    assert max(count for setting, count in model.asked.items() if "threshold=0.5" in setting) > 32
    assert file.chosen(1).setting.rule == {"threshold": 0.9}


def test_plain_decoding_is_chosen_where_all_else_is_wrong(searched):
    names = ("threshold", "factor", "dual", "sparse", "block_length", "block_add")
    assert searched(MadeUpModel(FAST, dict.fromkeys(names, 0.5))).chosen(1).setting == PLAIN


@pytest.mark.parametrize("budget", [6.0, 15.0, 30.0, 120.0])
def test_the_budget_is_kept_and_a_short_search_finds_something_fast_already(searched, budget):
    model = MadeUpModel(FAST, {"threshold=0.5": 0.2})
    file = searched(model, budget=budget)
    assert model.seconds <= budget + 10
    assert file.is_through == (budget > 20)
    assert file.chosen(16).setting != PLAIN


def test_engines_are_not_started_for_each_setting(searched):
    model = MadeUpModel(FAST, {"threshold=0.5": 0.2})
    file = searched(model)
    assert len(model.started) < len(file.scored) / 1.5
    assert all(a != b for a, b in itertools.pairwise(model.started))


def test_a_finished_search_measures_nothing_again(searched):
    first = searched(MadeUpModel(FAST, {"threshold=0.5": 0.2}))
    again = MadeUpModel(FAST, {"threshold=0.5": 0.2})
    second = searched(again)
    assert again.started == []
    assert [second.chosen(batch).setting for batch in (1, 16)] == [first.chosen(batch).setting for batch in (1, 16)]


def test_an_interrupted_search_goes_on(searched):
    class Interrupted(MadeUpModel):
        def __call__(self, setting, indices, at_once):
            if len(self.asked) == 6:
                raise KeyboardInterrupt
            return super().__call__(setting, indices, at_once)

    before = Interrupted(FAST, {"threshold=0.5": 0.2})
    with pytest.raises(KeyboardInterrupt):
        searched(before)
    after, whole = (MadeUpModel(FAST, {"threshold=0.5": 0.2}) for _ in range(2))
    assert searched(after).chosen(1).setting == searched(whole, name="whole.json").chosen(1).setting
    both = {setting: before.asked.get(setting, 0) + after.asked.get(setting, 0) for setting in whole.asked}
    assert both == whole.asked


def test_another_batch_size_reuses_the_answers(searched):
    searched(MadeUpModel(FAST, {}), batches=(16,))
    again = MadeUpModel(FAST, {})
    file = searched(again, batches=(1, 16))
    assert str(PLAIN) not in again.asked
    assert set(file.plain.speeds) == {1, 16}


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_setting_that_cannot_be_run_is_left_out(searched, error):
    class Model(MadeUpModel):
        def __call__(self, setting, indices, at_once):
            if setting.cache_method == "dual":
                raise error("dual is not for this model")
            return super().__call__(setting, indices, at_once)

    file = searched(Model(FAST, {"threshold=0.5": 0.2}))
    assert file.chosen(1).setting.cache_method == "sparse"
    errors = {trial.error for trial in file.trials.values() if trial.setting.cache_method == "dual"}
    assert errors == {"dual is not for this model"}
    assert "Cannot be run: dual" in module.report(file, {1: ["dllm serve"]})


def test_plain_decoding_that_fails_is_an_error(searched):
    def model(setting, indices, at_once):
        raise ValueError("a prompt is too long")

    model.seconds = 0.0
    with pytest.raises(ValueError, match="a prompt is too long"):
        searched(model)
