"""ES-dLLM decodes exactly as the authors' code: tokens, order, rows fed and rows kept by the first steps that skip."""

import json
from itertools import pairwise

import pytest

from tests.support.engines import assert_nothing_left, generate
from tests.support.reference_cases import Case, reference_cases

CASES = [case for method in ("es_dllm_llada", "es_dllm_dream") for case in reference_cases(method)]


def engine_options(case: Case) -> dict:
    h = case["hyperparameters"]
    if not h["use_kvcache"]:
        return {"cache_method": "none"}
    indicator = "none" if h["ESdLLM_mode"] is None else "hidden_state"
    options = {
        "indicator": indicator,
        "alpha": h["importance_score_alpha"],
        "keep_schedule": h["proportion_steps"],
        "prompt_refresh_interval": h["prompt_update_freq"],
        "block_refresh_interval": h["block_update_freq"],
    }
    return {"cache_method": "es_dllm", "cache_options": options}


def request_fields(case: Case) -> dict:
    h = case["hyperparameters"]
    fields = {name: h[name] for name in ("gen_length", "block_length", "threshold", "top_p", "top_k")}
    steps = h["gen_length"] // h["token_per_step"]
    return fields | {"steps": steps, "delay_eos": h["delay_eos_generation"], "ignore_eos": True}


def groups() -> dict[str, list[Case]]:
    """Cases that one engine can answer together."""
    together: dict[str, list[Case]] = {}
    for case in CASES:
        together.setdefault(f"{case['model']} {json.dumps(engine_options(case))}", []).append(case)
    return together


@pytest.fixture
def engine(engines, reference_checkpoints):
    def make(case: Case):
        folder = reference_checkpoints / case["model"]
        return engines(folder, max_model_len=512, page_size=16, **engine_options(case))

    return make


def assert_same(case: Case, output) -> None:
    (prompt,), (canvas,) = case["prompt_ids"], case["output_ids"]
    figures = output.outputs[0].diffusion
    assert list(output.outputs[0].token_ids) == canvas[len(prompt) :], case["name"]
    assert figures.unmasked_per_step == [sorted(step[0]) for step in case["unmasked_per_step"]], case["name"]
    assert figures.forward_passes == case["num_forward_passes"], case["name"]
    computed = [len(canvas) if rows is None else len(rows) for rows in figures.computed_positions]
    assert computed == case["forward_lengths"], case["name"]
    expected = [rows for (rows,) in case.get("es_selected_positions_first_skips", [])]
    assert selections(figures.selected_positions)[: len(expected)] == expected, case["name"]


def selections(selected_positions: list[list[list[int]]]) -> list[list[int]]:
    """What layers kept, one after the other; the authors' record leaves out a layer that kept all it had."""
    return [
        rows
        for layers in selected_positions
        for before, rows in pairwise([None, *layers])
        if before is None or len(rows) < len(before)
    ]


@pytest.mark.parametrize("key", groups())
def test_cases_of_one_engine_in_one_batch(engine, key):
    from dllm_engine import DiffusionParams

    cases = groups()[key]
    llm = engine(cases[0])
    outputs = generate(
        llm, [case["prompt_ids"][0] for case in cases], [DiffusionParams(**request_fields(case)) for case in cases]
    )
    for case, output in zip(cases, outputs, strict=True):
        assert_same(case, output)
    assert_nothing_left(llm)


@pytest.mark.parametrize("key", groups())
def test_one_case_of_each_engine_alone(engine, key):
    from dllm_engine import DiffusionParams

    case = groups()[key][-1]
    (output,) = generate(engine(case), case["prompt_ids"], DiffusionParams(**request_fields(case)))
    assert_same(case, output)
