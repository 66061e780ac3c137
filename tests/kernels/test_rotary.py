"""Rotary position embedding on the CPU, against the formula in float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.kernels.rotary import rotary_table, rotate_
from tests.kernels.checks import check_rotate
from tests.support.kernels import TOLERANCE


@given(
    num_rows=st.integers(0, 70),
    num_heads=st.sampled_from([1, 2, 7]),
    head_dim=st.sampled_from([2, 32, 64, 96, 128, 256]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
    part=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=60, deadline=None)
def test_rotation_is_that_of_the_formula(part, **arguments):
    check_rotate(rotate_, **arguments, rotary_dim=max(2, arguments["head_dim"] // part // 2 * 2))


def test_the_table_holds_each_positions_own_phases():
    """Bit for bit: how many positions it has, and which one is asked for, changes nothing."""
    frequencies = 500_000.0 ** (-torch.arange(0, 128, 2) / 128)
    table = rotary_table(4096, frequencies)
    for positions in (torch.tensor([0]), torch.tensor([4095, 7, 7]), torch.arange(1000, 1033)):
        angles = positions.float()[:, None] * frequencies
        assert table[positions].equal(torch.cat((angles.cos(), angles.sin()), dim=-1))
    assert table[:77].equal(rotary_table(77, frequencies))
    assert table[:77].mul(1.5).equal(rotary_table(77, frequencies, 1.5))
