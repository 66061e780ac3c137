"""SlowFast sampling: where a span ends, and which pass comes next."""

import pytest

from dllm_engine.scheduler.unmasking import SeenOfBlock, SlowFast, SpanState

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


def test_a_span_is_left_when_it_is_full():
    assert place(run([14, 14], first_masked=15, span_steps=2)) == (15, 0, 0)
    # Not before the slow passes are over.
    assert place(run([14, 14], first_masked=15, span_steps=3)) == (10, 2, 0)
    assert place(run([14, 14, -1, -1], first_masked=14, span_steps=2)) == (10, 2, 2)
    state = run([14, 14, -1], first_masked=14, span_steps=2)
    assert place(state.after(SeenOfBlock(20, -1))) == (15, 0, 0)
