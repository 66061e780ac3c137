"""Mask voting, on the CPU, against its formula and against attention that is held whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_engine.kernels import voting
from dllm_engine.kernels.paged_attention import attention_with_lse
from dllm_engine.kernels.voting import summed_probabilities, voting_scores
from tests.kernels import formulas
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


def test_worked_by_hand():
    """Two voters, two query heads on one KV head, d = 4: attention of (3/4, 1/4) and three times (1/2, 1/2)."""
    q = torch.zeros(2, 2, 4)
    q[0, 0, 0] = 2 * torch.tensor(3.0).log()
    k = torch.tensor([[[1.0, 0, 0, 0]], [[0.0, 1, 0, 0]]])
    lse = torch.tensor([[4.0, 2.0], [2.0, 2.0]]).log()
    for scores in (voting_scores(q, k, lse), formulas.voting_scores(q, k, lse)):
        assert scores.tolist() == [pytest.approx([1.125, 0.875])]


def test_takes_the_log_sum_exp_of_attention_and_every_voter_has_one_vote():
    q, k, v = torch.randn(3, 20, 4, 16).unbind(0)
    k, v = k[:, :2], v[:, :2]
    _, lse = attention_with_lse(q, k, v, [0, 20])
    scores = voting_scores(q[12:], k, lse[12:])
    torch.testing.assert_close(scores.sum(dim=1), torch.full((2,), 8.0))
    attention = (q[12:, :2].transpose(0, 1) @ k[:, 0].T / 4).softmax(dim=-1)
    torch.testing.assert_close(scores[0], attention.sum(dim=1).mean(dim=0))


@pytest.mark.parametrize("at_once", [1, 700, 1 << 24])
def test_probabilities_of_rows_are_summed_over_heads(monkeypatch, at_once):
    monkeypatch.setattr(voting, "_PROBABILITIES_AT_ONCE", at_once)
    q, k, v = torch.randn(3, 20, 6, 16).unbind(0)
    k, v = k[:, :3], v[:, :3]
    _, lse = attention_with_lse(q, k, v, [0, 20])
    summed = summed_probabilities(q[12:], k, lse[12:])
    keys = k.repeat_interleave(2, dim=1)
    torch.testing.assert_close(summed, (torch.einsum("ihd,jhd->hij", q[12:], keys) / 4).softmax(dim=-1).sum(dim=0))
    torch.testing.assert_close(summed.sum(dim=1), torch.full((8,), 6.0))


@pytest.mark.parametrize(("keys_per_tile", "pairs_per_tile"), [(7, 1000), (1000, 7), (8, 5), (1, 1)])
def test_tiles_equal_the_whole(monkeypatch, keys_per_tile, pairs_per_tile):
    q, k = torch.randn(11, 6, 8), torch.randn(40, 2, 8)
    lse = log_sum_exp(q, k)
    whole = voting_scores(q, k, lse)
    monkeypatch.setattr(voting, "_KEYS_PER_TILE", keys_per_tile)
    monkeypatch.setattr(voting, "_PAIRS_PER_TILE", pairs_per_tile)
    torch.testing.assert_close(voting_scores(q, k, lse), whole)


@pytest.mark.parametrize("scale", [1e3, -1e3])
def test_large_scores_do_not_overflow(scale):
    q, k = torch.full((3, 1, 4), scale), torch.ones(5, 1, 4)
    torch.testing.assert_close(voting_scores(q, k, log_sum_exp(q, k)), torch.full((1, 5), 0.6), rtol=1e-3, atol=0)


def test_what_nobody_votes_on_or_for():
    q, k, lse = torch.randn(3, 4, 8), torch.randn(5, 2, 8), torch.zeros(3, 4)
    assert voting_scores(q[:0], k, lse[:0]).tolist() == [[0.0] * 5] * 2
    assert voting_scores(q, k[:0], lse).shape == (2, 0)


def test_errors_name_what_does_not_fit():
    q, k, lse = torch.zeros(3, 4, 8), torch.zeros(5, 2, 8), torch.zeros(3, 4)
    refused(
        r"q \[3, 4, 8\] torch.float32 and k \[5, 16\] torch.float32 do not belong", voting_scores, q, k.flatten(1), lse
    )
    refused(r"k \[5, 2, 7\]", voting_scores, q, k[..., :7], lse)
    refused(r"torch.float32 and k \[5, 2, 8\] torch.float16", voting_scores, q, k.half(), lse)
    refused("3 query heads are not a multiple of 2 KV heads", voting_scores, q[:, :3], k, lse[:, :3])
    refused("4 query heads are not a multiple of 0 KV heads", voting_scores, q, k[:, :0], lse)
    refused(r"lse \[4, 3\] torch.float32 is not float32 \[3, 4\]", voting_scores, q, k, lse.T)
    refused(r"lse \[3, 4\] torch.float16 is not float32", voting_scores, q, k, lse.half())
