"""Settings and what is varied of them, the loss of accuracy, and the search on made-up settings, whose accuracy and
speed are known."""

import itertools
import random

import pytest

from dllm_engine.evaluation import tuning as module
from dllm_engine.evaluation.comparison import mean_and_error
from dllm_engine.evaluation.result_file import ResultFile
from dllm_engine.evaluation.runner import Cost
from dllm_engine.evaluation.tuning import PLAIN, RULES, Loss, Search, Setting, Space, space_of
from dllm_engine.families import DREAM, LLADA
from dllm_engine.options import EngineOptions
from dllm_engine.params import DiffusionParams
from dllm_engine.scheduler.options.request_fields import PARALLEL_OPTIONS
from tests.support.plans import FULL_METHODS


def setting(method, cache_options=None, **decoding):
    return Setting({"cache_method": method, "cache_options": cache_options or {}}, decoding)


def space(family=LLADA, default_block=8, longest_block=32):
    return space_of("demo", family, list(FULL_METHODS), default_block, longest_block)


def test_values_that_are_tried_are_those_of_methods_and_requests():
    for method, owner in FULL_METHODS.items():
        for name, values in owner.tuned.items():
            for value in values:
                EngineOptions.parse({"cache_method": method, "cache_options": {name: value}})
    # slow_fast has several numbers.
    assert {name for rule in RULES for name in rule} == set(PARALLEL_OPTIONS) - {"slow_fast"}
    for rule in RULES:
        DiffusionParams(**rule)


def test_options_differ_from_the_papers_of_the_model_and_blocks_are_at_most_the_response():
    assert space().methods["dkv"] == [{"refresh_interval": 4}, {"refresh_interval": 16}]
    assert space(DREAM).methods["dkv"] == [{"refresh_interval": 8}, {"refresh_interval": 16}]
    assert space().methods["none"] == []
    assert space().block_lengths == [4, 16, 32]
    assert space(default_block=256, longest_block=256).block_lengths == [32, 64, 128]


def test_one_factor_is_varied():
    chosen = setting("sparse", {"retention_ratio": 0.25}, threshold=0.9, block_length=16)
    assert str(chosen) == "sparse retention_ratio=0.25 threshold=0.9 block_length=16"
    varied = {factor: space().varied(chosen, factor) for factor in module.FACTORS}
    rules = [other.decoding for other in varied["rule"]]
    assert rules == [rule | {"block_length": 16} for rule in RULES if rule != {"threshold": 0.9}]
    windows = [other.decoding for other in varied["block_add_threshold"]]
    assert windows == [chosen.decoding | {"block_add_threshold": value} for value in module.WINDOWS]
    assert [other.decoding["block_length"] for other in varied["block_length"]] == [4, 32]
    # Another method's options would mean nothing; the same one's are those of the paper again.
    assert [other.engine for other in varied["cache_method"]] == [setting(method).engine for method in FULL_METHODS]
    changed = [{"retention_ratio": 0.75}, {"update_delay": 0}, {"refresh": "response"}]
    assert [other.engine["cache_options"] for other in varied["cache_options"]] == changed
    # A fixed count of tokens runs one block at a time.
    assert space().varied(PLAIN, "block_add_threshold") == []
    assert space().varied(setting("none", steps=8), "block_add_threshold") == []


def test_the_interval_is_that_of_bonett_and_price():
    # 100 pairs: 8 won by plain decoding, 2 by the setting. (8 - 2) / 102; √((10 + 2) / 102 - 0.0588²) / √102.
    plain = [1.0] * 98 + [0.0] * 2
    scores = [1.0] * 90 + [0.0] * 8 + [1.0] * 2
    loss = Loss.between(plain, scores, limit=6 / 102)
    error = (12 / 102 - (6 / 102) ** 2) ** 0.5 / 102**0.5
    bounds = 6 / 102 - 1.645 * error, 6 / 102 + 1.645 * error
    assert loss == pytest.approx((0.06, *bounds, 0.5), abs=1e-4)
    assert mean_and_error([1.0] * 8 + [0.0] * 2) == pytest.approx((0.8, (0.8 * 0.2 / 10) ** 0.5))


def test_few_equal_answers_show_little_and_only_examples_of_both_count():
    few, many = (Loss.between([1.0] * count, [1.0] * count, limit=0.01) for count in (10, 500))
    assert few.observed == many.observed == 0
    assert few.highest > 0.1
    assert many.highest < 0.01
    assert few.probability < 0.6 < 0.95 < many.probability
    assert Loss.between([1.0, 1.0, 0.0], [1.0], limit=0.0).observed == Loss.between([], [], limit=0.0).observed == 0


NUM_EXAMPLES = 400
SPACE = Space(
    methods={"none": [], "dual": [], "sparse": [{"retention_ratio": 0.25}]},
    rules=[{"threshold": 0.9}, {"threshold": 0.5}, {"factor": 1.0}],
    windows=[0.25],
    block_lengths=[16],
)
START, TOKENS, PLAIN_RATE = 2.0, 10, 100.0
FAST = {"threshold=0.9": 4.0, "threshold=0.5": 8.0, "factor": 3.0, "dual": 2.0, "sparse": 1.5, "block_length=16": 1.3}


