"""SlowFast sampling: where a span ends. What a pass fills is in ``tests/methods/test_random_requests.py``."""

import pytest

from dllm_engine.scheduler.unmasking import SeenOfBlock, SlowFast, SpanState

START = 10


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
    """After passes that observed these positions at most, and left the block's first masked."""
    for dream, end in zip((False, True), ends, strict=True):
        state = SpanState(SlowFast(**options), dream, START, START)
        for position in farthest:
            state = state.after(SeenOfBlock(START, position))
        assert (state.end, state.num_slow, state.num_fast) == (end, len(farthest), 0)
        assert not state.is_slow
