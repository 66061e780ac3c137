"""Settings and what is varied of them, the interval of a loss, and the search on
made-up settings, whose accuracy and speed are known."""

import pytest

from dllm_engine.evaluation import tuning as module
from dllm_engine.evaluation.comparison import Comparison, Result, mean_and_error
from dllm_engine.evaluation.own_tasks import OwnTask, OwnTasks
from dllm_engine.evaluation.runner import Cost
from dllm_engine.evaluation.tuning import (
    PLAIN,
    RULES,
    Search,
    Setting,
    Space,
    loss_interval,
    space_of,
)
from dllm_engine.options import EngineOptions
from dllm_engine.params import DiffusionParams
from dllm_engine.request_options.unmasking import PARALLEL_OPTIONS
from tests.support.plans import FULL_METHODS


def space(model="demo", **decoding):
    return space_of(model, None, RULES, decoding)


def test_values_that_are_tried_are_those_of_methods_and_requests():
    for method, owner in FULL_METHODS.items():
        for name, values in owner.options.tuned.items():
            for value in values:
                EngineOptions.parse(
                    {"cache_method": method, "cache_options": {name: value}}
                )
    # slow_fast has several numbers.
    assert {name for rule in RULES for name in rule} == set(PARALLEL_OPTIONS) - {
        "slow_fast"
    }
    for rule in RULES:
        DiffusionParams(**rule)


def test_options_differ_from_the_papers_of_the_model_and_blocks_are_at_most_the_response(
    tiny_dream,
):
    assert space().methods["dkv"] == [{"refresh_interval": 4}, {"refresh_interval": 16}]
    assert space(str(tiny_dream)).methods["dkv"] == [
        {"refresh_interval": 8},
        {"refresh_interval": 16},
    ]
    assert space().methods["none"] == []
    assert space(gen_length=32).block_lengths == [4, 16, 32]
    assert space(gen_length=256, block_length=256).block_lengths == [32, 64, 128]
    assert set(space("demo-blocks").methods) == {"none", "block", "focus"}
    assert space("demo-blocks").block_lengths == ()


def test_one_factor_is_varied():
    chosen = Setting(
        "sparse", {"retention_ratio": 0.25}, {"threshold": 0.9, "block_length": 16}
    )
    varied = {
        factor: space(gen_length=32).varied(chosen, factor) for factor in module.FACTORS
    }
    rules = [other.decoding for other in varied["rule"]]
    assert rules == [
        rule | {"block_length": 16} for rule in RULES if rule != {"threshold": 0.9}
    ]
    windows = [other.decoding for other in varied["block_add_threshold"]]
    assert windows == [
        chosen.decoding | {"block_add_threshold": value} for value in module.WINDOWS
    ]
    assert [other.decoding["block_length"] for other in varied["block_length"]] == [
        4,
        32,
    ]
    # Another method's options would mean nothing; the same one's are those of the paper
    # again.
    assert varied["cache_method"] == [
        Setting(method, {}, chosen.decoding) for method in FULL_METHODS
    ]
    changed = [{"retention_ratio": 0.75}, {"update_delay": 0}, {"refresh": "response"}]
    assert [other.cache_options for other in varied["cache_options"]] == changed
    # A fixed count of tokens runs one block at a time.
    for setting in (PLAIN, Setting(decoding={"steps": 8})):
        assert space().varied(setting, "block_add_threshold") == []


def test_prompts_are_shared_where_they_begin_alike_and_the_method_can():
    alike = space_of("demo", None, RULES, {}, begin_alike=True)
    (shared,) = alike.varied(Setting("dual"), "share_prompts")
    assert shared.engine["share_prompts"]
    assert shared.combination({}, {}).method == "dual:share_prompts=true"
    assert "share_prompts" not in Setting("dual").engine
    for tried in (
        alike.varied(shared, "share_prompts"),
        alike.varied(Setting("maskkv"), "share_prompts"),
        space().varied(Setting("dual"), "share_prompts"),
    ):
        assert tried == []


def test_the_shared_part_of_prompts_is_what_begins_another_one():
    def part(*prompts):
        tasks = [OwnTask(prompt=prompt, answer="x") for prompt in prompts]
        return OwnTasks("mine", tasks, "exact").shared_part(page_size=32)

    text = 80 * "a"
    assert part(text + "bc", "xyz", text + "de") == 80 / (82 + 3 + 82)
    assert part([{"role": "user", "content": text + "b"}], text + "c") == 80 / 162
    page = text[:32]
    assert part(page + "b", page + "c") == 32 / 66
    assert part(page[1:] + "b", page[1:] + "c") == part(text) == 0


