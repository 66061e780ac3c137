"""Scoring and choosing retained tokens, on the CPU, against the formulas."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.kernels.eviction import mean_query_scores, select_retained
from tests.kernels.checks import check_mean_query_scores, refused
from tests.support.kernels import TOLERANCE


@given(
    block_rows=st.integers(1, 40),
    candidates=st.one_of(st.integers(0, 3), st.integers(0, 2000)),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (14, 2)]),
    dim=st.sampled_from([8, 64, 96]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_scores_equal_the_formula(**arguments):
    check_mean_query_scores(mean_query_scores, **arguments)


@given(
    scores=st.lists(st.integers(-20, 20), min_size=1, max_size=200),
    pool_kernel_size=st.sampled_from([1, 3, 5, 9]),
    fraction=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_selection_takes_the_highest_pooled_scores_in_ascending_order(scores, pool_kernel_size, fraction):
    count = int(len(scores) * fraction)
    retained = select_retained(torch.tensor(scores, dtype=torch.float32), count, pool_kernel_size).tolist()
    half = pool_kernel_size // 2
    pooled = [max(scores[max(0, i - half) : i + half + 1]) for i in range(len(scores))]
    assert retained == sorted(set(retained))
    assert sorted(pooled[i] for i in retained) == sorted(pooled)[len(scores) - count :]


def test_errors_name_what_does_not_fit():
    x = torch.zeros(4, 2, 8)
    spans = torch.zeros(1, 6, dtype=torch.int64)
    odd = torch.zeros(4, 3, 8)
    refused(r"q \[4, 3, 8\] and k \[4, 2, 8\] do not belong together", mean_query_scores, odd, x, spans, 4)
    refused(r"spans \[1, 5\] torch.int64 are not", mean_query_scores, x, x, spans[:, :5], 4)
    refused(r"count=5 of scores \[4\]", select_retained, torch.zeros(4), 5, 3)
    refused("pool_kernel_size=2 is not a positive odd number", select_retained, torch.zeros(4), 1, 2)
