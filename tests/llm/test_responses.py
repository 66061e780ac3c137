"""Where a response ends, and what a request that leaves things open gets."""

from functools import partial
from typing import Any

import pytest
from vllm import SamplingParams

from dllm_engine import DiffusionParams
from tests.support import tiny_checkpoints
from tests.support.engines import completion_of, generate, responses

PROMPT = [3, 1, 4, 1, 5, 9]
complete = partial(completion_of, prompt=PROMPT, gen_length=32, block_length=8)


@pytest.fixture(scope="module")
def full(engines, tiny_llada) -> list[int]:
    """The response nothing ends."""
    return list(complete(engines(tiny_llada), ignore_eos=True).token_ids)


@pytest.fixture(scope="module")
def cut(full) -> int:
    """Where a token appears for the first time, inside the second block."""
    return next(i for i in range(9, 15) if full[i] not in full[:i])


@pytest.mark.parametrize(
    "stated",
    [
        lambda end: {"eos_token_id": end},
        lambda end: {"eos_token_id": [149, end]},
        lambda end: {"end_of_turn_token_id": end},
    ],
    ids=["the end token", "one of several", "that of a turn"],
)
def test_a_response_ends_at_the_end_token_of_a_finished_block(
    engines, tmp_path, full, cut, stated
):
    llm = engines(tiny_checkpoints.write("llada", tmp_path, **stated(full[cut])))
    completion = complete(llm)
    assert (list(completion.token_ids), completion.finish_reason) == (
        full[: cut + 1],
        "stop",
    )
    assert completion.diffusion.forward_passes == 16, (
        "the blocks behind it are not computed"
    )
    whole = complete(llm, ignore_eos=True)
    assert (
        list(whole.token_ids),
        whole.finish_reason,
        whole.diffusion.forward_passes,
    ) == (full, "length", 32)


def test_stop_token_ends_and_is_named(engines, tiny_llada, full, cut):
    completion = complete(
        engines(tiny_llada), stop_token_ids=[full[cut]], ignore_eos=True
    )
    assert list(completion.token_ids) == full[: cut + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", full[cut])


@pytest.mark.parametrize(
    ("prompt_length", "max_model_len", "expected"), [(6, 512, 256), (28, 128, 100)]
)
def test_a_length_that_is_left_open_is_256_or_what_fits(
    engines, tmp_path, prompt_length, max_model_len, expected
):
    llm = engines(
        tiny_checkpoints.write("llada", tmp_path, max_sequence_length=512),
        max_model_len=max_model_len,
    )
    prompt = [7] * prompt_length
    own = DiffusionParams(ignore_eos=True, steps=8)
    plain = SamplingParams(
        max_tokens=None, temperature=0, ignore_eos=True, extra_args={"steps": 8}
    )
    for params in (own, plain):
        assert len(responses(llm, [prompt], params)[0]) == expected
    figures = (
        generate(llm, [prompt], None)[0].outputs[0].diffusion
    )  # ends where the model does
    assert figures.tokens_computed == figures.forward_passes * (
        prompt_length + expected
    )


def test_stop_string_ends_before_it(demo):
    prompt = demo.get_tokenizer().encode("User: codes: Tom=48; Ida=07. Give Ida\nBot:")
    ask = partial(complete, demo, prompt=prompt, ignore_eos=True)
    whole = ask().text
    stop = whole[2:4]
    completion = ask(stop=[stop])
    assert completion.text == whole[: whole.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    kept = ask(stop=[stop], include_stop_str_in_output=True)
    assert kept.text == whole[: whole.index(stop) + len(stop)]


# Block diffusion up to the end of the context


CONTEXT = 61
"""No multiple of a block, of 4 tokens and of 8."""
TO_THE_END: dict[str, Any] = {"threshold": 0.5, "ignore_eos": True}


@pytest.fixture(params=["tiny_sdar", "tiny_llada2"])
def checkpoint(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    "settings",
    [{}, {"cache_method": "none"}, {"enable_chunked_prefill": False}],
    ids=["block", "none", "whole"],
)
def test_a_response_may_run_to_the_end_of_the_context(engines, checkpoint, settings):
    """Its last block is whole, beyond ``max_model_len``; the tokens are those of a
    longer context.
    """
    prompts = [
        [*range(length)] for length in (CONTEXT - 20, CONTEXT - 3, 5, CONTEXT - 1)
    ]
    params = [
        DiffusionParams(gen_length=CONTEXT - len(prompt), **TO_THE_END)
        for prompt in prompts
    ]
    longer = responses(engines(checkpoint), prompts, params)
    llm = engines(checkpoint, max_model_len=CONTEXT, **settings)
    outputs = [output.outputs[0] for output in generate(llm, prompts, params)]
    assert [list(output.token_ids) for output in outputs] == longer
    assert [len(tokens) for tokens in longer] == [20, 3, CONTEXT - 5, 1]
    assert {output.finish_reason for output in outputs} == {"length"}


def test_what_does_not_fit_the_context_is_refused_with_the_numbers(engines, checkpoint):
    llm = engines(checkpoint, max_model_len=CONTEXT)
    with pytest.raises(
        ValueError,
        match=rf"need a canvas of 80, max_model_len is {CONTEXT}; lower block_length=40 or",
    ):
        generate(llm, [[*range(50)]], DiffusionParams(gen_length=8, block_length=40))
