"""SlowFast sampling: where a span ends, which pass comes next, and what cache methods leave out of a fast pass."""

import pytest

from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import ParallelRule
from dllm_engine.scheduler.unmasking import SeenOfBlock, SlowFast, SpanState
from tests.support.plans import FULL_METHODS, cache_of, plan_of
from tests.support.plans import spec_of as spec

START, STOP = 10, 31


def run(farthest: list[int], first_masked: int = START, dream: bool = False, **options) -> SpanState:
    """After passes of a block from 10 to 30 that observed these positions at most and left others masked."""
    state = SpanState(SlowFast(**options), dream, START, START)
    for position in farthest:
        state = state.after(SeenOfBlock(first_masked, position))
    return state


def place(state: SpanState | None) -> tuple[int, ...]:
    """Where the span starts, and its passes so far."""
    assert state is not None
    return state.start, state.num_slow, state.num_fast


@pytest.mark.parametrize(
    ("farthest", "options", "ends"),
    [
        # The first two within one position of each other: the later one. What comes then is no estimate.
        ([14, 15, 25], {"span_steps": 3}, (16, 16)),
        ([20, 14, 13], {"span_steps": 3}, (14, 14)),
        # The last two are not: their mean, rounded down or to even from the block's start.
        ([12, 15], {"span_steps": 2}, (14, 14)),
        ([13, 16], {"span_steps": 2}, (15, 16)),
        ([25, 13, 16], {"span_steps": 3}, (15, 16)),
        # Variance 1 among all and 2 in the sample: below a bound, or at most.
        ([13, 15], {"span_steps": 2, "span_variance": 1}, (15, 15)),
        ([13, 15], {"span_steps": 2, "span_variance": 1.5}, (16, 15)),
        ([13, 15], {"span_steps": 2, "span_variance": 2}, (16, 16)),
        ([13, 13], {"span_steps": 2, "span_variance": 0}, (14, 14)),
        # A window of one is stable at once, and one longer than the passes is never full.
        ([13, 20], {"span_steps": 2, "span_window": 1}, (14, 14)),
        ([13, 16, 17], {"span_steps": 3, "span_window": 4}, (16, 16)),
        # Where nothing was confident, the span is one position.
        ([-1], {"span_steps": 1}, (11, 11)),
    ],
)
def test_where_a_span_ends(farthest, options, ends):
    for dream, end in zip((False, True), ends, strict=True):
        state = run(farthest, dream=dream, **options)
        assert (state.end, state.num_slow, state.num_fast) == (end, len(farthest), 0)
        assert not state.is_slow


def test_an_end_that_is_found_early_leaves_the_other_slow_passes():
    state = run([14, 14], span_steps=4)
    assert (state.end, state.settled, state.is_slow) == (15, True, True)


def test_a_span_is_left_when_it_is_full():
    assert place(run([14, 14], first_masked=15, span_steps=2)) == (15, 0, 0)
    # Not before the slow passes are over.
    assert place(run([14, 14], first_masked=15, span_steps=3)) == (10, 2, 0)
    assert place(run([14, 14, -1, -1], first_masked=14, span_steps=2)) == (10, 2, 2)
    state = run([14, 14, -1], first_masked=14, span_steps=2)
    assert place(state.after(SeenOfBlock(20, -1))) == (15, 0, 0)


def test_the_next_block_begins_with_a_span():
    request, progress = spans(block_length=8), Progress.begin(spans(block_length=8))
    progress.advance(request, 3, [5], seen=SeenOfBlock(13, 14))
    assert (place(progress.span), progress.step) == ((10, 1, 0), 1)
    progress.advance(request, 5, [0], seen=SeenOfBlock(18, -1))
    assert (place(progress.span), progress.step) == ((18, 0, 0), 0)


def spans(method: str = "none", **changes):
    """A prompt of 10 tokens, a response of 21 in one block, one slow pass per span."""
    options = SlowFast(span_steps=1, span_window=1, slow_threshold=0.75, slow_minimum=3, fast_threshold=0.5)
    fields = {"cache": cache_of(method), "parallel": ParallelRule("slow_fast", 0.5), "slow_fast": options}
    return spec(**({"block_length": 21} | fields | changes))


WHOLE, BLOCK = (0, 31), (10, 31)
PASSES = {
    "none": [WHOLE, WHOLE, (0, 15)],
    "prefix": [WHOLE, BLOCK, (10, 15)],
    "dual": [WHOLE, BLOCK, (10, 15)],
    "sparse": [WHOLE, WHOLE, (10, 15)],
    "dkv": [WHOLE, WHOLE, (0, 15)],
    "dllm_cache": [WHOLE, BLOCK, (10, 15)],
    "es_dllm": [WHOLE, BLOCK, (10, 15)],
    "maskkv": [WHOLE, BLOCK, (10, 15)],
    "freecache": [WHOLE, BLOCK, (10, 15)],
    "delayed": [WHOLE, BLOCK, (10, 15)],
    "d2_cache": [WHOLE, WHOLE, WHOLE],
}
"""What a slow pass and two fast ones select rows from, by LLaDA."""


def test_every_method_has_its_passes():
    assert PASSES.keys() == FULL_METHODS.keys()


@pytest.mark.parametrize("method", PASSES)
def test_fast_passes_after_the_first_end_with_the_span(method):
    request, progress, plans = spans(method), Progress.begin(spans(method)), []
    for first_masked in (11, 12, 13):
        plans.append(plan_of(request, method, progress))
        progress.advance(request, 1, seen=SeenOfBlock(first_masked, 14))
    assert [plan.quota.candidates for plan in plans] == [(10, 31), (10, 15), (10, 15)]
    assert [plan.quota.parallel.value for plan in plans] == [0.75, 0.5, 0.5]
    assert [(plan.quota.enough, plan.quota.observed) for plan in plans] == [(3, 0.3), (1, None), (1, None)]
    assert [plan.span for plan in plans] == PASSES[method]
    if method in ("dllm_cache", "maskkv"):
        assert (plans[-1].read, plans[-1].num_updated) == (15, int(0.25 * 5))


@pytest.mark.parametrize(("options", "stop"), [({"update_delay": 4}, 31), ({"update_delay": 5}, 15)])
def test_a_pass_that_keeps_something_leaves_nothing_out(options, stop):
    request = spans("sparse", cache=cache_of("sparse", **options))
    progress = Progress.begin(request)
    for _ in range(4):
        progress.advance(request, 0, seen=SeenOfBlock(10, 14))
    assert plan_of(request, "sparse", progress).span == (0, stop)
