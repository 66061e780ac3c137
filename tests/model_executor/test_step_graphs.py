"""Recorded steps give the tokens of launched ones, on a fake of CUDA graphs."""

import itertools
import random
from typing import Any

import pytest
import torch

from dllm_engine import DiffusionParams
from dllm_engine.cache_methods import CACHE_METHODS
from dllm_engine.model_executor.passes.paged import RetentionPass
from dllm_engine.options import EngineOptions
from tests.support.engines import assert_nothing_left, generate, runner_of
from tests.support.fake_cuda_graphs import record_steps
from tests.support.plans import WAYS
from tests.support.random_requests import any_text
from tests.support.tiny_checkpoints import MASK, VOCAB_SIZE

BATCHES = [[17], [21, 5, 8, 40, 11], [9, 30, 12]]
"""Prompt lengths of requests that run together; pages go from one batch to the next."""


def answers(llm, *turns, **params):
    """Of requests of the same ``params``; those of ``turns`` come to each request of a
    batch in turn.
    """
    settings = {"gen_length": 16, "block_length": 8, "ignore_eos": True} | params
    draw = random.Random(1)
    found = []
    for lengths in BATCHES:
        prompts = [[draw.randrange(140) for _ in range(length)] for length in lengths]
        repeated = itertools.cycle(turns or [{}])
        asked = [DiffusionParams(**(settings | next(repeated))) for _ in prompts]
        for output in generate(llm, prompts, asked):
            completion = output.outputs[0]
            found.append(
                (list(completion.token_ids), completion.diffusion.unmasked_per_step)
            )
    return found


@pytest.fixture
def recording(engines, monkeypatch):
    """``recording(model, **settings)``: an engine and its recorder, until the test
    ends.
    """

    def start(model, **settings):
        llm = engines(model, page_size=4, **settings)
        return llm, record_steps(runner_of(llm), monkeypatch)

    return start


ALWAYS_CHOOSING = ("dllm_cache", "maskkv", "es_dllm", "d2_cache", "focus")
"""Methods whose layers choose rows in every step: equal requests alone share a recorded
pass that does.
"""
CHOOSING = ("sparse", *ALWAYS_CHOOSING)


def recordable() -> list[tuple[dict[str, Any], str]]:
    """Settings of every method whose passes are recorded, and a family that it is
    for.
    """
    full = itertools.cycle(["llada", "llada_moe", "dream"])
    found = [{"cache_method": name} for name in CACHE_METHODS]
    found.append(
        {"cache_method": "dual", "cache_options": {"refresh": "near", "near_tokens": 4}}
    )
    found.append(
        {
            "cache_method": "es_dllm",
            "cache_options": {"retention_ratio": 0.5, "indicator": "key"},
        }
    )
    found.append(
        {
            "cache_method": "dllm_cache",
            "cache_options": {"similarity": "key", "similarity_metric": "l2"},
        }
    )
    return [
        (
            s,
            next(full)
            if "full" in CACHE_METHODS[s["cache_method"]].attention
            else "sdar",
        )
        for s in found
    ]


MIXED = [
    {"gen_length": 24},
    {"block_length": 3},
    {"threshold": 0.3},
    {"temperature": 0.5, "seed": 2},
    {"unmasking": "entropy"},
]
"""Different blocks and rules, which share a pass; what fills is recorded for the two
that choose alike and launched for the others."""


@pytest.mark.parametrize(
    ("method", "family"),
    [
        *recordable(),
        ({"cache_method": "block"}, "llada2"),
        ({"cache_method": "focus", "cache_options": {"select": "top"}}, "llada2"),
    ],
)
def test_recorded_steps_give_the_same_tokens(
    engines, recording, request, method, family
):
    checkpoint = request.getfixturevalue(f"tiny_{family}")
    plain = engines(checkpoint, page_size=4, **method)
    expected = answers(plain)
    expected_mixed = answers(plain, *MIXED, gen_length=12, block_length=6)
    llm, recorder = recording(checkpoint, **method)
    assert answers(llm) == expected
    assert recorder.num_replayed > 2 * recorder.num_recorded > 0
    assert answers(llm, *MIXED, gen_length=12, block_length=6) == expected_mixed
    graphs = runner_of(llm).denoiser.graphs
    name = method["cache_method"]
    assert name in ALWAYS_CHOOSING or any(
        size.num_requests > 2 for size in graphs.forwards.graphs
    )
    assert bool(graphs.layouts.graphs) == (name in CHOOSING)
    assert graphs.fillings.graphs
    assert_nothing_left(llm)


@pytest.mark.parametrize("method", ["none", "dual"])
def test_rows_that_fill_up_a_graph_of_whole_canvases_compute_numbers(
    recording, tiny_llada, method
):
    """A library may read them beside a request's own."""
    llm, _ = recording(tiny_llada, cache_method=method)
    answers(llm)
    graphs = runner_of(llm).denoiser.graphs.forwards.graphs
    whole = [graph for size, graph in graphs.items() if not size.reads]
    torch.use_deterministic_algorithms(True)  # memory that nothing writes is NaN
    try:
        assert len(whole) > 1
        for graph in whole:
            with torch.inference_mode():
                assert graph.launch().isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


