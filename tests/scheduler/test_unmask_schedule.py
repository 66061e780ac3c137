"""How many tokens each step unmasks, by hand-computed tables."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.scheduler.unmask_schedule import split_steps, timestep_count, timestep_ratio, uniform_count


@pytest.mark.parametrize(
    ("steps", "num_blocks", "expected"),
    [
        (32, 4, [8, 8, 8, 8]),
        (18, 4, [5, 5, 4, 4]),
        (5, 3, [2, 2, 1]),
        (3, 3, [1, 1, 1]),
        (7, 1, [7]),
    ],
)
def test_steps_are_spread_evenly_with_earlier_blocks_first(steps, num_blocks, expected):
    assert [split_steps(steps, num_blocks, block) for block in range(num_blocks)] == expected


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
@given(steps=st.integers(1, 500), num_blocks=st.integers(1, 100))
def test_no_step_is_lost_between_blocks(steps, num_blocks):
    split = [split_steps(steps, num_blocks, block) for block in range(num_blocks)]
    assert sum(split) == steps
    assert split == sorted(split, reverse=True)
    assert split[0] - split[-1] <= 1
