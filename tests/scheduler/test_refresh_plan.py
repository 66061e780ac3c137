"""Step plans as pure functions of what a request asked for and how far it has come."""

import pytest
import torch

from dllm_engine.model_executor.unmasking.rules import SELECTION_RULES
from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import ParallelRule
from dllm_engine.scheduler.step_plan import unmask_quota
from tests.support.plans import FULL_METHODS, GEOMETRY, cache_of, engine_options, plan_of, plans_of
from tests.support.plans import spec_of as spec


@pytest.mark.parametrize("schedule", ["uniform", "timestep"])
def test_last_step_of_a_block_takes_whatever_is_left(schedule):
    quota = unmask_quota(spec(schedule=schedule), Progress(step=3, masked=[5]), window_alone=True)
    assert (quota.candidates, quota.count, quota.ratio) == ((10, 18), 5, 1.0)
    # Also beyond it: a policy that draws positions by chance may have left some.
    assert unmask_quota(spec(schedule=schedule), Progress(step=9, masked=[2]), window_alone=True).count == 2


@pytest.mark.parametrize(("cache_block_length", "pages"), [(16, 7), (24, 3)])
def test_freecache_holds_finished_cache_blocks(cache_block_length, pages):
    """The prompt and 16 tokens; of a longer cache block the prompt alone."""
    options = engine_options("freecache", cache_block_length=cache_block_length)
    assert options.method.page_demand(spec(cache=options.cache), GEOMETRY) == 4 * pages


def test_no_block_joins_after_the_response_has_ended():
    request = spec(parallel=ParallelRule("threshold", 0.9), block_add_threshold=0.5)
    progress = Progress.begin(request)
    progress.advance(request, 5, [3], ends=True)
    assert (progress.running, progress.step) == ((0, 1), 1)


def test_only_methods_that_keep_the_whole_canvas_need_all_of_it():
    whole = {"d2_cache", "dkv", "es_dllm", "dllm_cache", "maskkv"}
    assert {name for name, method in FULL_METHODS.items() if not method.trims_suffix} == whole


@pytest.mark.parametrize(
    ("masked", "expected"),
    [
        ([[4]], ((0, 2), 10)),
        ([[4], [1, 4]], ((0, 3), 0)),  # block 2 begins an interval
        ([[4], [1, 4], [0, 0, 4]], ((2, 4), 0)),  # what it follows reached over the border
        ([[4], [0, 4], [0, 4], [0, 4]], ((3, 5), 0)),
    ],
)
def test_a_window_over_the_border_of_intervals_computes_the_whole_canvas(masked, expected):
    """The running ones of blocks of 8 from 10 to 50, and where the next pass begins, after passes that left so many
    masks."""
    cache, rule = cache_of("dual", refresh="response", prompt_refresh_interval=2), ParallelRule("threshold", 0.9)
    request = spec(cache=cache, parallel=rule, block_add_threshold=0.5, gen_length=40, steps=10)
    progress = Progress.begin(request)
    for left in masked:
        progress.advance(request, progress.num_masked - sum(left), left)
    assert (progress.running, plan_of(request, "dual", progress).span.start) == expected


# ES-dLLM


def test_a_threshold_must_be_exceeded():
    request = spec(parallel=ParallelRule("threshold", 0.9), cache=cache_of("es_dllm"))
    assert {plan.quota.parallel for plan in plans_of(request, "es_dllm")} == {ParallelRule("exceeded_threshold", 0.9)}
    exceeded = SELECTION_RULES["exceeded_threshold"](torch.tensor([0.875, 0.75, 0.5]), 0.75)
    assert exceeded.tolist() == [True, False, False]


def test_layers_that_drop_rows():
    assert cache_of("es_dllm").cuts(32) == {4: 0.5, 8: 0.25}
    assert cache_of("es_dllm").cuts(4) == {0: 0.5, 1: 0.25}
    assert cache_of("es_dllm", indicator="none").cuts(32) == {}
    # Two depths of one layer: the deeper one.
    assert cache_of("es_dllm", keep_schedule=[[1, 0], [0.5, 0.3], [0.2, 0.4]]).cuts(2) == {0: 0.2}
