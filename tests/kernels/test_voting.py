"""Mask voting, on the CPU, against its formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.kernels import voting
from dllm_engine.kernels.voting import summed_probabilities, voting_scores
from tests.kernels.checks import check_voting, log_sum_exp, refused
from tests.support.kernels import TOLERANCE


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
def test_equals_the_formula_for_views_of_one_projection(**arguments):
    check_voting((voting_scores, summed_probabilities), **arguments)


@pytest.mark.parametrize(("keys", "pairs", "probabilities"), [(7, 1000, 1), (1000, 7, 700), (1, 1, 1 << 24)])
def test_parts_equal_the_formula(monkeypatch, keys, pairs, probabilities):
    monkeypatch.setattr(voting, "_KEYS_PER_TILE", keys)
    monkeypatch.setattr(voting, "_PAIRS_PER_TILE", pairs)
    monkeypatch.setattr(voting, "_PROBABILITIES_AT_ONCE", probabilities)
    check_voting((voting_scores, summed_probabilities), 11, 40, 3, (6, 2), 8, torch.float32)


@pytest.mark.parametrize("scale", [1e3, -1e3])
def test_large_scores_do_not_overflow(scale):
    q, k = torch.full((3, 1, 4), scale), torch.ones(5, 1, 4)
    torch.testing.assert_close(voting_scores(q, k, log_sum_exp(q, k)), torch.full((1, 5), 0.6), rtol=1e-3, atol=0)


def test_errors_name_what_does_not_fit():
    q, k, lse = torch.zeros(3, 4, 8), torch.zeros(5, 2, 8), torch.zeros(3, 4)
    refused(r"q \[3, 4, 8\] .* and k \[5, 16\] .* do not belong", voting_scores, q, k.flatten(1), lse)
    refused(r"k \[5, 2, 7\]", voting_scores, q, k[..., :7], lse)
    refused(r"torch.float32 and k \[5, 2, 8\] torch.float16", voting_scores, q, k.half(), lse)
    refused("3 query heads are not a multiple of 2 KV heads", voting_scores, q[:, :3], k, lse[:, :3])
    refused("4 query heads are not a multiple of 0 KV heads", voting_scores, q, k[:, :0], lse)
    refused(r"lse \[4, 3\] torch.float32 is not float32 \[3, 4\]", voting_scores, q, k, lse.T)
    refused(r"lse \[3, 4\] torch.float16 is not float32", voting_scores, q, k, lse.half())
