"""Step plans as pure functions of what a request asked for and how far it has come."""

import pytest

from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.step_plan import RefreshState, unmask_quota
from tests.support.plans import engine_options, page_demand
from tests.support.plans import spec_of as spec


@pytest.mark.parametrize("schedule", ["uniform", "timestep"])
def test_last_step_of_a_block_takes_whatever_is_left(schedule):
    quota = unmask_quota(spec(schedule=schedule), Progress(step=3, masked=[5]), window_alone=True)
    assert (quota.candidates, quota.count, quota.ratio) == ((10, 18), 5, 1.0)
    # Also beyond it: a policy that draws positions by chance may have left some.
    assert unmask_quota(spec(schedule=schedule), Progress(step=9, masked=[2]), window_alone=True).count == 2


def test_ratio_is_the_share_of_what_is_masked():
    assert unmask_quota(spec(), Progress(step=1, masked=[6]), window_alone=True).ratio == pytest.approx(2 / 6)
    dream = spec(schedule="timestep", gen_length=8, block_length=8, steps=4)
    quota = unmask_quota(dream, Progress(step=1, masked=[6]), window_alone=False)
    assert quota.ratio == pytest.approx(1 - 0.5005 / 0.75025, abs=1e-6)


FULL, UPDATE, REUSE = RefreshState.FULL, RefreshState.UPDATE, RefreshState.REUSE


@pytest.mark.parametrize(("cache_block_length", "pages"), [(16, 7), (24, 3)])
def test_freecache_holds_finished_cache_blocks(cache_block_length, pages):
    """The prompt and 16 tokens; of a longer cache block the prompt alone."""
    options = engine_options("freecache", cache_block_length=cache_block_length)
    assert page_demand(spec(cache=options.cache), options) == 4 * pages