class MadeUpModel:
    """Answers wrongly as often as ``losses`` say, as fast as ``FAST`` says, for what a setting has of their keys.
    ``before`` is called with the setting."""

    def __init__(self, losses, before=lambda setting: None):
        self.losses, self.before = losses, before
        self.seconds = 0.0
        self.asked, self.started = {}, []

    def __call__(self, setting, indices):
        self.before(setting)
        if self.started[-1:] != [setting.engine]:
            self.started.append(setting.engine)
            self.seconds += START
        lost = sum(loss for part, loss in self.losses.items() if part in str(setting))
        scores = []
        for index in indices:
            is_wrong = random.Random(f"{setting} {index}").random() < lost
            scores.append(float(random.Random(index).random() < 0.9 and not is_wrong))
        self.asked[str(setting)] = self.asked.get(str(setting), 0) + len(indices)
        rate = PLAIN_RATE
        for part, factor in FAST.items():
            rate *= factor if part in str(setting) else 1.0
        tokens = len(indices) * TOKENS
        cost = Cost(requests=len(indices), tokens=tokens, seconds=tokens / rate)
        self.seconds += cost.seconds
        return scores, cost


@pytest.fixture
def searched(tmp_path):
    def search(model, *, budget=10_000.0):
        file = ResultFile(tmp_path / "tune.json", "tune", {"model": "made up"})
        how = {"chunk": 32, "num_examples": NUM_EXAMPLES, "budget": budget}
        made = Search(model, file, 0.02, SPACE, **how, clock=lambda: model.seconds)
        made.is_through = made.run()
        return made

    return search


def test_the_fastest_setting_within_the_loss_is_found_and_nothing_measured_again(searched):
    model, again = MadeUpModel({"threshold=0.5": 0.5}), MadeUpModel({"threshold=0.5": 0.5})
    search = searched(model)
    best = setting("dual", threshold=0.9, block_length=16)
    assert search.chosen.setting == best
    figures = search.figures(search.chosen)
    assert figures["tokens_per_second"] / figures["plain_tokens_per_second"] == pytest.approx(4 * 2 * 1.3)
    assert (figures["loss"], figures["shown"], figures["examples"]) == (0, True, NUM_EXAMPLES)
    assert search.is_through
    # Engines are not started for each setting.
    assert len(model.started) < len(search.trials) / 1.5
    assert all(a != b for a, b in itertools.pairwise(model.started))
    # A loser is stopped early; right but slow settings are not asked on either.
    assert search.is_out(search.trial(setting("none", threshold=0.5)))
    assert model.asked["none threshold=0.5"] == 32
    assert model.asked["none factor=1.0"] < NUM_EXAMPLES / 2
    assert searched(again).chosen.setting == best
    assert again.started == []


def test_a_loss_between_the_bounds_takes_more_examples(searched):
    model = MadeUpModel({"threshold=0.5": 0.06})
    assert searched(model).chosen.setting.decoding["threshold"] == 0.9
    assert max(count for setting, count in model.asked.items() if "threshold=0.5" in setting) > 32


def test_plain_decoding_is_chosen_where_all_else_is_wrong(searched):
    names = ("threshold", "factor", "dual", "sparse", "block_length", "block_add")
    search = searched(MadeUpModel(dict.fromkeys(names, 0.5)))
    assert search.chosen.setting == PLAIN
    assert "Nothing faster than plain decoding was found" in module.report(search)


@pytest.mark.parametrize("budget", [50.0, 60.0, 600.0])
def test_the_budget_is_kept_and_a_short_search_finds_something_fast_already(searched, budget):
    model = MadeUpModel({"threshold=0.5": 0.2})
    search = searched(model, budget=budget)
    assert model.seconds <= budget + 10
    assert search.is_through == (budget > 100)
    assert search.chosen.setting != PLAIN


def test_an_interrupted_search_goes_on(searched):
    def interrupt(setting):
        if len(before.asked) == 6:
            raise KeyboardInterrupt

    before, after = (MadeUpModel({"threshold=0.5": 0.2}) for _ in range(2))
    before.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        searched(before)
    search = searched(after)
    assert search.chosen.setting == setting("dual", threshold=0.9, block_length=16)
    for trial in search.trials.values():
        asked = before.asked.get(str(trial.setting), 0) + after.asked.get(str(trial.setting), 0)
        assert len(trial.scores) == asked <= NUM_EXAMPLES


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_setting_that_cannot_be_run_is_left_out(searched, error):
    def refuse(setting):
        if setting.engine["cache_method"] == "dual":
            raise error("not for this model")

    search = searched(MadeUpModel({"threshold=0.5": 0.2}, before=refuse))
    assert search.chosen.setting.engine["cache_method"] == "sparse"
    assert "Cannot be run: dual" in module.report(search)


def test_plain_decoding_that_fails_is_an_error(searched):
    def refuse(setting):
        raise ValueError("a prompt is too long")

    with pytest.raises(ValueError, match="a prompt is too long"):
        searched(MadeUpModel({}, before=refuse))
