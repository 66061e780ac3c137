"""Statistics of rows of logits, on the CPU, against their formulas in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.kernels.token_statistics import token_statistics
from tests.kernels.checks import check_token_statistics
from tests.support.kernels import TOLERANCE


@given(
    num_rows=st.integers(0, 9),
    vocab_size=st.one_of(st.integers(2, 5), st.integers(2, 3000)),
    forbidden=st.floats(0, 1) | st.none(),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_equals_the_formulas(num_rows, vocab_size, forbidden, scale, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_rows, vocab_size + 3, generator=generator) * scale).to(dtype)[:, :vocab_size]
    column = -1 if forbidden is None else round(forbidden * (vocab_size - 1))
    check_token_statistics(token_statistics, logits, column)


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
def test_filtered_tokens_weigh_nothing(lowest):
    logits = torch.full((1, 50), lowest)
    logits[0, [7, 30]] = torch.tensor([1.0, 2.0])
    filtered = token_statistics(logits, 30, True, True)
    alone = token_statistics(torch.tensor([[1.0, 2.0]]), 1, True, True)
    assert filtered[0].tolist() == [7]
    torch.testing.assert_close(filtered[1:], alone[1:])


def test_the_lowest_of_equal_tokens_is_found():
    logits = torch.zeros(3, 40)
    logits[:, [5, 6, 30]] = 1.0
    logits[1, 6] = 2.0
    assert token_statistics(logits, -1, False, False)[0].tolist() == [5, 6, 5]
    assert token_statistics(logits, 5, False, False)[0].tolist() == [6, 6, 6]
    assert token_statistics(logits, 6, False, False)[0].tolist() == [5, 5, 5]
