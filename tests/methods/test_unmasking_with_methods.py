"""Every unmasking policy with every rule of parallel unmasking, and every cache method with each of them.

What they fill is compared with plain versions in ``test_random_requests.py``.
"""

import re
from pkgutil import resolve_name

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.scheduler.options.request_fields import PARALLEL_OPTIONS
from dllm_engine.scheduler.unmasking_policies import PARALLEL_RULES, UNMASKING_POLICIES
from tests.support.engines import assert_nothing_left, generate
from tests.support.plans import FULL_METHODS
from tests.support.tiny_checkpoints import MASK

PROMPT = [(7 * i * i + 3) % 100 for i in range(21)]
SPANS = {"span_steps": 1, "span_window": 1, "slow_threshold": 0.6, "fast_threshold": 0.2}
SOME = {"threshold": 0.3, "factor": 4.0, "entropy_bound": 4.0, "margin": 0.2, "entropy_threshold": 1.5}
SOME |= {"entropy_budget": 6.0, "slow_fast": SPANS}
POLICY = {
    "LLaDA": dict.fromkeys(("threshold", "factor"), "low_confidence"),
    "Dream": dict.fromkeys(("threshold", "factor"), "maskgit_plus"),
}
"""The policy that measures what a rule goes by."""
for of_family in POLICY.values():
    of_family.update(margin="topk_margin", entropy_threshold="low_entropy", slow_fast="low_confidence")
for of_entropy in ("entropy_bound", "entropy_budget"):
    POLICY["LLaDA"][of_entropy], POLICY["Dream"][of_entropy] = "low_entropy", "entropy"


@pytest.fixture(params=["LLaDA", "Dream"])
def family(request):
    return request.param


@pytest.fixture
def engine(engines, tiny_llada, tiny_dream):
    def make(cache_method, family="LLaDA"):
        return engines({"LLaDA": tiny_llada, "Dream": tiny_dream}[family], page_size=8, cache_method=cache_method)

    return make


def answer(llm, **params):
    asked = {"gen_length": 24, "block_length": 8, "ignore_eos": True} | params
    (output,) = generate(llm, [PROMPT], DiffusionParams(**asked))
    return list(output.outputs[0].token_ids), output.outputs[0].diffusion


@pytest.mark.parametrize("rule", PARALLEL_OPTIONS)
def test_left_open_the_policy_is_the_one_that_measures_what_the_rule_goes_by(engine, family, rule):
    llm = engine("none", family)
    for settings in ({}, {"temperature": 0.7, "top_k": 20, "seed": 4}):
        opened, figures = answer(llm, **{rule: SOME[rule]}, **settings)
        named, expected = answer(llm, **{rule: SOME[rule]}, **settings, unmasking=POLICY[family][rule])
        assert (opened, figures.unmasked_per_step) == (named, expected.unmasked_per_step)


@pytest.mark.parametrize("unmasking", ["entropy", "topk_margin", "random", "origin"])
def test_a_threshold_leaves_policies_that_measure_no_probability_to_their_count(engine, unmasking):
    llm = engine("none", "Dream")
    settings = {"unmasking": unmasking, "steps": 12, "seed": 3}
    tokens, figures = answer(llm, **settings, threshold=0.01)
    counted, expected = answer(llm, **settings)
    assert (tokens, figures.unmasked_per_step) == (counted, expected.unmasked_per_step)


def test_with_a_rule_steps_do_not_count(engine):
    llm = engine("none")
    assert answer(llm, threshold=1.0, steps=1)[1].forward_passes == 24
    # A policy that keeps to its count needs a step per block as ever.
    with pytest.raises(ValueError, match="steps=1 is out of range"):
        answer(llm, threshold=1.0, steps=1, unmasking="entropy")


# Every policy with every rule, and each of them with every cache method


def test_what_is_combined_below_is_all_there_is():
    for method in CACHE_METHODS.values():
        assert callable(resolve_name(f"dllm_engine.model_executor.{method.layer_pass}"))
    assert set(SOME) == set(PARALLEL_OPTIONS) <= set(PARALLEL_RULES)


@pytest.mark.parametrize("rule", [None, *PARALLEL_OPTIONS])
@pytest.mark.parametrize("unmasking", UNMASKING_POLICIES)
def test_a_policy_and_a_rule_answer_in_full_or_are_refused_with_the_reason(engine, unmasking, rule):
    llm = engine("dual")
    settings = {"gen_length": 7, "block_length": 4, "unmasking": unmasking, "seed": 1}
    if rule is None:
        check_answer(*answer(llm, **settings))
    elif rule == "threshold" or PARALLEL_RULES[rule].suits(UNMASKING_POLICIES[unmasking]):
        check_answer(*answer(llm, **settings, **{rule: SOME[rule]}))
    else:
        reason = f"{re.escape(f'{rule}={SOME[rule]}')} goes by .* unmasking={unmasking!r} does not measure"
        with pytest.raises(ValueError, match=reason):
            answer(llm, **settings, **{rule: SOME[rule]})
    assert_nothing_left(llm)


def check_answer(tokens, figures):
    assert len(tokens) == 7
    assert MASK not in tokens
    filled = [position for step in figures.unmasked_per_step for position in step]
    assert sorted(filled) == list(range(21, 28))
    assert figures.tokens_unmasked == 7


@pytest.mark.parametrize("cache_method", FULL_METHODS)
def test_a_policy_or_a_rule_answers_in_full_with_every_cache_method(engine, cache_method, family):
    llm = engine(cache_method, family)
    asked = [{rule: value} for rule, value in SOME.items()]
    asked += [{"unmasking": unmasking, "seed": 1} for unmasking in UNMASKING_POLICIES]
    params = [DiffusionParams(gen_length=7, block_length=4, ignore_eos=True, **one) for one in asked]
    for output in generate(llm, [PROMPT] * len(asked), params):
        check_answer(list(output.outputs[0].token_ids), output.outputs[0].diffusion)
    assert_nothing_left(llm)
