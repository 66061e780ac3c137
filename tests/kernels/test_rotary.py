"""Rotary position embedding on the CPU, against the formula in float64."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dllm_engine.kernels.rotary import rotary_table, rotate_
from tests.kernels.checks import NUMBERS

ROTATION_TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@given(
    num_rows=st.integers(0, 70),
    num_heads=st.sampled_from([1, 2, 7]),
    head_dim=st.sampled_from([2, 32, 64, 96, 128, 256]),
    numbers=NUMBERS,
    part=st.sampled_from([1, 2, 3]),
)
def test_rotation_is_that_of_the_formula(num_rows, num_heads, head_dim, numbers, part):
    """Rows of one head more than are rotated, as those of a fused projection. The table
    holds NaN at positions that no row is at."""
    rotary_dim = max(2, head_dim // part // 2 * 2)
    fused = numbers.normal(num_rows, num_heads + 1, head_dim)
    positions = numbers.integers(0, 5000, num_rows)
    angles = positions[:, None].double() / 500_000.0 ** (
        torch.arange(0, rotary_dim, 2) / rotary_dim
    )
    cos_sin = torch.full((5000, rotary_dim), torch.nan)
    cos_sin[positions] = torch.cat((angles.cos(), angles.sin()), 1).float()
    cos, sin = cos_sin.double()[positions, None].chunk(2, dim=-1)
    expected = fused.double()
    first, second = expected[:, 1:, :rotary_dim].chunk(2, dim=-1)
    rotated = torch.cat(
        (first * cos - second * sin, second * cos + first * sin), dim=-1
    )
    expected[:, 1:, :rotary_dim] = rotated
    before = fused.clone()
    rotate_(fused[:, 1:], positions, cos_sin)
    assert (fused.double() - expected).norm() <= ROTATION_TOLERANCE[
        numbers.dtype
    ] * expected.norm()
    assert fused[:, 0].equal(before[:, 0])
    assert fused[..., rotary_dim:].equal(before[..., rotary_dim:])


def test_the_table_holds_each_positions_own_phases():
    """Bit for bit: the number of positions changes nothing."""
    frequencies = 500_000.0 ** (-torch.arange(0, 128, 2) / 128)
    table = rotary_table(4096, frequencies)
    positions = torch.tensor([0, 7, 1000, 4095])
    angles = positions.float()[:, None] * frequencies
    assert table[positions].equal(torch.cat((angles.cos(), angles.sin()), dim=-1))
    assert table[:77].equal(rotary_table(77, frequencies))
    assert table[:77].mul(1.5).equal(rotary_table(77, frequencies, 1.5))
