"""What keeps end tokens from being chosen too early, and positions drawn by their confidences: as the plain version
does, in every rule, with sampling, constraints and templates, alone and in a batch."""

import random
from typing import Any

import pytest
import torch

from tests.oracles.decode import decode
from tests.oracles.models import PlainModel
from tests.support.random_requests import (
    VALUES,
    Request,
    assert_answers_as,
    between_blocks,
    in_constraints,
    in_spans,
    noise_of,
    random_requests,
)

END_TOKENS, TURN_ENDS = (42, 74, 226, 501), (316, 319, 409)
"""Tokens that the tiny models are quick to predict, and the one of their generation configs."""
ENDS = [*END_TOKENS, *TURN_ENDS]
ENGINES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("none", "llada-tiny-a", 1, {}),
    ("none", "dream-tiny-a", 4, {}),
    ("dual", "llada-tiny-a", 4, {}),
    ("dual", "dream-tiny-a", 1, {}),
    ("sparse", "llada-tiny-a", 1, {"retention_ratio": 0.5, "pool_kernel_size": 1}),
    ("sparse", "dream-tiny-a", 4, {"retention_ratio": 0.5, "pool_kernel_size": 1}),
    ("block", "sdar-tiny-a", 4, {}),
]
COUNT = 24


def requests_of(number: int, model: PlainModel) -> list[Request]:
    draw, requests = random.Random(number), random_requests(number, COUNT, model.is_dream)
    requests = between_blocks(requests) if model.block_length else in_spans(requests, number)
    for i, (_, asked) in enumerate(requests):
        tokens = [*draw.sample(ENDS, 2), *draw.sample(range(480), 3)]
        asked |= draw.choice([{}, {"logit_bias": {token: draw.uniform(-9, 9) for token in tokens}}])
        asked |= draw.choice([{}, {"min_tokens": draw.randrange(asked["gen_length"] + 1)}])
        asked |= draw.choice([{}, {"logits_eos_inf": True}, {"confidence_eos_eot_inf": True}])
        asked["seed"] = i
        if not asked.keys() & {*VALUES, "slow_fast"} and draw.random() < 0.6:
            asked["alg_temp"] = draw.choice([0.02, 0.5])
        if draw.random() < 0.5:
            asked["stop_token_ids"] = ENDS
        # Of LLaDA's distributions the plain version tempers none.
        if draw.random() < 0.4 and (model.is_dream or asked["unmasking"] in ("low_confidence", "low_entropy")):
            asked["temperature"] = draw.choice([0.4, 1.0])
    return in_constraints(requests, number, model.head.shape[0], model.mask)


@pytest.mark.parametrize("number", range(len(ENGINES)))
def test_random_requests(engines, reference_checkpoints, monkeypatch, number):
    torch.set_num_threads(1)
    method, name, steps_per_dispatch, options = ENGINES[number]
    model = PlainModel(reference_checkpoints / name)
    llm = engines.shared(
        reference_checkpoints / name,
        cache_method=method,
        cache_options=options,
        page_size=8,
        steps_per_dispatch=steps_per_dispatch,
    )
    model.end_tokens, model.turn_ends = END_TOKENS, TURN_ENDS
    config = llm.llm_engine.vllm_config.model_config.hf_config
    monkeypatch.setattr(config, "eos_token_id", list(END_TOKENS))
    monkeypatch.setattr(config, "end_of_turn_token_id", list(TURN_ENDS), raising=False)

    def plain(prompt: list[int], asked: dict[str, Any]):
        tokens, order = noise_of(asked["seed"], model.head.shape[0])
        return decode(
            model,
            prompt,
            method,
            options,
            **asked,
            order_noise=order,
            uniform=tokens if "temperature" in asked else None,
        )

    compared = assert_answers_as(llm, requests_of(number, model), plain)
    assert compared >= 0.6 * COUNT, "most of these requests are decided by rounding; choose others"