def forward_sizes(llm) -> list[tuple[int, int]]:
    """Requests and rows of the recorded steps of blocks."""
    return [
        (size.num_requests, size.num_rows)
        for size in runner_of(llm).denoiser.graphs.forwards.graphs
        if size.reads
    ]


def filling_sizes(llm) -> list[tuple[int, int]]:
    return [size[:2] for size in runner_of(llm).denoiser.graphs.fillings.graphs]


@pytest.mark.parametrize("asked", WAYS, ids=str)
def test_filling_is_recorded_for_each_way_to_choose(
    engines, recording, tiny_llada, asked
):
    expected = answers(engines(tiny_llada, page_size=4, cache_method="dual"), **asked)
    llm, _ = recording(tiny_llada, cache_method="dual")
    assert answers(llm, **asked) == expected
    assert (
        len(
            {
                size.work.choices
                for size in runner_of(llm).denoiser.graphs.fillings.graphs
            }
        )
        == 1
    )


def test_what_changes_logits_is_launched(recording, tiny_llada):
    llm, _ = recording(tiny_llada, cache_method="dual")
    constrained = {"extra_args": {"constraint": any_text(VOCAB_SIZE, {MASK}).packed}}
    for asked in (
        constrained,
        {"logit_bias": {5: 1.0}},
        {"min_tokens": 3},
        {"logits_eos_inf": True},
    ):
        answers(llm, **asked)
    assert forward_sizes(llm)
    assert not filling_sizes(llm)


def test_a_pass_with_work_of_its_own_is_launched(recording, tiny_llada, monkeypatch):
    """The first block of a response reads no page, and its pass is as
    plain as others.
    """

    class Own(RetentionPass):
        def attend(self, layer, q, k, v):
            return super().attend(layer, q, k, 2 * v)

    class Loop(RetentionPass):
        def __call__(self, layers, hidden, phases):
            return super().__call__(list(layers)[1:], hidden, phases)

    llm, _ = recording(tiny_llada, cache_method="dual")
    for own in (Own, Loop):
        monkeypatch.setattr(runner_of(llm), "layer_pass_class", own)
        answers(llm)
        assert not runner_of(llm).denoiser.graphs.forwards.graphs
        assert filling_sizes(llm)


def test_graphs_follow_canvases_to_a_larger_store(engines, recording, tiny_llada):
    expected = answers(engines(tiny_llada, page_size=4, cache_method="dual"))
    llm, recorder = recording(tiny_llada, cache_method="dual")
    answers(llm)
    store = runner_of(llm).store
    recorded = recorder.num_recorded
    store._make_room(store.tokens.numel())
    assert answers(llm) == expected
    assert recorder.num_recorded == 2 * recorded


def test_the_least_recently_replayed_graph_goes_first(
    engines, recording, tiny_llada, monkeypatch
):
    expected = answers(engines(tiny_llada, page_size=4, cache_method="dual"))
    monkeypatch.setattr("dllm_engine.model_executor.graphs.recording.MAX_GRAPHS", 2)
    llm, _ = recording(tiny_llada, cache_method="dual")
    assert answers(llm) == expected
    assert forward_sizes(llm) == [(4, 24)]
    assert filling_sizes(llm) == [(8, 8), (4, 8)]


def test_graphs_are_for_gpus():
    def settled(device_type, enforce_eager=False, **options):
        return (
            EngineOptions.parse(options)
            .on_device(device_type, enforce_eager)
            .cuda_graphs
        )

    assert settled("cuda", cache_method="sparse")
    assert not settled("cuda", enforce_eager=True, cache_method="sparse")
    assert settled("cuda", enforce_eager=True, cache_method="sparse", cuda_graphs=True)
    assert not settled("cuda", cache_method="dual", cuda_graphs=False)
    assert not settled("cpu", cache_method="dual")
    with pytest.raises(
        ValueError, match="cuda_graphs=True needs a GPU, and the device is 'cpu'"
    ):
        settled("cpu", cache_method="dual", cuda_graphs=True)


def test_long_steps_are_launched(recording, tiny_llada, monkeypatch):
    """Graphs have at most 16 rows, and launching takes as long as 8."""
    for name, value in (("SIZES", (8, 16)), ("MAX_ROWS", 16), ("HOST_BOUND_ROWS", 8)):
        monkeypatch.setattr(
            f"dllm_engine.model_executor.graphs.recording.{name}", value
        )
    llm, _ = recording(tiny_llada, cache_method="dual")
    answers(llm)
    assert set(forward_sizes(llm)) == {(1, 8)}
    assert set(filling_sizes(llm)) == {(8, 8)}
