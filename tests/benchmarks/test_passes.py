"""The instruments see an engine's dispatches, and leave nothing behind."""

import time

import pytest
from floor import PassShape
from passes import InnerTime, observed_step

from dllm_engine import DiffusionParams
from tests.support.engines import assert_nothing_left, runner_of

PROMPT, RESPONSE, BLOCK = 24, 16, 8
CANVAS = PROMPT + RESPONSE


def run_watched(llm, num_requests=2):
    seen = []
    params = DiffusionParams(gen_length=RESPONSE, block_length=BLOCK, ignore_eos=True)
    for i in range(num_requests):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": [5 + i] * PROMPT}, params)
    while llm.llm_engine.has_unfinished_requests():
        seen += observed_step(llm).passes
    assert_nothing_left(llm)
    return seen


def test_passes_are_seen_with_their_kinds_and_shapes(engines, tiny_llada):
    llm = engines(tiny_llada, cache_method="sparse")
    forward = runner_of(llm).denoiser.forward
    seen = run_watched(llm)
    assert [forward.kind for forward in seen] == (["whole"] * 2 + ["reuse"] * 6) * 2
    retained = (CANVAS - BLOCK) // 2
    assert seen[0].shape.requests == ((CANVAS, CANVAS),) * 2
    assert seen[2].shape.requests == ((BLOCK, retained + BLOCK),) * 2
    # One token of each request's block per step.
    assert [forward.shape.head_rows for forward in seen] == [2 * left for left in range(8, 0, -1)] * 2
    assert runner_of(llm).denoiser.forward == forward


def test_passes_that_keep_a_finished_block_are_updates(engines, tiny_sdar):
    seen = run_watched(engines(tiny_sdar, enable_prefix_caching=False))
    assert [forward.kind for forward in seen] == ["whole", *["reuse"] * 7, "update", *["reuse"] * 7]
    rows, keys = zip(*(forward.shape.requests[0] for forward in (seen[0], seen[1], seen[8])), strict=True)
    assert rows == (PROMPT + BLOCK, BLOCK, 2 * BLOCK)
    assert keys == (20, PROMPT + BLOCK, PROMPT + 3 * BLOCK // 2)


def test_rows_are_those_that_layers_compute(engines, tiny_llada):
    seen = run_watched(engines(tiny_llada, cache_method="dllm_cache"), num_requests=1)
    assert {forward.kind for forward in seen} == {"whole", "reuse", "update"}
    # Both layers recompute a quarter of the response, the first all of it.
    reuse = next(forward.shape for forward in seen if forward.kind == "reuse")
    assert reuse == PassShape(((RESPONSE * 5 // 8, CANVAS),), 7)


@pytest.mark.parametrize("method", ["none", "sparse"])
def test_time_in_the_model_is_part_of_a_dispatch(engines, tiny_llada, method):
    llm = engines(tiny_llada, cache_method=method)
    inner = InnerTime(llm)
    llm.llm_engine.add_request("one", {"prompt_token_ids": [5] * PROMPT}, DiffusionParams(gen_length=4, block_length=4))
    with inner.watching():
        start = time.perf_counter()
        llm.llm_engine.step()
        seconds, times = time.perf_counter() - start, inner.take()
        assert inner.take().model == 0
    assert times.model > 0
    assert times.statistics > 0
    assert times.model + times.statistics < seconds
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert inner.take().model == 0
    assert_nothing_left(llm)
