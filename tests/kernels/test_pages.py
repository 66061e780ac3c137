"""Rows of features in slots of pages, on the CPU, against the same a row at a time."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dllm_engine.kernels.pages import add_features, feature_rows, read_features, write_features
from tests.kernels.checks import EXACT, NUMBERS


@given(
    num_rows=st.one_of(st.integers(0, 3), st.integers(0, 60)),
    width=st.sampled_from([8, 24, 50, 128]),
    slots_per_page=st.sampled_from([8, 9, 64]),
    numbers=NUMBERS,
)
def test_rows_are_written_read_and_added_and_nothing_else_is_touched(num_rows, width, slots_per_page, numbers):
    num_pages = -(-num_rows // (2 * slots_per_page * 8 // width)) + 2
    memory = torch.full((num_pages, 2, slots_per_page, 8), torch.nan, dtype=numbers.dtype)
    rows = feature_rows(memory, width)
    slots = numbers.slots(rows, num_rows)
    values, hidden = numbers.normal(num_rows, 2 * width + 3)[:, 3:].split(width, dim=1)
    is_missing = (slots < 0)[:, None]

    expected = rows.clone()
    for row in (slots >= 0).nonzero()[:, 0]:
        expected[divmod(int(slots[row]), rows.shape[1])] = values[row]
    write_features(values, rows, slots)
    torch.testing.assert_close(rows, expected, **EXACT)
    assert int((~memory.isnan()).sum()) == int((slots >= 0).sum()) * width

    torch.testing.assert_close(read_features(rows, slots), values.masked_fill(is_missing, 0), **EXACT)

    hidden.masked_fill_(is_missing, -0.0)
    expected = torch.where(is_missing, hidden, hidden + values)
    add_features(hidden, rows, slots)
    torch.testing.assert_close(hidden, expected, **EXACT)
    assert bool(hidden[slots < 0].signbit().all())  # not even zero was added
