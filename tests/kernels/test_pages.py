"""Rows of features in slots of pages, on the CPU, against the same a row at a time."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dllm_engine.kernels.pages import ComputedRows, add_or_renew_features, feature_rows
from tests.kernels.checks import EXACT, NUMBERS


@given(
    num_rows=st.one_of(st.integers(0, 3), st.integers(0, 60)),
    width=st.sampled_from([8, 24, 50, 128]),
    slots_per_page=st.sampled_from([8, 9, 64]),
    numbers=NUMBERS,
)
def test_features_are_added_or_renewed_and_nothing_else_is_touched(
    num_rows, width, slots_per_page, numbers
):
    num_pages = -(-num_rows // (2 * slots_per_page * 8 // width)) + 2
    memory = torch.full(
        (num_pages, 2, slots_per_page, 8), torch.nan, dtype=numbers.dtype
    )
    rows = feature_rows(memory, width)
    slots = numbers.slots(rows, num_rows)
    hidden, values, *computed = numbers.normal(5, num_rows, width)
    is_missing = (slots < 0)[:, None]
    for row in (slots >= 0).nonzero()[:, 0]:
        rows[divmod(int(slots[row]), rows.shape[1])] = values[row]
    expected = rows.clone()
    places = torch.where(
        numbers.integers(0, 2, num_rows) > 0, torch.arange(num_rows).flip(0), -1
    )
    is_kept = (places < 0)[:, None]
    hidden.masked_fill_(is_missing & is_kept, -0.0)
    attended, before, output = computed
    expected_hidden = torch.where(is_missing, hidden, hidden + values).where(
        is_kept, (before + output)[places]
    )
    for row in ((slots >= 0) & (places >= 0)).nonzero()[:, 0]:
        expected[divmod(int(slots[row]), rows.shape[1])] = (output + attended)[
            places[row]
        ]
    add_or_renew_features(hidden, rows, slots, places, ComputedRows(*computed))
    torch.testing.assert_close(hidden, expected_hidden, **EXACT)
    torch.testing.assert_close(rows, expected, **EXACT)
    assert bool(
        hidden[(slots < 0) & (places < 0)].signbit().all()
    )  # not even zero was added
