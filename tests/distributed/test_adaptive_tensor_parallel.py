"""Two tensor-parallel ranks recompute, retain and hold what one does, for methods that decide per layer and head."""

import random

import pytest

from dllm_engine import DiffusionParams
from tests.support.engines import generate
from tests.support.sharded import assert_alike, two_ranks, watch_pages

pytestmark = pytest.mark.slow

MODELS = {"llada-tiny-a": 4, "dream-tiny-a": 2}
"""KV heads; each of two ranks has half of them."""
PAGE_SIZE, GEN_LENGTH, STEPS, NUM_LAYERS = 8, 24, 12, 4
PROMPTS = [(24, 0), (24, 1), (24, 3), (37, 1), (37, 3), (37, 6)]
"""Length and seed, of prompts whose closest decision is no matter of rounding: similarities of rows at the edge of an
update are 1e-5 apart at least, other numbers 8e-4 of themselves."""
INTERVALS = {"prompt_refresh_interval": 5, "response_refresh_interval": 3, "update_ratio": 0.25}
METHODS = {
    "dual": {"refresh": "near", "near_tokens": 4},
    "dkv": {"refresh_interval": 4},
    "dllm_cache": INTERVALS,
    "maskkv": INTERVALS | {"kv_budget": 12, "alpha": 0.0, "refresh_first_layer": True},
}


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(1000 * seed + length)
    return [draw.randrange(480) for _ in range(length)]


def pages_for(amount: int, per_page: int) -> int:
    return -(-amount // per_page)


def pages_of_a_rank(model: str, prompt_length: int, retained: list[list[list[int]]]) -> int:
    """Pages of ``maskkv`` after voting: of the rank whose heads retain more in all layers, and of features."""
    heads = MODELS[model] // 2
    counts = [[len(positions) for positions in layer] for layer in retained]
    most = max(sum(sum(layer[of_rank]) for layer in counts) for of_rank in (slice(heads), slice(heads, None)))
    kv = pages_for(most + NUM_LAYERS * GEN_LENGTH * heads, PAGE_SIZE * heads)
    # 128 numbers a row, 32 a head; none in the first layer.
    rows = GEN_LENGTH + (model == "dream-tiny-a")
    return kv + (NUM_LAYERS - 1) * pages_for(rows, 2 * PAGE_SIZE * heads * 32 // 128)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_do_what_one_does(engines, reference_checkpoints, model, method):
    prompts = [prompt_of(*drawn) for drawn in PROMPTS]
    params = DiffusionParams(
        gen_length=GEN_LENGTH, block_length=12, steps=STEPS, unmasking="maskgit_plus", ignore_eos=True
    )
    engine = {"cache_method": method, "cache_options": METHODS[method], "page_size": PAGE_SIZE}
    with two_ranks(reference_checkpoints / model, **engine) as sharded:
        pages = watch_pages(sharded)
        answers = generate(sharded, prompts, params)
    alone = generate(engines(reference_checkpoints / model, max_model_len=512, **engine), prompts, params)
    assert_alike(answers, alone, "trace", "tokens_computed")

    trace = alone[0].outputs[0].diffusion.trace
    assert ("updated_positions" in trace) == ("update_ratio" in METHODS[method])
    held_by_one_rank = 0
    if method == "maskkv":
        for prompt, output in zip(prompts, alone, strict=True):
            (of_all,) = output.outputs[0].diffusion.trace["retained_per_head"]
            assert {len(layer) for layer in of_all} == {MODELS[model]}
            held_by_one_rank += pages_of_a_rank(model, len(prompt), of_all)
            assert any(len({len(positions) for positions in layer}) > 1 for layer in of_all), "heads are alike"

    assert len(pages) == STEPS
    assert all(allocated <= reserved <= planned for planned, allocated, reserved in pages)
    assert pages[-1][1:] == (0, 0)
    if method == "maskkv":
        assert pages[0][1:] == (held_by_one_rank,) * 2, "what voting left free is given back"
        assert pages[0][0] > held_by_one_rank
        assert set(pages[1:-1]) == {(held_by_one_rank,) * 3}
    else:
        assert all(allocated == reserved for _, allocated, reserved in pages)
