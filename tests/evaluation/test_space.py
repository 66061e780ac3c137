"""Settings and what is varied of them."""

import pytest

from dllm_engine.evaluation.tuning import PLAIN, RULES, Setting, Space
from dllm_engine.families import DREAM, LLADA
from dllm_engine.options import EngineOptions
from dllm_engine.params import DiffusionParams
from dllm_engine.scheduler.options.request_fields import PARALLEL_OPTIONS
from tests.support.plans import FULL_METHODS


def space(family=LLADA, **changes):
    values = {"methods": list(FULL_METHODS), "default_block": 8, "longest_block": 32}
    return Space.of_model("demo", family, **values | changes)


@pytest.mark.parametrize("method", FULL_METHODS)
def test_methods_name_options_that_they_have(method):
    for name, values in FULL_METHODS[method].tuned.items():
        for value in values:
            EngineOptions.parse({"cache_method": method, "cache_options": {name: value}})


def test_every_rule_that_requests_name_is_searched():
    # slow_fast has several numbers.
    assert {name for rule in RULES for name in rule} == set(PARALLEL_OPTIONS) - {"slow_fast"}
    for rule in RULES:
        DiffusionParams(**Setting(rule=rule).decoding)


def test_options_differ_from_the_papers_of_the_model():
    assert space().methods["dkv"] == [{"refresh_interval": 4}, {"refresh_interval": 16}]
    assert space(DREAM).methods["dkv"] == [{"refresh_interval": 8}, {"refresh_interval": 16}]
    assert space().methods["none"] == []


def test_blocks_are_at_most_the_response():
    assert space().block_lengths == [4, 16, 32]
    assert space(default_block=256, longest_block=256).block_lengths == [32, 64, 128]


def test_one_factor_is_varied():
    setting = Setting("sparse", {"retention_ratio": 0.25}, {"threshold": 0.9}, {"block_length": 16})
    varied = {factor: space().varied(setting, factor) for factor in ("rule", "window", "block_length", "cache_method")}
    assert [other.rule for other in varied["rule"]] == [rule for rule in RULES if rule != {"threshold": 0.9}]
    assert [other.blocks["block_add_threshold"] for other in varied["window"]] == [0.75, 0.5, 0.1, 0.0]
    assert {other.blocks["block_length"] for other in varied["window"]} == {16}
    assert [other.blocks["block_length"] for other in varied["block_length"]] == [4, 32]
    # Another method's options would mean nothing; the same one's are those of the paper again.
    assert [other.cache_method for other in varied["cache_method"]] == list(FULL_METHODS)
    assert all(other.cache_options == {} for other in varied["cache_method"])
    changed = [{"retention_ratio": 0.75}, {"update_delay": 0}, {"refresh": "response"}]
    assert [other.cache_options for other in space().varied(setting, "cache_options")] == changed


def test_a_fixed_count_of_tokens_runs_one_block_at_a_time():
    assert space().varied(PLAIN, "window") == []
    assert space().varied(Setting(rule={"steps": 8}), "window") == []


def test_a_setting_is_told_by_its_text():
    setting = Setting("sparse", {"retention_ratio": 0.25}, {"factor": 1.0}, {"block_length": 16})
    assert str(setting) == "sparse retention_ratio=0.25 factor=1.0 block_length=16"
