"""Refreshes that compute less than the canvas, and masks far behind the window that no pass computes."""

import pytest

from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import ParallelRule
from dllm_engine.scheduler.step_plan import Scope
from tests.support.plans import FULL_METHODS, cache_of, plan_of, plans_of
from tests.support.plans import spec_of as spec

# Blocks 10–18, 18–26, 26–34, 34–42, 42–50.
FIVE = {"gen_length": 40, "steps": 10}


def refreshes(method: str, shifts_logits: bool = False, suffix_blocks: int | None = None, **options):
    """Span, tokens read and tokens retained of each UPDATE."""
    options = {"prompt_refresh_interval": 3} | options
    request = spec(cache=cache_of(method, **options), shifts_logits=shifts_logits, suffix_blocks=suffix_blocks, **FIVE)
    plans = plans_of(request, method)
    for plan in plans:
        assert (plan.scope is Scope.ALL) == (plan.span.start == 0)
        assert plan.retained == plan.read + sum(retention.count for retention in plan.adds)
        if plan.state.value == "reuse" and plan.span == plan.window:
            assert plan.read == [p for p in plans[: plan.forward] if p.state.value == "update"][-1].retained
    return [(plan.span, plan.read, plan.retained) for plan in plans if plan.state.value == "update"]


def test_between_whole_refreshes_only_the_response_is_computed():
    whole, response = ((0, 50), 0, 42), ((10, 50), 10, 42)
    assert refreshes("dual", refresh="response") == [whole, response, response, whole, response]


def test_the_last_row_of_the_prompt_counts_as_response_where_logits_are_shifted():
    assert refreshes("dual", shifts_logits=True, refresh="response")[1] == ((9, 50), 9, 42)


def test_what_is_near_are_the_window_and_positions_on_each_side():
    spans = [(0, 50), (14, 30), (22, 38), (0, 50), (38, 50)]
    assert refreshes("dual", refresh="near", near_tokens=4) == [(span, 50, 50) for span in spans]


def test_sparse_retains_a_share_of_both_parts():
    # Of 10 prompt tokens 4; of all 42 candidates 16.
    whole, response = ((0, 50), 0, 16), ((10, 50), 4, 16)
    assert refreshes("sparse", refresh="response", retention_ratio=0.4) == [whole, response, response, whole, response]


def test_steps_before_a_partial_update_compute_the_same_and_write_nothing():
    request = spec(cache=cache_of("sparse", refresh="response", update_delay=2), gen_length=40, steps=20)
    first, second = plans_of(request, "sparse")[:4], plans_of(request, "sparse")[4:8]
    assert [plan.state.value for plan in first] == ["full", "full", "update", "reuse"]
    assert [plan.state.value for plan in second] == ["reuse", "reuse", "update", "reuse"]
    assert [plan.span for plan in second] == [(10, 50)] * 3 + [(18, 26)]
    assert [plan.read for plan in second] == [5, 5, 5, 21]


def advanced(method: str, masked: list[list[int]], **options):
    request = spec(
        cache=cache_of(method, refresh="response", prompt_refresh_interval=2, **options),
        parallel=ParallelRule("threshold", 0.9),
        block_add_threshold=0.5,
        **FIVE,
    )
    progress = Progress.begin(request)
    for left in masked:
        progress.advance(request, progress.num_masked - sum(left), left)
    return progress.running, plan_of(request, method, progress).span.start


def test_a_window_over_the_border_of_intervals_computes_the_whole_canvas():
    assert advanced("dual", [[4]]) == ((0, 2), 10)
    assert advanced("dual", [[4], [1, 4]]) == ((0, 3), 0)  # block 2 begins an interval
    assert advanced("dual", [[4], [1, 4], [0, 0, 4]]) == ((2, 4), 0)  # what it follows reached over the border
    assert advanced("dual", [[4], [0, 4], [0, 4], [0, 4]]) == ((3, 5), 0)


def test_a_window_that_ended_before_its_update_leaves_nothing_to_go_on_with():
    assert advanced("sparse", [[4]]) == ((0, 2), 0)
    assert advanced("sparse", [[6], [4]]) == ((0, 2), 10)


@pytest.mark.parametrize("method", ["none", "prefix", "dual", "sparse", "freecache", "delayed"])
def test_masks_far_behind_the_window_are_not_computed(method):
    plans = plans_of(spec(cache=cache_of(method), suffix_blocks=1, **FIVE), method)
    seen = {plan.window: min(plan.window.stop + 8, 50) for plan in plans}
    assert {plan.span.stop for plan in plans} >= {26, 34, 42}
    assert all(plan.span.stop in (seen[plan.window], plan.window.stop) for plan in plans)
    assert all(plan.retained <= seen[plan.window] for plan in plans)


@pytest.mark.parametrize(
    ("suffix_blocks", "spans"),
    [
        (0, [(0, 18), (14, 26), (22, 34), (0, 42), (38, 50)]),
        (1, [(0, 26), (14, 34), (22, 42), (0, 50), (38, 50)]),
        (4, [(0, 50), (14, 50), (22, 50), (0, 50), (38, 50)]),
    ],
)
def test_what_is_near_reaches_to_the_end_of_a_suffix_that_is_left_out(suffix_blocks, spans):
    seen = refreshes("dual", refresh="near", near_tokens=4, suffix_blocks=suffix_blocks)
    assert seen == [(span, span[1], span[1]) for span in spans]


def test_what_sparse_scores_must_be_computed():
    with pytest.raises(ValueError, match=r"refresh='near': Input should be 'all' or 'response'"):
        cache_of("sparse", refresh="near")


def test_only_methods_that_keep_the_whole_canvas_need_all_of_it():
    whole = {"d2_cache", "dkv", "es_dllm", "dllm_cache", "maskkv"}
    assert {name for name, method in FULL_METHODS.items() if not method.trims_suffix} == whole
