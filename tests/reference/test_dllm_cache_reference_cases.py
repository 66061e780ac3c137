"""``dllm_cache`` decodes exactly as dLLM-Cache's authors' code: tokens, order, and the rows each layer recomputed."""

import json

import pytest

from tests.support.engines import assert_nothing_left, generate
from tests.support.reference_cases import Case, reference_cases, request_fields

CASES = {case["name"]: case for method in ("dllm_cache_llada", "dllm_cache_dream") for case in reference_cases(method)}
DECISIVE_GAP = 1e-6
"""Rows whose similarity differs by less than this from that of the first row left out are rounding's choice."""


def cache_options(case: Case) -> dict:
    h = case["hyperparameters"]
    return {
        "prompt_refresh_interval": h["prompt_interval_steps"],
        "response_refresh_interval": h["gen_interval_steps"],
        "update_ratio": h["transfer_ratio"],
    }


def groups() -> dict[str, list[Case]]:
    """Cases that one engine can answer together."""
    together: dict[str, list[Case]] = {}
    for case in CASES.values():
        together.setdefault(f"{case['model']} {json.dumps(cache_options(case))}", []).append(case)
    return together


def ask(engines, checkpoints, cases: list[Case], *, only_first_row: bool = False):
    from dllm_engine import DiffusionParams

    llm = engines(
        checkpoints / cases[0]["model"],
        max_model_len=512,
        page_size=16,
        cache_method="dllm_cache",
        cache_options=cache_options(cases[0]),
    )
    rows = [(case, row) for case in cases for row in range(len(case["prompt_ids"])) if row == 0 or not only_first_row]
    outputs = generate(
        llm,
        [case["prompt_ids"][row] for case, row in rows],
        [DiffusionParams(**request_fields(case)) for case, _ in rows],
    )
    assert_nothing_left(llm)
    return [(case, row, output) for (case, row), output in zip(rows, outputs, strict=True)]


def assert_same(case: Case, row: int, output) -> None:
    prompt, canvas = case["prompt_ids"][row], case["output_ids"][row]
    figures = output.outputs[0].diffusion
    assert list(output.outputs[0].token_ids) == canvas[len(prompt) :], case["name"]
    assert figures.unmasked_per_step == [sorted(step[row]) for step in case["unmasked_per_step"]], case["name"]
    assert figures.forward_passes == case["num_forward_passes"], case["name"]
    assert len(figures.trace.get("updated_positions", [])) == num_adaptive(case), case["name"]
    if case.get("similarity_gap", 0) > DECISIVE_GAP:
        # Ours holds adaptive passes only; theirs names the pass, from 1, and the layer, from 0.
        expected: dict[int, list[list[int]]] = {}
        for update in case["adaptive_update_positions_first_steps"]:
            relative = update["gen_relative_indices"][row]
            expected.setdefault(update["forward"], []).append([len(prompt) + i for i in relative])
        assert figures.trace["updated_positions"][: len(expected)] == list(expected.values()), case["name"]


def num_adaptive(case: Case) -> int:
    """Passes in which the response is not due."""
    h = case["hyperparameters"]
    if not h["transfer_ratio"]:
        return 0
    return sum(n % h["gen_interval_steps"] != 0 for n in range(case["num_forward_passes"]))


def test_cases_include_some_whose_updated_rows_are_certain():
    certain = [name for name, case in CASES.items() if case.get("similarity_gap", 0) > DECISIVE_GAP]
    assert len(certain) == 9
    assert {case["model"] for name, case in CASES.items() if name in certain} == {"llada-tiny-a", "dream-tiny-a"}
    for name in certain:
        updates = CASES[name]["adaptive_update_positions_first_steps"]
        passes = sorted({update["forward"] for update in updates})
        assert passes == list(range(2, 2 + len(passes))), "the first adaptive passes"
        assert [update["layer"] for update in updates] == [1, 2, 3] * len(passes)


@pytest.mark.parametrize("key", groups())
def test_cases_of_one_engine_in_one_batch(engines, reference_checkpoints, key):
    for answer in ask(engines, reference_checkpoints, groups()[key]):
        assert_same(*answer)


@pytest.mark.parametrize("key", groups())
def test_one_case_of_each_engine_alone(engines, reference_checkpoints, key):
    for answer in ask(engines, reference_checkpoints, groups()[key][-1:], only_first_row=True):
        assert_same(*answer)
