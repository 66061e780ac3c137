"""Block diffusion up to the end of the context, and responses that end before theirs."""

import pytest

from dllm_engine import DiffusionParams
from tests.support.engines import generate

CONTEXT = 61
"""No multiple of a block, of 4 tokens and of 8."""
ASKED = {"threshold": 0.5, "ignore_eos": True}


@pytest.fixture(params=["tiny_sdar", "tiny_llada2"])
def checkpoint(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    "settings", [{}, {"cache_method": "none"}, {"enable_chunked_prefill": False}], ids=["block", "none", "whole"]
)
def test_a_response_may_run_to_the_end_of_the_context(engines, checkpoint, settings):
    """Its last block is whole, beyond ``max_model_len``; the tokens are those of a longer context."""
    prompts = [[*range(length)] for length in (CONTEXT - 20, CONTEXT - 3, 5, CONTEXT - 1)]
    params = [DiffusionParams(gen_length=CONTEXT - len(prompt), **ASKED) for prompt in prompts]
    longer = [output.outputs[0].token_ids for output in generate(engines(checkpoint), prompts, params)]
    llm = engines(checkpoint, max_model_len=CONTEXT, **settings)
    outputs = [output.outputs[0] for output in generate(llm, prompts, params)]
    assert [output.token_ids for output in outputs] == longer
    assert [(len(tokens), output.finish_reason) for tokens, output in zip(longer, outputs, strict=True)] == [
        (20, "length"),
        (3, "length"),
        (CONTEXT - 5, "length"),
        (1, "length"),
    ]


def test_what_does_not_fit_the_context_is_refused_with_the_numbers(engines, checkpoint):
    llm = engines(checkpoint, max_model_len=CONTEXT)
    with pytest.raises(ValueError, match=rf"\(50 tokens\) and gen_length=12 .* max_model_len is {CONTEXT}"):
        generate(llm, [[*range(50)]], DiffusionParams(gen_length=12))
    with pytest.raises(ValueError, match=rf"need a canvas of 80, max_model_len is {CONTEXT}; lower block_length=40 or"):
        generate(llm, [[*range(50)]], DiffusionParams(gen_length=8, block_length=40))
