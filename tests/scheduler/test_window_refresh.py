"""Windows of several blocks: refreshes that compute less than the canvas, and masks that no pass computes."""

import pytest

from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import ParallelRule
from tests.support.plans import FULL_METHODS, cache_of, plan_of
from tests.support.plans import spec_of as spec


def advanced(*masked: list[int]):
    """The running ones of blocks of 8 from 10 to 50, and where the next pass begins, after passes that left so
    many masks."""
    cache, rule = cache_of("dual", refresh="response", prompt_refresh_interval=2), ParallelRule("threshold", 0.9)
    request = spec(cache=cache, parallel=rule, block_add_threshold=0.5, gen_length=40, steps=10)
    progress = Progress.begin(request)
    for left in masked:
        progress.advance(request, progress.num_masked - sum(left), left)
    return progress.running, plan_of(request, "dual", progress).span.start


def test_a_window_over_the_border_of_intervals_computes_the_whole_canvas():
    assert advanced([4]) == ((0, 2), 10)
    assert advanced([4], [1, 4]) == ((0, 3), 0)  # block 2 begins an interval
    assert advanced([4], [1, 4], [0, 0, 4]) == ((2, 4), 0)  # what it follows reached over the border
    assert advanced([4], [0, 4], [0, 4], [0, 4]) == ((3, 5), 0)


def test_no_block_joins_after_the_response_has_ended():
    request = spec(parallel=ParallelRule("threshold", 0.9), block_add_threshold=0.5)
    progress = Progress.begin(request)
    progress.advance(request, 5, [3], ends=True)
    assert (progress.running, progress.step) == ((0, 1), 1)


def test_what_sparse_scores_must_be_computed():
    with pytest.raises(ValueError, match=r"refresh='near': Input should be 'all' or 'response'"):
        cache_of("sparse", refresh="near")


def test_only_methods_that_keep_the_whole_canvas_need_all_of_it():
    whole = {"d2_cache", "dkv", "es_dllm", "dllm_cache", "maskkv"}
    assert {name for name, method in FULL_METHODS.items() if not method.trims_suffix} == whole
