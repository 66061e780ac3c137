"""FreeCache in the engine decodes as the plain version does: tokens, order, and the positions fed in each pass."""

from typing import Any

import pytest
import torch

from tests.oracles.freecache import plain_freecache
from tests.oracles.models import PlainModel
from tests.support.engines import assert_nothing_left, generate, runner_of, scheduler_of

PAGE_SIZE = 16
MODELS = ["llada-tiny-a", "dream-tiny-a"]
# Prompts and blocks that end within a page, one block, a shorter last block, more than one token per step.
REQUESTS: list[dict[str, Any]] = [
    {"prompt": 12, "gen_length": 24, "block_length": 8, "steps": 24},
    {"prompt": 33, "gen_length": 16, "block_length": 16, "steps": 16},
    {"prompt": 6, "gen_length": 23, "block_length": 5, "steps": 12},
    {"prompt": 48, "gen_length": 32, "block_length": 16, "steps": 2},
    {"prompt": 1, "gen_length": 9, "block_length": 1, "steps": 9},
    {"prompt": 20, "gen_length": 24, "block_length": 8, "threshold": 0.5},
    {"prompt": 7, "gen_length": 12, "block_length": 12, "threshold": 0.3},
    {"prompt": 64, "gen_length": 20, "block_length": 7, "threshold": 1.0},
]


def prompt_of(request: dict[str, Any]) -> list[int]:
    return [(29 * i * i + 7 * i + 3 + request["gen_length"]) % 480 for i in range(request["prompt"])]


def params_of(request: dict[str, Any], unmasking: str):
    from dllm_engine import DiffusionParams

    fields = {name: value for name, value in request.items() if name != "prompt"}
    return DiffusionParams(**fields, unmasking=unmasking, ignore_eos=True)


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, reference_checkpoints):
    torch.set_num_threads(1)
    return reference_checkpoints / request.param


@pytest.fixture(params=[True, False], ids=["suffix", "block alone"])
def llm(request, engines, checkpoint):
    options = {"include_suffix": request.param}
    return engines(checkpoint, page_size=PAGE_SIZE, cache_method="freecache", cache_options=options)


def test_requests_decode_as_the_plain_version_does_together_and_alone(llm, checkpoint):
    model = PlainModel(checkpoint)
    include_suffix = llm.llm_engine.vllm_config.additional_config["dllm"]["cache_options"]["include_suffix"]
    for unmasking in ("maskgit_plus", "entropy") if model.is_dream else ("low_confidence",):
        requests = [r for r in REQUESTS if unmasking != "entropy" or "threshold" not in r]
        prompts, params = [prompt_of(r) for r in requests], [params_of(r, unmasking) for r in requests]
        together = generate(llm, prompts, params)
        for request, prompt, output in zip(requests, prompts, together, strict=True):
            (alone,) = generate(llm, [prompt], params_of(request, unmasking))
            how = {name: value for name, value in request.items() if name != "prompt"}
            expected = plain_freecache(model, prompt, **how, unmasking=unmasking, include_suffix=include_suffix)
            assert expected["closest"] > 1e-4, f"{request} is a coin toss; take another"
            whole = len(prompt) + request["gen_length"]
            computed = [None if len(fed) == whole else fed for fed in expected["computed"]]
            for answer in (output, alone):
                figures = answer.outputs[0].diffusion
                assert list(answer.outputs[0].token_ids) == expected["tokens"], request
                assert figures.unmasked_per_step == expected["order"], request
                assert figures.computed_positions == computed, request
                assert figures.tokens_computed == sum(map(len, expected["computed"])), request
        assert_nothing_left(llm)


def test_a_finished_block_is_appended_to_the_pages_in_the_next_ones_first_step(llm):
    layers, pages = len(runner_of(llm).model.layers), scheduler_of(llm).pages
    request = {"prompt": 17, "gen_length": 48, "block_length": 16, "steps": 48}
    llm.llm_engine.add_request("one", {"prompt_token_ids": prompt_of(request)}, params_of(request, "maskgit_plus"))
    held, reserved = [], []
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
        held.append(pages.num_allocated)
        reserved.append(pages.num_reserved)
    # 17, 33 and 49 tokens in pages of 16.
    assert held == [2 * layers] * 16 + [3 * layers] * 16 + [4 * layers] * 15 + [0]
    assert reserved[:-1] == [4 * layers] * 47
    figures = outputs[-1].outputs[0].diffusion
    assert [i for i, state in enumerate(figures.refresh_states) if state == "update"] == [0, 16, 32]
    assert figures.retained_positions == [[list(range(stop))] * layers for stop in (17, 33, 49)]
    assert_nothing_left(llm)
