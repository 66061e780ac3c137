"""Responses with given tokens: every shape of hole, and what is reported of what was given."""

import pytest

from dllm_engine import DiffusionParams
from tests.support.engines import assert_nothing_left, generate

PROMPT = [3, 1, 4, 1, 5, 9]


def complete(llm, **asked):
    return generate(llm, [PROMPT], DiffusionParams(**asked))[0].outputs[0]


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3}])
def test_a_template_without_given_tokens_is_an_ordinary_request(engines, tiny_dream, settings):
    llm = engines(tiny_dream)
    asked = {"gen_length": 20, "block_length": 8, "ignore_eos": True} | settings
    empty = [DiffusionParams(**asked, response_template=template) for template in (None, [None] * 20)]
    first, second = (output.outputs[0] for output in generate(llm, [PROMPT] * 2, empty))
    assert (first.token_ids, first.diffusion.trace) == (second.token_ids, second.diffusion.trace)


def test_what_is_given_is_certain_and_may_be_left_out(engines, tiny_llada):
    llm = engines(tiny_llada)
    template = [None, 11, 12, None, None, 13, None, None, None]
    asked = {"response_template": template, "block_length": 4, "ignore_eos": True}
    whole, filled = complete(llm, **asked, logprobs=2), complete(llm, **asked, logprobs=2, return_given=False)
    given = [i for i, token in enumerate(template) if token is not None]
    assert [whole.token_ids[i] for i in given] == [11, 12, 13]
    assert [whole.logprobs[i][whole.token_ids[i]].logprob for i in given] == [0.0] * 3
    holes = [i for i in range(9) if i not in given]
    assert list(filled.token_ids) == [whole.token_ids[i] for i in holes]
    assert list(filled.logprobs) == [whole.logprobs[i] for i in holes]
    assert filled.diffusion.tokens_unmasked == whole.diffusion.tokens_unmasked == 6
    assert_nothing_left(llm)


@pytest.mark.parametrize(
    ("cache_method", "sampled"), [("none", {}), ("none", {"temperature": 1.5, "seed": 2, "top_k": 30}), ("es_dllm", {})]
)
def test_no_end_token_stands_where_something_given_follows(engines, tiny_llada, cache_method, sampled):
    llm = engines(tiny_llada, cache_method=cache_method)
    asked = {"block_length": 4, "ignore_eos": True} | sampled
    template = [None] * 6 + [11] + [None] * 6
    free = complete(llm, response_template=template, **asked)
    ends = sorted({*free.token_ids} - {11})[:300]
    held = complete(llm, response_template=template, stop_token_ids=ends, **asked)
    assert {*free.token_ids[:6]} <= {*ends}
    assert not {*held.token_ids[:7]} & {*ends}
    assert held.finish_reason == "length" or held.token_ids[-1] in ends
