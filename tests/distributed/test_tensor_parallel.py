"""Two tensor-parallel ranks give the tokens of one, in real worker processes under vLLM's executors."""

import pytest

from tests.support.engines import generate
from tests.support.reference_cases import reference_cases, request_fields
from tests.support.sharded import answer_sharded

pytestmark = pytest.mark.slow

MODELS = {"llada-tiny-a": "vanilla_llada", "dream-tiny-a": "vanilla_dream"}
# One request per policy and way of sampling; their noise must not depend on the number of ranks.
SAMPLED = [
    {"gen_length": 24, "temperature": 1.0, "seed": 7, "unmasking": policy, "ignore_eos": True, **filters}
    for policy in ("low_confidence", "random", "maskgit_plus", "entropy", "topk_margin", "origin")
    for filters in ({}, {"top_p": 0.9, "top_k": 20})
]


@pytest.mark.parametrize("backend", ["mp", "ray"])
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_give_the_tokens_of_one(engines, reference_checkpoints, model, backend):
    if backend == "ray":
        pytest.importorskip("ray")
    from dllm_engine import DiffusionParams

    cases = [case for case in reference_cases(MODELS[model]) if case["model"] == model]
    rows = [(case, row) for case in cases for row in range(len(case["prompt_ids"]))]
    requests = [{"prompt": case["prompt_ids"][row], "params": request_fields(case)} for case, row in rows]
    sampled = [{"prompt": cases[0]["prompt_ids"][0], "params": params} for params in SAMPLED]

    answers, _ = answer_sharded(reference_checkpoints / model, requests + sampled, backend=backend)

    for (case, row), answer in zip(rows, answers, strict=False):
        assert answer["tokens"] == case["output_ids"][row][len(case["prompt_ids"][row]) :], case["name"]
        assert answer["order"] == [sorted(step[row]) for step in case["unmasked_per_step"]], case["name"]
        assert answer["forward_passes"] == case["num_forward_passes"], case["name"]
    alone = engines(reference_checkpoints / model, max_model_len=512)
    expected = generate(alone, [r["prompt"] for r in sampled], [DiffusionParams(**r["params"]) for r in sampled])
    for params, answer, output in zip(SAMPLED, answers[len(rows) :], expected, strict=True):
        assert answer["tokens"] == list(output.outputs[0].token_ids), params


RULES: list[dict[str, float]] = [{}, {"threshold": 0.5}, {"factor": 2.0}, {"entropy_bound": 1.0}, {"margin": 0.4}]


@pytest.mark.parametrize(
    ("cache_method", "cache_options"), [("sparse", {"retention_ratio": 0.4}), ("freecache", {})], ids=str
)
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_retain_and_unmask_the_same_tokens_as_one(
    engines, reference_checkpoints, model, cache_method, cache_options
):
    from dllm_engine import DiffusionParams

    engine = {"cache_method": cache_method, "cache_options": cache_options, "page_size": 16}
    prompts = [case["prompt_ids"][0] for case in reference_cases(MODELS[model]) if case["model"] == model][::3]
    asked = [{"gen_length": 40, "block_length": 16, "ignore_eos": True} | RULES[i % 5] for i in range(len(prompts))]
    requests = [{"prompt": prompt, "params": params} for prompt, params in zip(prompts, asked, strict=True)]

    answers, _ = answer_sharded(reference_checkpoints / model, requests, **engine)

    alone = engines(reference_checkpoints / model, max_model_len=512, **engine)
    expected = generate(alone, prompts, [DiffusionParams(**params) for params in asked])
    for answer, output in zip(answers, expected, strict=True):
        figures = output.outputs[0].diffusion
        assert answer["retained"] == figures.retained_positions
        assert answer["tokens"] == list(output.outputs[0].token_ids)
        assert answer["order"] == figures.unmasked_per_step


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llada-tiny-a", {"indicator": "query"}),
        ("dream-tiny-a", {"indicator": "key"}),
        ("dream-tiny-a", {"indicator": "hidden_state", "retention_ratio": 0.4}),
    ],
)
def test_two_ranks_skip_the_same_rows_as_one(engines, reference_checkpoints, model, options):
    from dllm_engine import DiffusionParams

    engine = {"cache_method": "es_dllm", "cache_options": {"block_refresh_interval": 4} | options, "page_size": 16}
    prompts = [case["prompt_ids"][0] for case in reference_cases(MODELS[model]) if case["model"] == model][::3]
    params = {"gen_length": 40, "block_length": 16, "ignore_eos": True}
    requests = [{"prompt": prompt, "params": params} for prompt in prompts]

    answers, _ = answer_sharded(reference_checkpoints / model, requests, **engine)

    alone = generate(
        engines(reference_checkpoints / model, max_model_len=512, **engine), prompts, DiffusionParams(**params)
    )
    for answer, output in zip(answers, alone, strict=True):
        assert answer["tokens"] == list(output.outputs[0].token_ids)
        assert answer["selected"] == output.outputs[0].diffusion.selected_positions
        assert answer["retained"] == output.outputs[0].diffusion.retained_positions


def test_two_ranks_may_run_several_steps_per_dispatch(engines, reference_checkpoints):
    """Every rank plans the steps after the first by itself."""
    from dllm_engine import DiffusionParams

    model = "llada-tiny-a"
    engine = {"cache_method": "dllm_cache", "page_size": 16}
    prompts = [case["prompt_ids"][0] for case in reference_cases(MODELS[model]) if case["model"] == model][::3]
    asked = [{"gen_length": 40, "block_length": 16, "ignore_eos": True} | RULES[i % 5] for i in range(len(prompts))]
    requests = [{"prompt": prompt, "params": params} for prompt, params in zip(prompts, asked, strict=True)]

    answers, _ = answer_sharded(reference_checkpoints / model, requests, steps_per_dispatch=6, **engine)

    alone = engines(reference_checkpoints / model, max_model_len=512, **engine)
    expected = generate(alone, prompts, [DiffusionParams(**params) for params in asked])
    for answer, output in zip(answers, expected, strict=True):
        figures = output.outputs[0].diffusion
        assert answer["tokens"] == list(output.outputs[0].token_ids)
        assert answer["order"] == figures.unmasked_per_step
        assert answer["forward_passes"] == figures.forward_passes
