"""Scoring, voting for and choosing retained tokens, on the CPU, against the formulas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.kernels.eviction import mean_query_scores, select_retained
from dllm_engine.kernels.voting import summed_probabilities, voting_scores
from tests.kernels.checks import check_mean_query_scores, check_voting, log_sum_exp
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
