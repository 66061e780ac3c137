"""How many tokens each step unmasks, by hand-computed tables."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.scheduler.unmasking import split_steps, timestep_count, timestep_ratio, uniform_count


@pytest.mark.parametrize(
    ("steps", "masks", "expected"),
    [
        (32, [8] * 4, (8, 8, 8, 8)),
        (18, [8] * 4, (5, 5, 4, 4)),
        (5, [8] * 3, (2, 2, 1)),
        (3, [8] * 3, (1, 1, 1)),
        (7, [8], (7,)),
        # A step per mask, whatever the blocks.
        (33, [32, 1], (32, 1)),
        (65, [32, 32, 1], (32, 32, 1)),
        (3, [1, 1, 1], (1, 1, 1)),
        # Two masks per step, as far as they go.
        (20, [32, 8], (16, 4)),
        (17, [32, 1], (16, 1)),
        # 1 + 7·31/38 = 6.71, 1 + 7·7/38 = 2.29
        (9, [32, 8], (7, 2)),
        (2, [32, 1], (1, 1)),
    ],
)
def test_steps_are_shared_by_masks_with_earlier_blocks_first(steps, masks, expected):
    assert split_steps(steps, masks) == expected


@pytest.mark.parametrize(
    ("block_size", "steps", "expected"),
    [
        (8, 8, [1] * 8),
        (8, 4, [2, 2, 2, 2]),
        (8, 3, [3, 3, 2]),
        (10, 4, [3, 3, 2, 2]),
        (5, 1, [5]),
        (3, 5, [1, 1, 1, 0, 0]),
    ],
)
def test_uniform_schedule_gives_the_remainder_to_the_first_steps(block_size, steps, expected):
    assert [uniform_count(block_size, steps, step) for step in range(steps)] == expected


def dream_counts(num_masked: int, steps: int) -> list[int]:
    counts = []
    for step in range(steps):
        counts.append(timestep_count(num_masked, steps, step))
        num_masked -= counts[-1]
    return counts


@pytest.mark.parametrize(
    ("num_masked", "steps", "expected"),
    [
        # Grid 1, 0.75025, 0.5005, 0.25075, 0.001 (four steps). 8·(1 − 0.75025) = 1.998, 7·(1 − 0.5005/0.75025) = 2.33,
        # 5·(1 − 0.25075/0.5005) = 2.495, the rest.
        (8, 4, [1, 2, 2, 3]),
        # Grid 1, 0.667, 0.334, 0.001: 10·0.333 = 3.33, 7·(1 − 0.334/0.667) = 3.495, the rest.
        (10, 3, [3, 3, 4]),
        # Just below a token per step, so the first step does nothing and the last one takes two.
        (4, 4, [0, 1, 1, 2]),
        (5, 1, [5]),
        (0, 3, [0, 0, 0]),
    ],
)
def test_timestep_schedule_rounds_down_and_ends_with_all_that_is_left(num_masked, steps, expected):
    assert dream_counts(num_masked, steps) == expected


def test_timestep_ratio_is_the_share_of_the_remaining_tokens():
    assert timestep_ratio(4, 0) == pytest.approx(0.24975, abs=1e-6)
    assert timestep_ratio(4, 2) == pytest.approx(1 - 0.25075 / 0.5005, abs=1e-6)
    assert timestep_ratio(4, 3) == 1.0
    assert timestep_ratio(1, 0) == 1.0


@settings(deadline=None)
@given(block_size=st.integers(1, 200), steps=st.integers(1, 200))
def test_every_token_is_unmasked_exactly_once(block_size, steps):
    uniform = [uniform_count(block_size, steps, step) for step in range(steps)]
    assert sum(uniform) == block_size
    assert max(uniform) - min(uniform) <= 1
    assert uniform == sorted(uniform, reverse=True)
    timestep = dream_counts(block_size, steps)
    assert sum(timestep) == block_size
    assert min(timestep) >= 0


@settings(deadline=None)
@given(masks=st.lists(st.integers(1, 60), min_size=1, max_size=30), data=st.data())
def test_no_step_is_lost_between_blocks_and_none_is_empty(masks, data):
    steps = data.draw(st.integers(len(masks), sum(masks)))
    split = split_steps(steps, masks)
    assert sum(split) == steps
    assert all(1 <= share <= count for share, count in zip(split, masks, strict=True))
    assert split_steps(sum(masks), masks) == tuple(masks)
