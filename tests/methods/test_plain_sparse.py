"""Sparse-dLLM in the engine decodes random requests as the plain version does, which is the authors' code."""

import pytest
import torch

from tests.oracles.models import PlainModel
from tests.oracles.sparse import plain_sparse
from tests.support.random_requests import assert_answers_as, random_requests
from tests.support.reference_cases import Case, reference_cases

SHORT_CASES = [
    case
    for family in ("llada", "dream")
    for case in reference_cases(f"sparse_dllm_{family}")
    if case["num_forward_passes"] <= 16 and len(case["prompt_ids"][0]) <= 17
]
ENGINES = [
    (1, 4, {"retention_ratio": 0.5, "pool_kernel_size": 1}),
    (4, 1, {"retention_ratio": 1.0, "pool_kernel_size": 5, "update_delay": 2}),
    (8, 1, {"retention_ratio": 0.3, "pool_kernel_size": 3, "update_delay": 0}),
    (32, 4, {"retention_ratio": 0.7, "pool_kernel_size": 1, "update_delay": 0, "scope": "prefix"}),
    (8, 4, {"retention_ratio": 0.05, "pool_kernel_size": 99, "update_delay": 1}),
]
"""Page size, steps per dispatch, cache options."""


@pytest.mark.parametrize("case", SHORT_CASES, ids=lambda case: case["name"])
def test_the_plain_version_is_the_authors(case: Case, reference_checkpoints) -> None:
    torch.set_num_threads(1)
    h, (prompt,) = case["hyperparameters"], case["prompt_ids"]
    asked = {name: h[name] for name in ("gen_length", "block_length", "steps")}
    asked["unmasking"] = h.get("alg", "low_confidence")
    options = {"retention_ratio": h["keep_ratio"], "pool_kernel_size": h["kernel_size"]}
    run = plain_sparse(PlainModel(reference_checkpoints / case["model"]), prompt, **options, **asked)
    assert prompt + run.tokens == case["output_ids"][0]
    assert run.order == [sorted(step[0]) for step in case["unmasked_per_step"]]
    assert run.traces["retained_positions"] == [block["per_layer"] for block in case["retained_positions"]]


@pytest.mark.parametrize("name", ["llada-tiny-a", "dream-tiny-a"])
def test_random_requests(engines, reference_checkpoints, name):
    torch.set_num_threads(1)
    checkpoint = reference_checkpoints / name
    model = PlainModel(checkpoint)
    compared = 0
    for number, (page_size, steps_per_dispatch, options) in enumerate(ENGINES):
        settings = {"page_size": page_size, "steps_per_dispatch": steps_per_dispatch, "cache_options": options}
        llm = engines(checkpoint, cache_method="sparse", **settings)
        requests = random_requests(number, 8, model.is_dream)
        for prompt, asked in requests[::3]:
            asked["retention_ratio"] = options["retention_ratio"] / (2 + len(prompt) % 3)

        def plain(prompt, asked, options=options):
            return plain_sparse(model, prompt, **(options | asked))

        compared += assert_answers_as(llm, requests, plain)
    # Pooling makes neighbours equal, and a tie where the retained end is a coin toss.
    assert compared >= 20
