"""Keys, values and rows of features in slots of pages, on the CPU, against the same a row at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.kernels.features import add_features, feature_rows, read_features, write_features
from dllm_engine.kernels.slots import write_kv, write_slots
from tests.kernels.checks import check_features, check_write_slots
from tests.support.kernels import TOLERANCE


@given(
    num_rows=st.one_of(st.integers(0, 3), st.integers(0, 60)),
    width=st.sampled_from([8, 24, 50, 128]),
    slots_per_page=st.sampled_from([8, 9, 64]),
    missing=st.sampled_from([0.0, 0.4, 1.0]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_rows_are_written_read_and_added_and_nothing_else_is_touched(**arguments):
    check_features((write_features, read_features, add_features), **arguments)


@given(
    rows=st.integers(0, 40),
    kv_heads=st.sampled_from([1, 2, 3]),
    slots_per_page=st.sampled_from([1, 3, 16]),
    missing=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_keys_and_values_are_written_to_their_slots_and_nowhere_else(**arguments):
    check_write_slots((write_slots, write_kv), **arguments)


def test_rows_that_are_read_or_added_may_share_a_slot():
    rows = feature_rows(torch.arange(16.0).view(1, 2, 2, 4), 8)
    slots = torch.tensor([1, 1, 0])
    hidden = torch.ones(3, 8)
    add_features(hidden, rows, slots)
    torch.testing.assert_close(hidden, 1 + read_features(rows, slots))
    assert hidden[:, 0].tolist() == [9, 9, 1]


def test_rows_fill_a_page_from_its_start_and_leave_the_rest_alone():
    memory = torch.arange(2 * 2 * 3 * 4).view(2, 2, 3, 4)
    rows = feature_rows(memory, 7)
    assert rows.shape == (2, 3, 7)
    assert rows.tolist() == [memory[page].flatten()[:21].view(3, 7).tolist() for page in range(2)]
    assert rows.data_ptr() == memory.data_ptr()


@pytest.mark.parametrize("width", [1, 23, 24])
def test_a_page_may_hold_a_single_row(width):
    assert feature_rows(torch.zeros(5, 2, 3, 4), width).shape == (5, 24 // width, width)
    assert feature_rows(torch.zeros(0, 2, 3, 4), width).shape == (0, 24 // width, width)
