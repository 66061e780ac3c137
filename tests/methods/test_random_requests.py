"""Every cache method in the engine decodes random requests as its plain version does:
requests in all phases share a batch, nothing stale is read, and no page is lost."""

import random
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_engine.cache_methods import CACHE_METHODS
from dllm_engine.families import Attention
from dllm_engine.model_executor import head_chunks
from tests.oracles.decode import METHODS, decode
from tests.oracles.models import PlainModel
from tests.support.answers import Request
from tests.support.engines import runner_of
from tests.support.random_requests import (
    VALUES,
    assert_answers_as,
    between_blocks,
    by_blocks,
    in_certain_order,
    in_constraints,
    in_spans,
    noise_of,
    random_requests,
)

SCHEDULE = [[1, 0], [0.5, 0.25], [0.25, 0.5]]


ENGINES: dict[str, list[tuple[int, int, dict[str, Any]]]] = tomllib.loads(
    Path(__file__).with_name("random_engines.toml").read_text()
)
"""Page size, steps per dispatch, cache options."""
NUM_REQUESTS = {
    "es_dllm": 6,
    "none": 6,
    "prefix": 6,
    "dual": 6,
    "freecache": 6,
    "block": 8,
    "focus": 8,
}
"""Where the default is too few for each kind of request, or for enough that rounding
does not decide.
"""
END_TOKENS, TURN_ENDS = (42, 74, 226, 501), (316, 319, 409)
"""Tokens that the tiny models are quick to predict, and the one of their generation
configs.
"""
UNSUITED = {"entropy_bound", "margin", "entropy_threshold"}
"""Rules that measure other than the plain probabilities of ES-dLLM."""


def requests_of(
    method: str, number: int, options: dict[str, Any], model: PlainModel
) -> list[Request]:
    count = NUM_REQUESTS.get(method, 4)
    is_dream = model.is_dream
    if method == "es_dllm":
        # It measures plain probabilities; the other policies are not ES-dLLM's.
        requests = [
            (prompt, asked | {"unmasking": "low_confidence", "delay_eos": i % 2 == 0})
            for i, (prompt, asked) in enumerate(
                random_requests(number, 2 * count, False)
            )
            if not asked.keys() & UNSUITED
        ]
        return in_certain_order(in_spans(requests[:count], number), number)
    requests = random_requests(number, count, is_dream)
    if cache_block := options.get("cache_block_length"):
        drawn = random_requests(number, 8 * count, is_dream)
        requests = [
            (p, asked) for p, asked in drawn if cache_block % asked["block_length"] == 0
        ][:count]
    elif model.block_length:
        requests = between_blocks(requests)
    else:
        requests = in_spans(requests, number)
    requests = by_blocks(in_certain_order(requests, number), number)
    for _, asked in requests[2::4]:
        asked["delay_eos"] = True
    if method != "dkv":  # which feeds what an end token has given up once more
        for _, asked in requests[1::4]:
            asked |= {"stop_token_ids": [*END_TOKENS, *TURN_ENDS], "early_stop": True}
    if CACHE_METHODS[method].trims_suffix and not model.block_length:
        for number, (_, asked) in enumerate(requests[::3]):
            asked["suffix_blocks"] = number % 3
    if options.get("similarity") == "random":
        for i, (_, asked) in enumerate(requests):
            asked["seed"] = 5 + i
    if method in ("sparse", "maskkv"):
        for prompt, asked in requests[::3]:
            asked["retention_ratio"] = options.get("retention_ratio", 0.5) / (
                2 + len(prompt) % 3
            )
    return requests


MODELS: dict[Attention, list[str]] = {
    "full": [
        "llada-tiny-a",
        "dream-tiny-a",
        "llada-moe-tiny-a",
        "qwen3-diffusion-mdlm-tiny-a",
        "open-dcoder-tiny-a",
    ],
    "block_causal": [
        "sdar-tiny-a",
        "llada2-moe-tiny-a",
        "qwen2-diffusion-bd3lm-tiny-a",
        "fast-dllm-v2-tied-tiny-a",
    ],
    "causal": ["nemotron-labs-diffusion-tiny-a"],
}
SEEDS_BLOCKS = ("fast-dllm-v2-tied-tiny-a", "nemotron-labs-diffusion-tiny-a")
SUITED = [
    (method, name)
    for method in METHODS
    for kind in CACHE_METHODS[method].attention
    for name in MODELS[kind]
    # It keeps rows by the position that they predict.
    if method != "focus" or name not in SEEDS_BLOCKS
]


def plain_version(model: PlainModel, method: str, options: dict[str, Any]):
    """The plain version of a cache method, with the engine's random numbers."""

    def decoded(prompt: list[int], asked: dict[str, Any]):
        tokens, order = noise_of(asked.get("seed", 0), model.head.shape[0])
        return decode(
            model,
            prompt,
            method,
            options,
            **asked,
            order_noise=order,
            uniform=tokens if "temperature" in asked else None,
        )

    return decoded


