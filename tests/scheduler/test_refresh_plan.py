"""Step plans as pure functions of what a request asked for and how far it has come."""

import pytest

from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import Span
from dllm_engine.scheduler.step_plan import RefreshState, RowRule, unmask_quota
from tests.support.plans import cache_of, engine_options, page_demand, plans_of
from tests.support.plans import spec_of as spec


@pytest.mark.parametrize(
    ("gen_length", "block_length", "num_blocks", "last"),
    [(8, 8, 1, (10, 18)), (9, 8, 2, (18, 19)), (16, 8, 2, (18, 26)), (1, 1, 1, (10, 11)), (5, 5, 1, (10, 15))],
)
def test_number_of_blocks(gen_length, block_length, num_blocks, last):
    request = spec(gen_length=gen_length, block_length=block_length)
    assert request.num_blocks == num_blocks
    assert request.block_span(num_blocks - 1) == last


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


@pytest.mark.parametrize(
    ("method", "options", "first_block", "reused_span", "retained"),
    [
        ("prefix", {}, [UPDATE, REUSE, REUSE, REUSE], (10, 31), [10, 18, 26]),
        ("dual", {}, [UPDATE, REUSE, REUSE, REUSE], (10, 18), [23, 23, 26]),
        ("sparse", {"update_delay": 0}, [UPDATE, REUSE, REUSE, REUSE], (10, 18), [11, 11, 13]),
        ("sparse", {}, [FULL, UPDATE, REUSE, REUSE], (10, 18), [11, 11, 13]),
        ("sparse", {"update_delay": 2, "retention_ratio": 0.3}, [FULL, FULL, UPDATE, REUSE], (10, 18), [6, 6, 7]),
        # Before the block int(start · 0.5), and the whole suffix of 13, 5 and 0.
        ("sparse", {"scope": "prefix"}, [FULL, UPDATE, REUSE, REUSE], (10, 18), [18, 14, 13]),
        ("sparse", {"update_delay": 9}, [FULL] * 4, None, []),
    ],
)
def test_states_and_retained_tokens_of_a_cache_method(method, options, first_block, reused_span, retained):
    request = spec(cache=cache_of(method, **options))
    plans = plans_of(request, method)
    assert [plan.state for plan in plans[:4]] == first_block
    assert {plan.span for plan in plans if plan.state is not REUSE} <= {Span(0, 31)}
    assert {plan.span for plan in plans[:4] if plan.state is REUSE} <= {reused_span}
    assert [plan.retained for plan in plans if plan.state is UPDATE] == retained
    assert all(plan.retained == 0 for plan in plans if plan.state is FULL)
    assert [plan.quota.count for plan in plans] == [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1]


@pytest.mark.parametrize("include_suffix", [True, False])
def test_freecache_keeps_a_finished_block_in_the_next_ones_first_step(include_suffix):
    plans = plans_of(spec(cache=cache_of("freecache", include_suffix=include_suffix)), "freecache")
    stops = [31, 31, 31] if include_suffix else [18, 26, 31]
    assert [(plan.state, plan.span, plan.read, plan.retained) for plan in plans] == [
        (UPDATE, (0, 31), 0, 10),
        *[(REUSE, (10, stops[0]), 10, 10)] * 3,
        (UPDATE, (10, stops[1]), 10, 18),
        *[(REUSE, (18, stops[1]), 18, 18)] * 3,
        (UPDATE, (18, stops[2]), 18, 26),
        *[(REUSE, (26, stops[2]), 26, 26)] * 2,
    ]
    assert all(plan.rows is RowRule.ALL and plan.max_rows == plan.span.size for plan in plans)


@pytest.mark.parametrize(("cache_block_length", "pages"), [(16, 7), (24, 3)])
def test_freecache_holds_finished_cache_blocks(cache_block_length, pages):
    """The prompt and 16 tokens; of a longer cache block the prompt alone."""
    options = engine_options("freecache", cache_block_length=cache_block_length)
    assert page_demand(spec(cache=options.cache), options) == 4 * pages
