"""Floors are of the shapes that steps have."""

import time
from collections import Counter

import pytest
from floor import Floor, PassShape, attended_keys
from passes import inner_times, observed_step

from dllm_engine import DiffusionParams
from dllm_engine.cache_methods import CACHE_METHODS
from dllm_engine.families import LLADA
from dllm_engine.options import EngineOptions
from tests.support.engines import assert_nothing_left, runner_of
from tests.support.plans import resolved, spec_of

PROMPT, RESPONSE, BLOCK = 40, 16, 8
CANVAS = PROMPT + RESPONSE
ATTENTION = ("qkv_proj", "out_proj")
MLP = ("mlp.gate_up_proj", "mlp.down_proj")
EXPERTS = ("mlp",)


def plan_of(method: str, step: int, **cache_options):
    engine = EngineOptions(cache_method=method, cache_options=cache_options)
    spec = resolved(LLADA, engine, PROMPT, gen_length=RESPONSE, block_length=BLOCK)
    return [plan for plan, _ in CACHE_METHODS[method].steps(spec)][step]


@pytest.mark.parametrize(
    ("method", "options", "step", "rows", "keys"),
    [
        ("none", {}, 3, CANVAS, CANVAS),
        ("prefix", {}, 3, RESPONSE, CANVAS),
        ("dual", {}, 3, BLOCK, CANVAS),
        ("sparse", {"retention_ratio": 0.5}, 3, BLOCK, (CANVAS - BLOCK) // 2 + BLOCK),
        ("dkv", {}, 3, 6, CANVAS),
        ("dllm_cache", {}, 3, 4, CANVAS),
        ("maskkv", {"kv_budget": 10}, 3, 4, 10 + RESPONSE),
        ("es_dllm", {}, 3, 5, CANVAS),
        ("es_dllm", {"retention_ratio": 0.5}, 3, 5, (CANVAS - BLOCK) // 2 + BLOCK),
        ("freecache", {}, 3, RESPONSE, CANVAS),
        ("freecache", {"include_suffix": False}, 3, BLOCK, PROMPT + BLOCK),
    ],
)
def test_keys_are_those_that_a_row_attends_to(method, options, step, rows, keys):
    assert attended_keys(plan_of(method, step, **options), rows, CANVAS) == keys


def test_where_attention_goes_by_blocks_keys_are_a_mean_over_the_rows():
    spec = spec_of(
        prompt_length=10,
        gen_length=6,
        block_length=4,
        attention="block_causal",
        steps=6,
        cache=CACHE_METHODS["block"].options(),
    )
    plans = [plan for plan, _ in CACHE_METHODS["block"].steps(spec)]
    seen = [
        (
            plan.max_rows,
            attended_keys(plan, plan.max_rows, spec.layout.canvas_length, 4),
        )
        for plan in plans
    ]
    assert seen == [(12, 8), (4, 12), (8, 14), *[(4, 16)] * 3]


@pytest.mark.parametrize("family", ["llada", "llada_moe", "dream"])
def test_a_floor_runs_each_linear_layer_once_on_all_rows(
    engines, request, family, monkeypatch
):
    model = runner_of(engines(request.getfixturevalue(f"tiny_{family}"))).model
    rows_of = Counter()
    names = []
    for i, layer in enumerate(model.layers):
        for part in (
            *ATTENTION,
            *(MLP if hasattr(layer.mlp, "down_proj") else EXPERTS),
        ):
            names.append(f"{i}.{part}")

            def count(_, inputs, name=names[-1]):
                rows_of[name, len(inputs[0])] += 1

            request.addfinalizer(
                layer.get_submodule(part).register_forward_pre_hook(count).remove
            )
    head = model.lm_head.quant_method
    apply = head.apply
    monkeypatch.setattr(
        head,
        "apply",
        lambda of, x, *rest: rows_of.update([("head", len(x))]) or apply(of, x, *rest),
    )
    Floor(model, PassShape(((8, 56), (8, 56), (56, 56)), head_rows=5)).run()
    assert rows_of == dict.fromkeys([*((name, 72) for name in names), ("head", 5)], 1)


# The instruments see an engine's dispatches, and leave nothing behind


SHORT = 24
"""Tokens of a prompt."""
SHORT_CANVAS = SHORT + RESPONSE


def run_watched(llm, num_requests=2):
    seen = []
    params = DiffusionParams(gen_length=RESPONSE, block_length=BLOCK, ignore_eos=True)
    for i in range(num_requests):
        llm.llm_engine.add_request(
            str(i), {"prompt_token_ids": [5 + i] * SHORT}, params
        )
    while llm.llm_engine.has_unfinished_requests():
        seen += observed_step(llm).passes
    assert_nothing_left(llm)
    return seen


def test_passes_are_seen_with_their_kinds_and_shapes(engines, tiny_llada):
    llm = engines(tiny_llada, cache_method="sparse")
    forward = runner_of(llm).denoiser.forward
    seen = run_watched(llm)
    assert [forward.kind for forward in seen] == (["whole"] * 2 + ["reuse"] * 6) * 2
    retained = (SHORT_CANVAS - BLOCK) // 2
    assert seen[0].shape.requests == ((SHORT_CANVAS, SHORT_CANVAS),) * 2
    assert seen[2].shape.requests == ((BLOCK, retained + BLOCK),) * 2
    # One token of each request's block per step.
    assert [forward.shape.head_rows for forward in seen] == [
        2 * left for left in range(8, 0, -1)
    ] * 2
    assert runner_of(llm).denoiser.forward == forward


def test_passes_that_keep_a_finished_block_are_updates(engines, tiny_sdar):
    seen = run_watched(engines(tiny_sdar, enable_prefix_caching=False))
    assert [forward.kind for forward in seen] == [
        "whole",
        *["reuse"] * 7,
        "update",
        *["reuse"] * 7,
    ]
    rows, keys = zip(
        *(forward.shape.requests[0] for forward in (seen[0], seen[1], seen[8])),
        strict=True,
    )
    assert rows == (SHORT + BLOCK, BLOCK, 2 * BLOCK)
    assert keys == (20, SHORT + BLOCK, SHORT + 3 * BLOCK // 2)


def test_rows_are_those_that_layers_compute(engines, tiny_llada):
    seen = run_watched(engines(tiny_llada, cache_method="dllm_cache"), num_requests=1)
    assert {forward.kind for forward in seen} == {"whole", "reuse", "update"}
    # Both layers recompute a quarter of the response, the first all of it.
    reuse = next(forward.shape for forward in seen if forward.kind == "reuse")
    assert reuse == PassShape(((RESPONSE * 5 // 8, SHORT_CANVAS),), 7)


@pytest.mark.parametrize("method", ["none", "sparse"])
def test_time_in_the_model_is_part_of_a_dispatch(engines, tiny_llada, method):
    llm = engines(tiny_llada, cache_method=method)
    llm.llm_engine.add_request(
        "one",
        {"prompt_token_ids": [5] * SHORT},
        DiffusionParams(gen_length=4, block_length=4),
    )
    with inner_times(llm) as take:
        start = time.perf_counter()
        llm.llm_engine.step()
        seconds = time.perf_counter() - start
        times = take()
        assert take().model == 0
    assert times.model > 0
    assert times.statistics > 0
    assert times.model + times.statistics < seconds
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert take().model == 0
    assert_nothing_left(llm)