@pytest.fixture
def engine(engines, reference_checkpoints, monkeypatch):
    """``engine(method, name, page_size, steps_per_dispatch, options)``, and its model
    as a plain one with its end tokens."""

    def make(
        method: str,
        name: str,
        page_size: int,
        steps_per_dispatch: int,
        options: dict[str, Any],
    ):
        model = PlainModel(reference_checkpoints / name)
        settings = {"page_size": page_size, "max_model_len": 128}
        model.end_tokens = END_TOKENS
        model.turn_ends = TURN_ENDS
        llm = engines.shared(
            reference_checkpoints / name,
            cache_method=method,
            cache_options=options,
            steps_per_dispatch=steps_per_dispatch,
            **settings,
        )
        denoiser = runner_of(llm).denoiser
        store = runner_of(llm).store
        end_tokens = torch.tensor(END_TOKENS, device=denoiser.rank.device)
        monkeypatch.setattr(
            denoiser, "rank", replace(denoiser.rank, end_tokens=end_tokens)
        )
        config = llm.llm_engine.vllm_config.model_config.hf_config
        monkeypatch.setattr(config, "eos_token_id", list(END_TOKENS))
        monkeypatch.setattr(
            config, "end_of_turn_token_id", list(TURN_ENDS), raising=False
        )
        for tensor in (
            "tokens",
            "masked",
        ):  # with so little room canvases move while others come and go
            monkeypatch.setattr(store, tensor, getattr(store, tensor)[:15].clone())
        store._begin()
        return llm, model

    return make


@pytest.mark.parametrize(("method", "name"), SUITED)
def test_random_requests(engine, method, name):
    """A method's first options with every model, the others with one each."""
    names = next(names for names in MODELS.values() if name in names)
    compared = asked = 0
    for number, (page_size, steps_per_dispatch, options) in enumerate(ENGINES[method]):
        if number and names[number % len(names)] != name:
            continue
        if method == "es_dllm":
            options = {"keep_schedule": SCHEDULE, "block_refresh_interval": 8} | options
        llm, model = engine(method, name, page_size, steps_per_dispatch, options)
        requests = requests_of(method, number, options, model)
        requests = in_constraints(requests, number, model.head.shape[0], model.mask)
        compared += assert_answers_as(
            llm, requests, plain_version(model, method, options)
        )
        asked += len(requests)
    # Where fewer than two masked rows are left, ES-dLLM's second most confident one is
    # a tie.
    assert compared >= asked * (0.05 if method == "es_dllm" else 0.6), (
        "most of these requests are decided by rounding; choose others"
    )


def sampled_requests(number: int, count: int, model: PlainModel) -> list[Request]:
    """With what keeps end tokens from being chosen too early, positions drawn by their
    confidences, and sampling.
    """
    draw = random.Random(number)
    requests = random_requests(number, count, model.is_dream)
    requests = (
        between_blocks(requests) if model.block_length else in_spans(requests, number)
    )
    for i, (_, asked) in enumerate(requests):
        tokens = [
            *draw.sample([*END_TOKENS, *TURN_ENDS], 2),
            *draw.sample(range(480), 3),
        ]
        asked |= draw.choice(
            [{}, {"logit_bias": {token: draw.uniform(-9, 9) for token in tokens}}]
        )
        asked |= draw.choice(
            [{}, {"min_tokens": draw.randrange(asked["gen_length"] + 1)}]
        )
        asked |= draw.choice(
            [{}, {"logits_eos_inf": True}, {"confidence_eos_eot_inf": True}]
        )
        asked["seed"] = i
        if not asked.keys() & {*VALUES, "slow_fast"}:
            if i % 2 and "confidence_eos_eot_inf" not in asked:
                asked |= {
                    "unmasking": "origin"
                    if model.is_dream and i % 4 == 1
                    else "random",
                    "temperature": 0.7,
                }
            elif draw.random() < 0.6:
                asked["alg_temp"] = draw.choice([0.02, 0.5])
        if draw.random() < 0.5:
            asked["stop_token_ids"] = [*END_TOKENS, *TURN_ENDS]
        # Of LLaDA's distributions the plain version tempers none.
        if draw.random() < 0.4 and (
            model.is_dream or asked["unmasking"] in ("low_confidence", "low_entropy")
        ):
            asked["temperature"] = draw.choice([0.4, 1.0])
            if model.block_length:
                asked |= draw.choice([{}, {"top_p": 0.9, "top_k": 7}])
    return in_constraints(requests, number, model.head.shape[0], model.mask)


@pytest.mark.parametrize(
    ("method", "name", "steps_per_dispatch", "options"),
    [
        ("none", "llada-tiny-a", 1, {}),
        ("none", "dream-tiny-a", 4, {}),
        ("dual", "llada-tiny-a", 4, {}),
        ("dual", "dream-tiny-a", 1, {}),
        ("sparse", "llada-tiny-a", 1, {"retention_ratio": 0.5, "pool_kernel_size": 1}),
        ("sparse", "dream-tiny-a", 4, {"retention_ratio": 0.5, "pool_kernel_size": 1}),
        ("block", "sdar-tiny-a", 4, {}),
    ],
)
def test_sampled_requests(
    engine, monkeypatch, method, name, steps_per_dispatch, options
):
    llm, model = engine(method, name, 8, steps_per_dispatch, options)
    if method == "none":  # logits of few rows at once
        monkeypatch.setattr(head_chunks, "MAX_LOGITS_PER_CHUNK", 5 * len(model.head))
    requests = sampled_requests(len(name) + steps_per_dispatch, 12, model)
    compared = assert_answers_as(llm, requests, plain_version(model, method, options))
    assert compared >= 0.6 * len(requests), (
        "most of these requests are decided by rounding; choose others"
    )


def test_every_method_is_among_them():
    assert set(ENGINES) == set(METHODS) == set(CACHE_METHODS)
