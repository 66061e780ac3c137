"""With a cache the engine decodes exactly as the authors' code: tokens, order, what a step computed and retained."""

import json

import pytest

from tests.support.engines import assert_nothing_left, generate
from tests.support.reference_cases import Case, reference_cases

METHODS = (
    "fast_dllm_llada",
    "fast_dllm_dream",
    "sparse_dllm_llada",
    "sparse_dllm_dream",
    "dkv_llada",
    "dkv_dream",
)
PER_STEP = ("unmasked_per_step", "computed_positions_per_step")
ENGINE = {"max_model_len": 512, "page_size": 16}


def rows_of(case: Case) -> list[Case]:
    """A case per row of the authors' batch, each with its own entry of every step (None: the whole canvas)."""
    return [
        case
        | {name: [case[name][row]] for name in ("prompt_ids", "output_ids")}
        | {name: [None if step is None else [step[row]] for step in case[name]] for name in PER_STEP if name in case}
        for row in range(len(case["prompt_ids"]))
    ]


CASES = [row for method in METHODS for case in reference_cases(method) for row in rows_of(case)]


def engine_options(case: Case) -> dict:
    h = case["hyperparameters"]
    if case["name"].startswith("fast"):
        return {"cache_method": h["cache"], "cache_options": {}}
    if case["name"].startswith("dkv"):
        return {
            "cache_method": "dkv",
            "cache_options": {"refresh_interval": h.get("cache_reloading_step") or h["cache_steps"]},
        }
    return {
        "cache_method": "sparse",
        "cache_options": {
            "retention_ratio": h["keep_ratio"],
            "pool_kernel_size": h["kernel_size"],
            "update_delay": 1,
        },
    }


def request_fields(case: Case) -> dict:
    h = case["hyperparameters"]
    # Fast-dLLM's name for unmasking by threshold on Dream; its confidence is maskgit_plus's.
    policy = {None: None, "confidence_threshold": "maskgit_plus"}.get(h.get("alg"), h.get("alg"))
    fields = {
        "gen_length": h["gen_length"],
        "block_length": h.get("block_length", h["gen_length"]),
        "steps": h["steps"],
    }
    optional = {name: h[name] for name in ("threshold", "top_p", "top_k") if h.get(name) is not None}
    return fields | optional | {"unmasking": policy, "ignore_eos": True}


def groups() -> dict[str, list[Case]]:
    """Cases that one engine can answer together."""
    together: dict[str, list[Case]] = {}
    for case in CASES:
        key = f"{case['model']} {json.dumps(engine_options(case))}"
        together.setdefault(key, []).append(case)
    return together


def assert_same(case: Case, output) -> None:
    (prompt,), (canvas,) = case["prompt_ids"], case["output_ids"]
    figures = output.outputs[0].diffusion
    assert list(output.outputs[0].token_ids) == canvas[len(prompt) :], case["name"]
    order = [sorted(step[0]) for step in case["unmasked_per_step"]]
    if case["hyperparameters"].get("threshold") is None or case["hyperparameters"].get("alg") == "entropy":
        assert figures.unmasked_per_step == order, case["name"]
        assert figures.forward_passes == case["num_forward_passes"], case["name"]
        computed = [len(canvas) if rows is None else len(rows) for rows in figures.computed_positions]
        assert computed == case["forward_lengths"], case["name"]
        assert figures.tokens_computed == sum(case["forward_lengths"]), case["name"]
        if "computed_positions_per_step" in case:
            positions = [None if step is None else step[0] for step in case["computed_positions_per_step"]]
            assert figures.computed_positions == positions, case["name"]
    else:
        # The authors' code makes a forward that unmasks nothing where the first one completed the block.
        assert [step for step in figures.unmasked_per_step if step] == [step for step in order if step], case["name"]
        assert figures.forward_passes <= case["num_forward_passes"], case["name"]
    if "retained_positions" in case:
        expected = [block["per_layer"] for block in case["retained_positions"]]
        assert figures.retained_positions == expected, case["name"]


@pytest.mark.parametrize("key", groups())
def test_cases_of_one_engine_in_one_batch(engines, reference_checkpoints, key):
    from dllm_engine import DiffusionParams

    cases = groups()[key]
    llm = engines(reference_checkpoints / cases[0]["model"], **ENGINE, **engine_options(cases[0]))
    outputs = generate(
        llm, [case["prompt_ids"][0] for case in cases], [DiffusionParams(**request_fields(case)) for case in cases]
    )
    for case, output in zip(cases, outputs, strict=True):
        assert_same(case, output)
    assert_nothing_left(llm)


@pytest.mark.parametrize("key", groups())
def test_one_case_of_each_engine_alone(engines, reference_checkpoints, key):
    from dllm_engine import DiffusionParams

    case = groups()[key][-1]
    llm = engines(reference_checkpoints / case["model"], **ENGINE, **engine_options(case))
    (output,) = generate(llm, case["prompt_ids"], DiffusionParams(**request_fields(case)))
    assert_same(case, output)
