"""dKV-Cache in the engine decodes random requests as the plain version does, which is the authors' code."""

import pytest
import torch

from tests.oracles.dkv import plain_dkv
from tests.oracles.models import PlainModel
from tests.support.random_requests import assert_answers_as, random_requests
from tests.support.reference_cases import Case, reference_cases

SHORT_CASES = [
    case
    for family in ("llada", "dream")
    for case in reference_cases(f"dkv_{family}")
    if case["num_forward_passes"] <= 32 and len(case["prompt_ids"][0]) <= 17 and len(case["prompt_ids"]) == 1
]
ENGINES = [(1, 4, 2), (4, 1, 3), (8, 4, 5), (32, 1, 100)]
"""Page size, steps per dispatch, refresh interval."""


@pytest.mark.parametrize("case", SHORT_CASES, ids=lambda case: case["name"])
def test_the_plain_version_is_the_authors(case: Case, reference_checkpoints) -> None:
    torch.set_num_threads(1)
    h, (prompt,) = case["hyperparameters"], case["prompt_ids"]
    asked = {
        "gen_length": h["gen_length"],
        "block_length": h.get("block_length", h["gen_length"]),
        "steps": h["steps"],
        "unmasking": h.get("alg", "low_confidence"),
        "refresh_interval": h.get("cache_reloading_step") or h["cache_steps"],
    }
    run = plain_dkv(PlainModel(reference_checkpoints / case["model"]), prompt, **asked)
    assert prompt + run.tokens == case["output_ids"][0]
    assert run.order == [sorted(step[0]) for step in case["unmasked_per_step"]]
    theirs = [range(run.length) if rows is None else rows[0] for rows in case["computed_positions_per_step"]]
    assert run.computed == [list(rows) for rows in theirs]


@pytest.mark.parametrize("name", ["llada-tiny-a", "dream-tiny-a"])
def test_random_requests(engines, reference_checkpoints, name):
    torch.set_num_threads(1)
    checkpoint = reference_checkpoints / name
    model = PlainModel(checkpoint)
    compared = 0
    for number, (page_size, steps_per_dispatch, interval) in enumerate(ENGINES):
        settings = {"page_size": page_size, "steps_per_dispatch": steps_per_dispatch}
        llm = engines(checkpoint, cache_method="dkv", cache_options={"refresh_interval": interval}, **settings)

        def plain(prompt, asked, interval=interval):
            return plain_dkv(model, prompt, refresh_interval=interval, **asked)

        compared += assert_answers_as(llm, random_requests(number, 8, model.is_dream), plain)
    assert compared >= 20
