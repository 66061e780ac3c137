"""The toy method, scorer and rule of ``docs/research.md`` run as they are printed."""

import re
from pathlib import Path

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.cache_methods import CACHE_METHODS
from dllm_engine.cache_methods.scorers import SCORERS
from dllm_engine.decoding.unmasking_policies import UNMASKING_POLICIES
from dllm_engine.model_executor.unmasking.selection import parallel_rule
from tests.support.engines import assert_nothing_left, generate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "research.md"
PROMPTS = [[5, 6, 7, 8, 9, 10], [11] * 30]
PARAMS = {"gen_length": 16, "block_length": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def page():
    """What the page's Python defines."""
    names = {}
    for block in re.findall(
        r"^```python\n(.*?)^```$",
        PAGE.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    ):
        exec(compile(block, PAGE.name, "exec"), names)
    return names


def figures(llm, **params):
    return [
        output.outputs[0]
        for output in generate(llm, PROMPTS, DiffusionParams(**PARAMS, **params))
    ]


def test_the_cache_method_runs_and_keeps_what_it_says(
    page, engines, tiny_llada, monkeypatch
):
    monkeypatch.setitem(CACHE_METHODS._members, "local", page["LOCAL"])
    short, long = figures(
        engines(tiny_llada, cache_method="local", cache_options={"radius": 10})
    )
    assert short.diffusion.refresh_states == ["update", *["reuse"] * 7] * 2
    kept = [step[0] for step in long.diffusion.retained_positions]
    assert kept == [list(range(20, 30)), list(range(28, 38))]
    assert long.diffusion.tokens_retained == 10
    assert_nothing_left(
        engines(tiny_llada, cache_method="local", cache_options={"radius": 10})
    )


def test_the_scorer_chooses_what_is_near(page, engines, tiny_llada, monkeypatch):
    monkeypatch.setitem(SCORERS, "random", page["RECENCY"])
    options = {"scorer": "random", "pool_kernel_size": 1, "retention_ratio": 0.2}
    _, long = figures(engines(tiny_llada, cache_method="sparse", cache_options=options))
    # A fifth of the 38 positions outside the first block, which begins at 30.
    assert [step[0] for step in long.diffusion.retained_positions] == [
        list(range(23, 30)),
        list(range(31, 38)),
    ]


def test_the_rule_fills_what_is_nearly_as_sure_as_the_best(
    page, engines, tiny_llada, monkeypatch
):
    assert page["RELATIVE"].suits(UNMASKING_POLICIES["low_confidence"])
    monkeypatch.setattr(
        "dllm_engine.unmasking_rules.selection.within_factor", page["near_the_best"]
    )
    parallel_rule.cache_clear()
    llm = engines(tiny_llada)
    assert {
        len(step) for step in figures(llm, factor=1.0)[0].diffusion.unmasked_per_step
    } == {1}
    assert [
        len(step) for step in figures(llm, factor=0.001)[0].diffusion.unmasked_per_step
    ] == [8, 8]
    parallel_rule.cache_clear()
