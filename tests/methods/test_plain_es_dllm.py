"""ES-dLLM in the engine decodes random requests as the plain version does, which is the authors' code."""

from itertools import pairwise

import pytest
import torch

from tests.oracles.es_dllm import PlainESDLLM
from tests.oracles.models import PlainModel
from tests.support.engines import runner_of
from tests.support.random_requests import assert_answers_as, random_requests
from tests.support.reference_cases import Case, reference_cases

SHORT_CASES = [
    case
    for case in reference_cases("es_dllm_dream")
    if case["num_forward_passes"] <= 32 and len(case["prompt_ids"][0]) <= 17 and case["hyperparameters"]["use_kvcache"]
]
SCHEDULE = [[1, 0], [0.5, 0.25], [0.25, 0.5]]
ENGINES = [
    (4, 4, {"block_refresh_interval": 4, "prompt_refresh_interval": 16}),
    (8, 1, {"indicator": "query", "alpha": 0.3, "block_refresh_interval": 1000, "prompt_refresh_interval": 5}),
    (32, 4, {"indicator": "key", "keep_schedule": [[0.5, 0]], "prompt_refresh_interval": 1000}),
    (8, 1, {"indicator": "value", "alpha": 0.0, "keep_schedule": [[0.8, 0], [0.3, 0.9]]}),
    (8, 4, {"alpha": 0.0, "retention_ratio": 0.6, "update_delay": 0, "prompt_refresh_interval": 3}),
    (8, 1, {"indicator": "none", "retention_ratio": 0.4, "update_delay": 2}),
]
"""Page size, steps per dispatch, cache options."""
ENDS = [42, 74, 226, 316, 319, 409]
"""Tokens that the tiny models are quick to predict, as end tokens."""


@pytest.mark.parametrize("case", SHORT_CASES, ids=lambda case: case["name"])
def test_the_plain_version_is_the_authors(case: Case, reference_checkpoints) -> None:
    torch.set_num_threads(1)
    model = PlainModel(reference_checkpoints / case["model"])
    h, (prompt,) = case["hyperparameters"], case["prompt_ids"]
    plain = PlainESDLLM(
        model,
        prompt,
        indicator="none" if h["ESdLLM_mode"] is None else "hidden_state",
        alpha=h["importance_score_alpha"],
        keep_schedule=h["proportion_steps"],
        block_refresh_interval=h["block_update_freq"],
        prompt_refresh_interval=h["prompt_update_freq"],
        gen_length=h["gen_length"],
        block_length=h["block_length"],
        steps=h["gen_length"] // h["token_per_step"],
        threshold=h["threshold"],
        end_tokens=(model.config["eos_token_id"],) if h["delay_eos_generation"] else (),
    )
    run = plain.decode()
    assert prompt + run.tokens == case["output_ids"][0]
    assert run.order == [sorted(step[0]) for step in case["unmasked_per_step"]]
    assert [len(rows) for rows in run.computed] == case["forward_lengths"]
    theirs = [rows for (rows,) in case.get("es_selected_positions_first_skips", [])]
    # Theirs leaves out a cut that kept all it had.
    ours = [
        rows
        for cuts in plain.selected
        for before, rows in pairwise([None, *cuts])
        if before is None or len(rows) < len(before)
    ]
    assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize("name", ["llada-tiny-a", "dream-tiny-a"])
def test_random_requests(engines, reference_checkpoints, monkeypatch, name):
    torch.set_num_threads(1)
    checkpoint = reference_checkpoints / name
    model = PlainModel(checkpoint)
    compared = 0
    for number, (page_size, steps_per_dispatch, options) in enumerate(ENGINES):
        options = {"keep_schedule": SCHEDULE, "block_refresh_interval": 8} | options
        settings = {"page_size": page_size, "steps_per_dispatch": steps_per_dispatch, "cache_options": options}
        llm = engines(checkpoint, cache_method="es_dllm", **settings)
        monkeypatch.setattr(runner_of(llm), "end_tokens", torch.tensor(ENDS))
        # It measures plain probabilities; the other policies are not ES-dLLM's.
        requests = [
            (prompt, asked | {"unmasking": "low_confidence", "delay_eos": i % 2 == 0})
            for i, (prompt, asked) in enumerate(random_requests(number, 24, False))
            if "entropy_bound" not in asked and "margin" not in asked
        ]

        def plain(prompt, asked, options=options):
            asked = dict(asked)
            ends = tuple(ENDS) if asked.pop("delay_eos") else ()
            return PlainESDLLM(model, prompt, **options, **asked, end_tokens=ends).decode()

        compared += assert_answers_as(llm, requests[:12], plain)
    # Where fewer than two masked rows are left, which row is the second most confident is a tie.
    assert compared >= 12
