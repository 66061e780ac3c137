"""Several running blocks: which join when, and what the plans of cache methods make of their window."""

import pytest

from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import Blocks, ParallelRule
from dllm_engine.scheduler.step_plan import StepPlan
from tests.support.plans import cache_of, plan_of
from tests.support.plans import spec_of as spec

RULE = ParallelRule("threshold", 0.9)


def several(method: str = "none", block_add_threshold: float | None = 0.5, **changes):
    """A prompt of 10 tokens and a response of blocks of 8, 8 and 5."""
    options = changes.pop("options", {})
    return spec(cache=cache_of(method, **options), parallel=RULE, block_add_threshold=block_add_threshold, **changes)


def states(plans: list[StepPlan]) -> list[str]:
    return [plan.state.value for plan in plans]


def advanced(request, masked: list[list[int]]) -> list[tuple[Blocks, int]]:
    """The running blocks and the step, before each pass and after the last; ``masked``: what each pass leaves."""
    progress = Progress.begin(request)
    seen = [(progress.running, progress.step)]
    for left in masked:
        progress.advance(request, progress.num_masked - sum(left), left)
        seen.append((progress.running, progress.step))
    return seen


def test_a_block_joins_once_its_share_of_the_last_one_is_decided():
    assert advanced(several(), [[6], [4], [2, 5], [2, 4], [1, 1, 5]]) == [
        ((0, 1), 0), ((0, 1), 1), ((0, 2), 0), ((0, 2), 1), ((0, 3), 0), ((0, 3), 1),
    ]  # fmt: skip


def test_complete_blocks_leave_when_the_next_one_joins():
    # The first is complete while the second has decided too little: it stays until the third joins.
    assert advanced(several(), [[4], [0, 7], [0, 4]]) == [((0, 1), 0), ((0, 2), 0), ((0, 2), 1), ((1, 3), 0)]


def test_a_share_of_nothing_adds_a_block_in_every_step_and_of_all_one_after_the_other():
    assert [running for running, _ in advanced(several(block_add_threshold=0.0), [[8, 7], [8, 7, 5]])] == [
        (0, 2), (0, 3), (0, 3),
    ]  # fmt: skip
    for share in (1.0, None):
        assert [running for running, _ in advanced(several(block_add_threshold=share), [[1], [0], [1], [0]])] == [
            (0, 1), (0, 1), (1, 2), (1, 2), (2, 3),
        ]  # fmt: skip


def test_no_block_joins_after_the_response_has_ended():
    request, progress = several(), Progress.begin(several())
    progress.advance(request, 5, [3], ends=True)
    assert (progress.running, progress.step) == ((0, 1), 1)


def test_the_leftmost_block_with_masks_gets_on():
    request, progress = several(), Progress.begin(several())
    quotas = [plan_of(request, "none", progress).quota]
    for left in ([4], [0, 7]):
        progress.advance(request, progress.num_masked - sum(left), left)
        quotas.append(plan_of(request, "none", progress).quota)
    assert [quota.candidates for quota in quotas] == [(10, 18), (10, 26), (10, 26)]
    assert [quota.guaranteed for quota in quotas] == [(10, 18), (10, 18), (18, 26)]


def plans(request, method: str, masked: list[list[int]]) -> list[StepPlan]:
    progress, made = Progress.begin(request), []
    for left in masked:
        made.append(plan_of(request, method, progress))
        progress.advance(request, progress.num_masked - sum(left), left)
    return made


# Blocks join before passes 3 and 6; the first one leaves then.
PASSES = [[6], [4], [3, 7], [1, 6], [0, 4], [3, 5], [2, 4], [0, 0]]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("none", "full " * 8),
        ("prefix", "update reuse update reuse reuse update reuse reuse"),
        ("dual", "update reuse update reuse reuse update reuse reuse"),
        ("sparse", "full update full update reuse full update reuse"),
        # The window only grew before the third pass: there is nothing to append.
        ("freecache", "update reuse reuse reuse reuse update reuse reuse"),
    ],
)
def test_a_window_begins_when_a_block_joins(method, expected):
    made = plans(several(method), method, PASSES)
    assert states(made) == expected.split()
    assert [plan.window for plan in made] == [(10, 18)] * 2 + [(10, 26)] * 3 + [(18, 31)] * 3


def test_what_a_window_retains_is_outside_it():
    assert [plan.retained for plan in plans(several("dual"), "dual", PASSES)] == [23] * 2 + [15] * 3 + [18] * 3
    assert [plan.retained for plan in plans(several("prefix"), "prefix", PASSES)] == [10] * 5 + [18] * 3
    kept = [(plan.read, plan.retained) for plan in plans(several("freecache"), "freecache", PASSES)]
    assert kept == [(0, 10)] + [(10, 10)] * 4 + [(10, 18)] + [(18, 18)] * 2


@pytest.mark.parametrize(
    ("shifts_logits", "delay", "expected"),
    [
        # The prompt waits from the start. The first block is complete after five passes, so the sixth may keep it.
        (False, 0, "update reuse reuse reuse reuse update reuse reuse"),
        (False, 1, "update reuse reuse reuse reuse update update reuse"),
        (False, 3, "full full update reuse reuse update update update"),
        (True, 1, "update reuse reuse reuse reuse update update reuse"),
    ],
)
def test_a_finished_block_waits_before_it_is_kept(shifts_logits, delay, expected):
    request = several("delayed", options={"cache_delay": delay}, shifts_logits=shifts_logits)
    made = plans(request, "delayed", PASSES)
    assert states(made) == expected.split()
    stored = [plan.retained for plan in made if plan.state.value == "update" and plan.read < plan.retained]
    assert stored[-1] == (10 if delay == 3 else 18)
    assert all(plan.span == (plan.read, 31) for plan in made)


def test_a_refresh_of_the_delayed_cache_is_due_by_the_passes():
    request = several("delayed", options={"cache_delay": 0, "refresh_interval": 3})
    assert states(plans(request, "delayed", PASSES)) == "update reuse update reuse reuse update reuse reuse".split()


def test_intervals_of_es_dllm_count_tokens():
    options = {"block_refresh_interval": 4, "prompt_refresh_interval": 12}
    made = plans(several("es_dllm", options=options), "es_dllm", PASSES)
    # Unmasked before each pass: 0, 2, 4, 6, 9, 12, 13, 15.
    assert [plan.scope.value for plan in made] == "all active active active active prompt active active".split()
    assert [plan.skips for plan in made] == [False, True, False, True, False, False, True, True]


def test_a_shifted_window_fills_its_first_position_in_its_first_step():
    request = several("dual", shifts_logits=True, schedule="timestep")
    made = plans(request, "dual", PASSES)
    assert [plan.quota.first_needed for plan in made] == [True, False, True, False, False, True, False, False]
    delayed = plans(several("delayed", shifts_logits=True), "delayed", PASSES)
    assert not any(plan.quota.first_needed for plan in delayed), "it takes the position's own row"
