"""Floors are of the shapes that steps have."""

from collections import Counter

import pytest
from floor import Floor, PassShape, attended_keys

from dllm_engine.families import LLADA
from dllm_engine.options import EngineOptions
from dllm_engine.params import DiffusionParams
from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.scheduler.options.resolve import resolve_decoding
from dllm_engine.scheduler.progress import Progress
from tests.support.engines import runner_of
from tests.support.plans import plans_of, spec_of

PROMPT, RESPONSE, BLOCK = 40, 16, 8
CANVAS = PROMPT + RESPONSE
ATTENTION, MLP, EXPERTS = ("qkv_proj", "out_proj"), ("mlp.gate_up_proj", "mlp.down_proj"), ("mlp",)


def plan_of(method: str, step: int, **cache_options):
    engine = EngineOptions(cache_method=method, cache_options=cache_options)
    spec = resolve_decoding(DiffusionParams(gen_length=RESPONSE, block_length=BLOCK), PROMPT, LLADA, engine)
    return CACHE_METHODS[method].plan(spec, Progress(step=step, masked=[BLOCK - step], num_forwards=step))


@pytest.mark.parametrize(
    ("method", "options", "step", "rows", "keys"),
    [
        ("none", {}, 0, CANVAS, CANVAS),
        ("none", {}, 3, CANVAS, CANVAS),
        ("prefix", {}, 0, CANVAS, CANVAS),
        ("prefix", {}, 3, RESPONSE, CANVAS),
        ("dual", {}, 3, BLOCK, CANVAS),
        ("dual", {"refresh": "near"}, 3, BLOCK, CANVAS),
        ("sparse", {"retention_ratio": 0.5}, 0, CANVAS, CANVAS),
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
    spec = spec_of(prompt_length=10, gen_length=6, block_length=4, attention="block_causal", steps=6)
    seen = [
        (plan.max_rows, attended_keys(plan, plan.max_rows, spec.canvas_length, 4)) for plan in plans_of(spec, "block")
    ]
    assert seen == [(12, 8), (4, 12), (8, 14), *[(4, 16)] * 3]


@pytest.mark.parametrize("family", ["llada", "llada_moe", "dream"])
def test_a_floor_runs_each_linear_layer_once_on_all_rows(engines, request, family, monkeypatch):
    model, rows_of, names = runner_of(engines(request.getfixturevalue(f"tiny_{family}"))).model, Counter(), []
    for i, layer in enumerate(model.layers):
        for part in (*ATTENTION, *(MLP if hasattr(layer.mlp, "down_proj") else EXPERTS)):
            names.append(f"{i}.{part}")
            count = lambda _, inputs, name=names[-1]: rows_of.update([(name, len(inputs[0]))])  # noqa: E731
            request.addfinalizer(layer.get_submodule(part).register_forward_pre_hook(count).remove)
    head = model.lm_head.quant_method
    apply = head.apply
    monkeypatch.setattr(head, "apply", lambda of, x, *rest: rows_of.update([("head", len(x))]) or apply(of, x, *rest))
    seconds = Floor(model, PassShape(((8, 56), (8, 56), (56, 56)), head_rows=5)).seconds()
    assert seconds > 0
    assert rows_of == dict.fromkeys([*((name, 72) for name in names), ("head", 5)], 1)
