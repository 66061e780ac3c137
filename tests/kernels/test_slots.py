"""Writing to slots of pages, on the CPU."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.kernels.slots import write_slots
from tests.kernels.checks import check_write_slots, refused
from tests.support.kernels import TOLERANCE


@given(
    rows=st.integers(0, 40),
    kv_heads=st.sampled_from([1, 2, 3]),
    slots_per_page=st.sampled_from([1, 3, 16]),
    missing=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_rows_are_written_to_their_slots_and_nowhere_else(**arguments):
    check_write_slots(write_slots, **arguments)


def test_shapes_that_do_not_belong_together_are_named():
    refused(
        r"slots \[4, 1\] do not belong together",
        write_slots,
        torch.zeros(4, 2, 8),
        torch.zeros(3, 6, 8),
        torch.zeros(4, 1, dtype=torch.int64),
    )
