"""MaskKV in the engine against the plain MaskKV, which was written from the paper alone."""

import random
from typing import Any

import pytest
import torch

from tests.engines import assert_nothing_left, generate, runner_of, scheduler_of
from tests.plain_maskkv import plain_maskkv
from tests.plain_reference import PlainModel

PROFILE = [0.3, 0.1, 0.1, 0.5]
REFRESHES = {"prompt_refresh_interval": 6, "response_refresh_interval": 3, "update_ratio": 0.25}
BUDGETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "profile": {"profile": PROFILE},
    "even": {"layer_budget": "uniform", "head_budget": "uniform"},
    "exact": {"profile": PROFILE, "redistribute": True},
    "first layer": {"refresh_first_layer": True, "profile": PROFILE},
    "response alone": {"prompt_refresh_interval": 100, "response_refresh_interval": 1},
    "prompt alone": {"prompt_refresh_interval": 2, "response_refresh_interval": 5, "update_ratio": 0.0},
}
LENGTHS = [(24, 16, 8, 8), (37, 12, 12, 12), (50, 20, 8, 10), (9, 8, 4, 8)]
"""Prompt, response, block, steps."""
MODELS = ["llada-tiny-a", "dream-tiny-a"]


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed + length)
    return [draw.randrange(480) for _ in range(length)]


@pytest.fixture
def engine(engines, reference_checkpoints):
    def make(model="llada-tiny-a", kv_budget=12, **options):
        options = REFRESHES | {"kv_budget": kv_budget} | options
        return engines(
            reference_checkpoints / model, page_size=8, max_model_len=128, cache_method="maskkv", cache_options=options
        )

    return make


@pytest.fixture(scope="module")
def plain_models(reference_checkpoints):
    return {name: PlainModel(reference_checkpoints / name) for name in MODELS}


def ask(llm, prompts, lengths, **fields):
    from dllm_engine import DiffusionParams

    params = [
        DiffusionParams(gen_length=g, block_length=b, steps=s, unmasking="maskgit_plus", ignore_eos=True, **fields)
        for _, g, b, s in lengths
    ]
    return generate(llm, prompts, params)


def expected(model: PlainModel, case: tuple[int, int, int, int], options: dict[str, Any], kv_budget: int = 12):
    """What the plain MaskKV decodes; its names of the options are the engine's but one."""
    options = dict(REFRESHES | options)
    first = options.pop("refresh_first_layer", False)
    length, gen_length, block_length, steps = case
    return plain_maskkv(
        model,
        prompt(length),
        gen_length=gen_length,
        block_length=block_length,
        steps=steps,
        kv_budget=kv_budget,
        unmasking="maskgit_plus" if model.is_dream else "low_confidence",
        first_layer_always=first,
        **options,
    )


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("model", MODELS)
def test_engine_decodes_as_the_plain_maskkv_does(engine, plain_models, model, name):
    options = BUDGETS[name]
    outputs = ask(engine(model, **options), [prompt(case[0]) for case in LENGTHS], LENGTHS)
    compared = 0
    for case, output in zip(LENGTHS, outputs, strict=True):
        plain = expected(plain_models[model], case, options)
        # A decision between numbers this close is rounding's, not the method's.
        if plain["closest"] < 1e-4 or plain["closest_vote"] < 1e-5 or plain["closest_share"] < 1e-4:
            continue
        figures = output.outputs[0].diffusion
        assert list(output.outputs[0].token_ids) == plain["tokens"], case
        assert [step for step in figures.unmasked_per_step if step] == [step for step in plain["order"] if step]
        assert figures.trace["retained_per_head"] == [plain["retained"]]
        updated = [[rows for _, rows in sorted(layers.items())] for _, layers in sorted(plain["updated"].items())]
        assert figures.trace.get("updated_positions", []) == updated
        compared += 1
    assert compared >= 2, "the cases decide by rounding; choose others"


def test_a_request_may_enter_while_others_adapt(engine):
    from dllm_engine import DiffusionParams

    llm = engine()
    params = DiffusionParams(gen_length=16, block_length=8, unmasking="maskgit_plus", ignore_eos=True)
    prompts = [prompt(length) for length in (24, 37, 50)]
    alone = [list(generate(llm, [ids], params)[0].outputs[0].token_ids) for ids in prompts]
    found = {}
    for i, ids in enumerate(prompts):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": ids}, params)
        for _ in range(2):  # its first pass meets adaptive ones
            llm.llm_engine.step()
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            found[int(output.request_id)] = list(output.outputs[0].token_ids)
    assert [found[i] for i in range(3)] == alone
    assert_nothing_left(llm)
