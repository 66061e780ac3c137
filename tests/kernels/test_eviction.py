"""Scoring, voting for and choosing retained tokens, on the CPU, against the formulas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.kernels.eviction import mean_query_scores, select_retained
from dllm_engine.kernels.voting import summed_probabilities, voting_scores
from tests.kernels.checks import check_mean_query_scores, check_voting, log_sum_exp, refused
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


@given(
    voters=st.one_of(st.integers(0, 3), st.integers(0, 100)),
    keys=st.one_of(st.integers(0, 3), st.integers(0, 300)),
    others=st.integers(1, 50),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (14, 2)]),
    dim=st.sampled_from([8, 64, 96]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_votes_equal_the_formula_for_views_of_one_projection(**arguments):
    check_voting((voting_scores, summed_probabilities), **arguments)


@pytest.mark.parametrize("scale", [1e3, -1e3])
def test_large_votes_do_not_overflow(scale):
    q, k = torch.full((3, 1, 4), scale), torch.ones(5, 1, 4)
    torch.testing.assert_close(voting_scores(q, k, log_sum_exp(q, k)), torch.full((1, 5), 0.6), rtol=1e-3, atol=0)


def test_errors_of_votes_name_what_does_not_fit():
    q, k, lse = torch.zeros(3, 4, 8), torch.zeros(5, 2, 8), torch.zeros(3, 4)
    refused(r"q \[3, 4, 8\] .* and k \[5, 16\] .* do not belong", voting_scores, q, k.flatten(1), lse)
    refused(r"k \[5, 2, 7\]", voting_scores, q, k[..., :7], lse)
    refused(r"torch.float32 and k \[5, 2, 8\] torch.float16", voting_scores, q, k.half(), lse)
    refused("3 query heads are not a multiple of 2 KV heads", voting_scores, q[:, :3], k, lse[:, :3])
    refused("4 query heads are not a multiple of 0 KV heads", voting_scores, q, k[:, :0], lse)
    refused(r"lse \[4, 3\] torch.float32 is not float32 \[3, 4\]", voting_scores, q, k, lse.T)
    refused(r"lse \[3, 4\] torch.float16 is not float32", voting_scores, q, k, lse.half())
