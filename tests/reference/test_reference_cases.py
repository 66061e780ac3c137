"""The engine decodes exactly as the authors' code: the same tokens, unmasked in the same order."""

import pytest

from tests.support.engines import assert_nothing_left, generate
from tests.support.reference_cases import Case, reference_cases, request_fields

CASES = {case["name"]: case for method in ("vanilla_llada", "vanilla_dream") for case in reference_cases(method)}
MODELS = sorted({case["model"] for case in CASES.values()})


def requests_of(case: Case):
    """(prompt, response, positions unmasked per step) of each row of a case."""
    for row, prompt in enumerate(case["prompt_ids"]):
        response = case["output_ids"][row][len(prompt) :]
        yield prompt, response, [sorted(step[row]) for step in case["unmasked_per_step"]]


def submit(llm, cases: list[Case]):
    from dllm_engine import DiffusionParams

    rows = [(case, *row) for case in cases for row in requests_of(case)]
    outputs = generate(
        llm, [prompt for _, prompt, _, _ in rows], [DiffusionParams(**request_fields(c)) for c, *_ in rows]
    )
    return list(zip(rows, outputs, strict=True))


def assert_same(case: Case, prompt: list[int], response: list[int], order: list[list[int]], output) -> None:
    figures = output.outputs[0].diffusion
    assert list(output.outputs[0].token_ids) == response, case["name"]
    assert figures.unmasked_per_step == order, case["name"]
    assert figures.forward_passes == case["num_forward_passes"], case["name"]
    assert figures.denoising_steps == len(order)
    assert figures.tokens_unmasked == len(response)
    assert figures.tokens_computed == case["num_forward_passes"] * (len(prompt) + len(response))
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("name", CASES)
def test_case_alone(engines, reference_checkpoints, name):
    case = CASES[name]
    llm = engines(reference_checkpoints / case["model"], max_model_len=512)
    for row, output in submit(llm, [case]):
        assert_same(*row, output)


@pytest.mark.parametrize("model", MODELS)
def test_all_cases_of_a_model_in_one_batch(engines, reference_checkpoints, model):
    llm = engines(reference_checkpoints / model, max_model_len=512)
    for row, output in submit(llm, [case for case in CASES.values() if case["model"] == model]):
        assert_same(*row, output)
    assert_nothing_left(llm)


@pytest.mark.parametrize("model", MODELS)
def test_requests_that_queue_for_a_place_join_others_in_mid_block(engines, reference_checkpoints, model):
    cases = [case for case in CASES.values() if case["model"] == model][::2]
    llm = engines(reference_checkpoints / model, max_model_len=512, max_num_seqs=3)
    for row, output in submit(llm, cases):
        assert_same(*row, output)
    assert_nothing_left(llm)
