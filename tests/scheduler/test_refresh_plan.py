"""Step plans as pure functions of what a request asked for and how far it has come."""

import pytest

from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import Span
from dllm_engine.scheduler.step_plan import RefreshState, RowRule, unmask_quota
from tests.support.plans import cache_of, engine_options, page_demand, plans_of
from tests.support.plans import spec_of as spec


def test_blocks_follow_the_prompt_and_the_last_may_be_shorter():
    request = spec()
    assert request.canvas_length == 31
    assert [request.block_span(block) for block in range(3)] == [(10, 18), (18, 26), (26, 31)]
    assert request.block_span(2).size == 5
    assert request.steps_per_block == (4, 4, 3)


@pytest.mark.parametrize(
    ("gen_length", "block_length", "num_blocks", "last"),
    [(8, 8, 1, (10, 18)), (9, 8, 2, (18, 19)), (16, 8, 2, (18, 26)), (1, 1, 1, (10, 11)), (5, 5, 1, (10, 15))],
)
def test_number_of_blocks(gen_length, block_length, num_blocks, last):
    request = spec(gen_length=gen_length, block_length=block_length)
    assert request.num_blocks == num_blocks
    assert request.block_span(num_blocks - 1) == last


def test_without_a_cache_every_step_computes_the_whole_canvas():
    request = spec()
    plans = plans_of(request, "none")
    assert len(plans) == 11
    for number, plan in enumerate(plans):
        assert plan.state is RefreshState.FULL
        assert plan.rows is RowRule.ALL
        assert plan.span == Span(0, 31)
        assert plan.max_rows == 31
        assert plan.forward == number
    assert [plan.window for plan in plans] == [(10, 18)] * 4 + [(18, 26)] * 4 + [(26, 31)] * 3


def test_llada_unmasks_evenly_within_each_block():
    plans = plans_of(spec(), "none")
    assert [plan.quota.count for plan in plans] == [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1]
    assert all(plan.quota.candidates == plan.window for plan in plans)


def test_dream_in_one_block_follows_the_time_grid_over_the_whole_response():
    plans = plans_of(spec(schedule="timestep", gen_length=8, block_length=8, steps=4), "none")
    assert [plan.quota.count for plan in plans] == [1, 2, 2, 3]
    assert all(plan.quota.candidates == (10, 18) for plan in plans)


def test_dream_in_blocks_first_fills_the_position_that_a_window_alone_cannot_predict():
    plans = plans_of(spec(schedule="timestep", gen_length=16, block_length=8, steps=8), "none")
    # One at the start; then, on the grid of four steps from its second: 7·0.3329 = 2.33, 5·0.499 = 2.495, the rest.
    assert [plan.quota.count for plan in plans] == [1, 2, 2, 3] * 2
    assert [plan.quota.candidates for plan in plans[:4]] == [(10, 11)] + [(10, 18)] * 3
    assert [plan.quota.candidates for plan in plans[4:]] == [(18, 19)] + [(18, 26)] * 3


def test_dream_block_of_one_step_unmasks_everything():
    plans = plans_of(spec(schedule="timestep", gen_length=16, block_length=8, steps=2), "none")
    assert [(plan.quota.candidates, plan.quota.count) for plan in plans] == [((10, 18), 8), ((18, 26), 8)]


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


def test_dream_with_a_cache_decodes_in_blocks_even_where_there_is_one():
    request = spec(schedule="timestep", gen_length=8, block_length=8, steps=4, cache=cache_of("dual"))
    assert [plan.quota.candidates for plan in plans_of(request, "dual")] == [(10, 11)] + [(10, 18)] * 3


@pytest.mark.parametrize(
    ("interval", "llada", "dream"),
    [
        (1, [UPDATE] * 8, [UPDATE] * 8),
        (3, [UPDATE, UPDATE, REUSE, UPDATE, REUSE, REUSE, UPDATE, REUSE], [UPDATE, REUSE, REUSE, UPDATE] + [REUSE] * 2),
        (8, [UPDATE, UPDATE] + [REUSE] * 6, [UPDATE] + [REUSE] * 7),
    ],
)
def test_dkv_recomputes_the_canvas_at_a_blocks_start_and_at_intervals(interval, llada, dream):
    request = spec(gen_length=16, steps=16, cache=cache_of("dkv", refresh_interval=interval))
    plans = plans_of(request, "dkv")
    assert [plan.state for plan in plans] == llada * 2
    shifted = spec(
        gen_length=8, steps=8, schedule="timestep", shifts_logits=True, cache=cache_of("dkv", refresh_interval=interval)
    )
    shifted_plans = plans_of(shifted, "dkv")
    assert [plan.state for plan in shifted_plans][: len(dream)] == dream
    for plan in [*plans, *shifted_plans]:
        whole = plan.state is UPDATE
        assert plan.span == (0, 10 + (16 if plan in plans else 8))
        assert plan.read == plan.retained == plan.span.size
        assert (plan.rows is RowRule.ALL) == whole
        # In between, at most what was masked when the block began: the response, then its second block.
        masked = plan.span.size - plan.window.start
        assert plan.max_rows == (plan.span.size if whole else masked + (plan.rows is RowRule.MASKED_BEFORE_AND_LAST))


def test_dkv_feeds_the_last_row_of_shifted_logits_once_more_in_the_second_step():
    shifted = spec(gen_length=8, steps=8, schedule="timestep", shifts_logits=True, cache=cache_of("dkv"))
    reused = [RowRule.MASKED_BEFORE_AND_LAST] + [RowRule.MASKED_BEFORE] * 6
    assert [plan.rows for plan in plans_of(shifted, "dkv")] == [RowRule.ALL, *reused]


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


def test_freecache_computes_finished_blocks_until_their_cache_block_is_finished():
    request = spec(block_length=4, cache=cache_of("freecache", cache_block_length=8), steps=6)
    plans = plans_of(request, "freecache")
    assert [plan.window for plan in plans] == [(start, min(start + 4, 31)) for start in range(10, 31, 4)]
    assert [(plan.state, plan.span, plan.read, plan.retained) for plan in plans] == [
        (UPDATE, (0, 31), 0, 10),
        (REUSE, (10, 31), 10, 10),
        (UPDATE, (10, 31), 10, 18),
        (REUSE, (18, 31), 18, 18),
        (UPDATE, (18, 31), 18, 26),
        (REUSE, (26, 31), 26, 26),
    ]
    options = engine_options("freecache", cache_block_length=16)
    # The prompt and 16 tokens; of a longer cache block the prompt alone.
    assert page_demand(spec(cache=options.cache), options) == 4 * 7
    options = engine_options("freecache", cache_block_length=24)
    assert page_demand(spec(cache=options.cache), options) == 4 * 3


@pytest.mark.parametrize(
    ("method", "pages"),
    # 26, 26, 13, 31 and 26 tokens in pages of 4.
    [("none", 0), ("prefix", 4 * 7), ("dual", 4 * 7), ("sparse", 4 * 4), ("dkv", 4 * 8), ("freecache", 4 * 7)],
)
def test_page_demand_is_that_of_the_largest_block(method, pages):
    options = engine_options(method)
    assert page_demand(spec(cache=options.cache), options) == pages
