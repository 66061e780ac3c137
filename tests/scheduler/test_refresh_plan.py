"""Step plans as pure functions of what a request asked for and how far it has come."""

import pytest

from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.step_plan import unmask_quota
from tests.support.plans import engine_options, page_demand
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
    assert page_demand(spec(cache=options.cache), options) == 4 * pages
