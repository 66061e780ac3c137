"""``return_order``: which forward pass committed each token, and its log-probability then."""

import pytest
from vllm.sampling_params import SamplingParams

from dllm_engine import DiffusionParams
from dllm_engine.families import LLADA
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.scheduler.options.resolve import resolve_decoding
from tests.support.engines import generate
from tests.support.tiny_checkpoints import EOS

PROMPT = [3, 1, 4, 1, 5, 9]
SETTINGS = {"gen_length": 16, "block_length": 8, "steps": 6, "ignore_eos": True, "return_order": True}
SAMPLED = {"temperature": 1.3, "top_p": 0.9, "seed": 3}


def complete(llm, **settings):
    return generate(llm, [PROMPT], DiffusionParams(**(SETTINGS | settings)))[0].outputs[0]


WHOLE_BLOCKS = {"gen_length": 18}
"""Nothing is decoded behind the response, for a model whose attention goes by blocks."""


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llada", {}), ("dream", {}), ("sdar", {"block_length": 4, "steps": 9} | WHOLE_BLOCKS), ("llada2", WHOLE_BLOCKS)],
)
def test_a_trainer_can_compute_the_logprobs_again_from_the_order(engines, request, family, settings):
    """Without a cache, or with an exact one, each pass sees what was committed before it and masks elsewhere, as a
    trainer's would."""
    llm = engines(request.getfixturevalue(f"tiny_{family}"), trace=False)
    completion = complete(llm, **SAMPLED, **settings)
    figures = completion.diffusion
    assert not figures.trace
    sequence = PROMPT + list(completion.token_ids)
    again = [0.0] * len(completion.token_ids)
    for number, committed in enumerate(figures.order, start=1):
        masked = [index for index, of_pass in enumerate(figures.committed_at) if of_pass >= number]
        found = dict(zip(masked, *llm.masked_logprobs([(sequence, [len(PROMPT) + i for i in masked])]), strict=True))
        for index in committed:
            again[index] = found[index]
    assert figures.committed_logprobs == pytest.approx(again, abs=1e-4)
    assert sorted(index for committed in figures.order for index in committed) == list(range(len(again)))


@pytest.mark.parametrize(
    ("cache_method", "settings"),
    [
        ("none", {"threshold": 0.02}),
        ("dual", {}),
        ("dkv", SAMPLED),
        ("es_dllm", {"block_length": 16}),
        ("delayed", {"entropy_threshold": 4.0, "block_add_threshold": 0.2}),
    ],
)
def test_it_is_what_trace_and_logprobs_say_and_changes_no_token(engines, tiny_llada, cache_method, settings):
    llm = engines(tiny_llada, cache_method=cache_method)
    completion = complete(llm, logprobs=0, **settings)
    assert complete(llm, return_order=None, **settings).token_ids == completion.token_ids
    figures = completion.diffusion
    traced = [[position - len(PROMPT) for position in passed] for passed in figures.unmasked_per_step]
    assert figures.order == traced
    of_tokens = zip(completion.token_ids, completion.logprobs, strict=True)
    assert figures.committed_logprobs == [logprobs[token].logprob for token, logprobs in of_tokens]
    alone = complete(llm, **settings)
    assert alone.logprobs is None
    assert alone.diffusion.committed_logprobs == pytest.approx(figures.committed_logprobs, abs=1e-5)


def test_who_does_not_ask_gets_nothing_beside_who_does(engines, tiny_llada):
    params = [DiffusionParams(**SETTINGS | {"return_order": asked}) for asked in (True, None)]
    asked, other = (output.outputs[0].diffusion for output in generate(engines(tiny_llada), [PROMPT] * 2, params))
    assert len(asked.committed_at) == 16
    assert (other.committed_at, other.committed_logprobs, other.order) == ([], [], [])
    assert "committed_at" not in other.to_json()


def test_it_ends_with_the_tokens(engines, tiny_llada):
    llm = engines(tiny_llada)
    whole = complete(llm)
    cut = complete(llm, stop_token_ids=[whole.token_ids[5]])
    assert len(cut.token_ids) <= 6
    assert cut.diffusion.committed_at == whole.diffusion.committed_at[: len(cut.token_ids)]


@pytest.mark.parametrize("return_given", [True, False])
def test_given_tokens_were_committed_by_no_pass(engines, tiny_llada, return_given):
    template = [7, None, None, 8, None, EOS, None, 9]
    settings = {"gen_length": None, "steps": None, "block_length": 4, "response_template": template}
    completion = complete(engines(tiny_llada), return_given=return_given, **settings)
    figures = completion.diffusion
    assert len(figures.committed_at) == len(completion.token_ids) == (8 if return_given else 4)
    given = [index for index, number in enumerate(figures.committed_at) if number == 0]
    assert given == ([0, 3, 5, 7] if return_given else [])
    assert all(figures.committed_logprobs[index] == 0 for index in given)
    filled = sorted(index for committed in figures.order for index in committed)
    assert filled == [i for i in range(len(completion.token_ids)) if i not in given]


def test_tokens_of_a_guide_have_no_logprob():
    guided = EngineOptions(guide_model="demo")
    with pytest.raises(InvalidRequestError, match=r"return_order=True: tokens of the guide .* guide_fallback='draft'"):
        resolve_decoding(SamplingParams(max_tokens=8, extra_args={"return_order": True}), 4, LLADA, guided)
    asked = {"return_order": True, "guide_fallback": "draft"}
    assert resolve_decoding(SamplingParams(max_tokens=8, extra_args=asked), 4, LLADA, guided).return_order
