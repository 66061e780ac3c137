"""Fast-dLLM's caches in the engine decode random requests as the plain version does, which is the authors' code."""

import pytest
import torch

from tests.oracles.fast_dllm import plain_fast_dllm
from tests.oracles.models import PlainModel
from tests.support.random_requests import assert_answers_as, random_requests
from tests.support.reference_cases import Case, reference_cases

SHORT_CASES = [
    case
    for family in ("llada", "dream")
    for case in reference_cases(f"fast_dllm_{family}")
    if case["hyperparameters"]["cache"] != "none"
    and case["num_forward_passes"] <= 32
    and len(case["prompt_ids"][0]) <= 17
]


@pytest.fixture(scope="module", params=["llada-tiny-a", "dream-tiny-a"])
def checkpoint(request, reference_checkpoints):
    torch.set_num_threads(1)
    return reference_checkpoints / request.param


@pytest.mark.parametrize("case", SHORT_CASES, ids=lambda case: case["name"])
def test_the_plain_version_is_the_authors(case: Case, reference_checkpoints) -> None:
    torch.set_num_threads(1)
    h, (prompt,) = case["hyperparameters"], case["prompt_ids"]
    asked = {name: h[name] for name in ("gen_length", "block_length", "steps", "threshold")}
    asked["unmasking"] = "entropy" if h.get("alg") == "entropy" else "low_confidence"
    run = plain_fast_dllm(PlainModel(reference_checkpoints / case["model"]), prompt, h["cache"], **asked)
    assert prompt + run.tokens == case["output_ids"][0]
    # Theirs makes a pass that unmasks nothing where the first one completed the block.
    theirs = [sorted(step[0]) for step in case["unmasked_per_step"]]
    assert [step for step in run.order if step] == [step for step in theirs if step]


@pytest.mark.parametrize(("cache", "page_size", "steps_per_dispatch"), [("prefix", 4, 4), ("dual", 8, 1)])
def test_random_requests(engines, checkpoint, cache, page_size, steps_per_dispatch):
    model = PlainModel(checkpoint)
    llm = engines(checkpoint, cache_method=cache, page_size=page_size, steps_per_dispatch=steps_per_dispatch)
    requests = random_requests(page_size, 16, model.is_dream)
    compared = assert_answers_as(llm, requests, lambda prompt, asked: plain_fast_dllm(model, prompt, cache, **asked))
    assert compared >= 10
