"""Step plans as pure functions of what a request asked for and how far it has come. What steps feed and fill is in
``tests/methods/test_random_requests.py``."""

import pytest

from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import ParallelRule
from dllm_engine.scheduler.step_plan import unmask_quota
from tests.support.plans import GEOMETRY, cache_of, engine_options
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


def test_of_two_depths_in_one_layer_the_deeper_one_counts():
    assert cache_of("es_dllm", keep_schedule=[[1, 0], [0.5, 0.3], [0.2, 0.4]]).cuts(2) == {0: 0.2}


@pytest.mark.parametrize(("room", "stop"), [(3, None), (4, 4), (7, 4), (8, 8), (39, 36), (100, None)])
def test_a_long_prompt_is_kept_in_parts_of_whole_blocks(room, stop):
    """``stop``: the end of the part; None: nothing smaller than a block is a part."""
    block = CACHE_METHODS["block"]
    request = spec(prompt_length=43, gen_length=8, block_length=4, attention="block_causal")
    plan = block.plan(request, Progress.begin(request))
    part = block.fitted(plan, request, room)
    if stop is None:
        assert part == plan
        return
    assert (part.state.value, part.span, part.read, part.retained) == ("update", (0, stop), 0, stop)
    assert (part.max_rows, part.quota.count, part.prefills) == (stop, 0, True)