def test_the_interval_is_that_of_bonett_and_price():
    # 100 pairs: 8 won by plain decoding, 2 by the setting. (8 - 2) / 102; √((10 + 2) /
    # 102 - 0.0588²) / √102.
    plain = [1.0] * 98 + [0.0] * 2
    scores = [1.0] * 90 + [0.0] * 8 + [1.0] * 2
    error = (12 / 102 - (6 / 102) ** 2) ** 0.5 / 102**0.5
    bounds = 6 / 102 - 1.645 * error, 6 / 102 + 1.645 * error
    assert loss_interval(plain, scores) == pytest.approx(bounds, abs=1e-4)
    assert mean_and_error([1.0] * 8 + [0.0] * 2) == pytest.approx(
        (0.8, (0.8 * 0.2 / 10) ** 0.5)
    )
    few, many = (loss_interval([1.0] * count, [1.0] * count)[1] for count in (10, 500))
    assert few > 0.1
    assert many < 0.01


SPACE = Space(
    methods={"none": [], "dual": [], "sparse": [{"retention_ratio": 0.25}]},
    rules=[{"threshold": 0.9}, {"threshold": 0.5}, {"factor": 1.0}],
    windows=[0.25],
    block_lengths=[16],
)
FAST = {
    "threshold=0.9": 4.0,
    "threshold=0.5": 8.0,
    "factor": 3.0,
    "dual": 2.0,
    "sparse": 1.5,
    "block_length=16": 1.3,
}


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """``searched(losses, refused="")``: the search on settings that lose as much, and
    are as fast, as their parts; and the rows that it measured."""

    def search(losses, refused="", budget=1e9):
        asked = []

        def measure(comparison, row):
            key = row.key
            asked.append(key)
            if refused and refused in key:
                raise ValueError("not for this model")
            speed = 1.0
            for part, factor in FAST.items():
                speed *= factor if part in key else 1.0
            wrong = round(
                100 * sum(loss for part, loss in losses.items() if part in key)
            )
            scores = [0.0] * wrong + [1.0] * (100 - wrong)
            row.result = Result(
                "exact", *mean_and_error(scores), 100, {"scores": scores}
            )
            row.cost = Cost(requests=100, tokens=1000, seconds=1000 / speed)
            comparison.save()

        monkeypatch.setattr(Comparison, "_measure", measure)
        with Comparison(
            tmp_path / "tune.json", "tune", {"model": "made up"}, load=None
        ) as comparison:
            search = Search(
                comparison,
                OwnTasks("mine", [], "exact"),
                SPACE,
                {"model": "m"},
                {"gen_length": 8},
                0.02,
            )
            search.run(budget)
        return search, asked

    return search


def test_the_fastest_setting_within_the_loss_is_found_and_nothing_measured_again(
    searched,
):
    search, asked = searched({"threshold=0.5": 0.2, "block_add_threshold": 0.01})
    best, row = search.best
    assert best == Setting("dual", {}, {"threshold": 0.9, "block_length": 16})
    assert (row.method, row.unmasking) == ("dual", "threshold=0.9+block_length=16")
    assert row.engine == {"model": "m", "cache_method": "dual", "cache_options": {}}
    assert row.decoding == {"gen_length": 8, "threshold": 0.9, "block_length": 16}
    figures = search.figures()
    assert figures["tokens_per_second"] / figures[
        "plain_tokens_per_second"
    ] == pytest.approx(4 * 2 * 1.3)
    assert (figures["loss"], figures["examples"]) == (0, 100)
    assert len(asked) == len(set(asked))
    again, asked = searched({})
    assert (again.best[0], asked) == (best, [])


def test_plain_decoding_is_chosen_where_all_else_is_wrong(searched):
    search, _ = searched(dict.fromkeys(FAST, 0.5))
    assert search.best[0] == PLAIN


def test_the_budget_ends_the_search_behind_plain_decoding(searched):
    search, asked = searched({}, budget=-1)
    assert asked == ["none one mine"]
    assert search.best[0] == PLAIN


def test_a_setting_that_cannot_be_run_is_left_out(searched):
    search, _ = searched({"threshold=0.5": 0.2}, refused="dual")
    assert search.best[0].cache_method == "sparse"
    assert set(search.comparison.errors.values()) == {"not for this model"}


def test_plain_decoding_that_fails_is_an_error(searched):
    with pytest.raises(ValueError, match="not for this model"):
        searched({}, refused="none one")
