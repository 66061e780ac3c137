"""The Triton kernel of mask voting, on a GPU or interpreted, and compiled for a GPU where there is none."""

import pytest
import torch

pytest.importorskip("triton")

from dllm_engine.kernels import voting
from dllm_engine.kernels.voting import voting_scores_reference, voting_scores_with_triton
from tests.support.paged_cases import DEVICE, INTERPRETED, compile_launches, error, runs_triton

DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


@runs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 8), (3, 3, 96), (14, 2, 64)])
def test_equals_the_formula(heads, kv_heads, dim, dtype):
    fused = torch.randn(160, heads + kv_heads, dim, device=DEVICE).to(dtype)
    k = fused[:, heads:]
    for first_voter, num_keys in ((141, 139), (159, 1), (96, 160)):
        q = fused[first_voter:, :heads]
        # A slice: the last rows of what attention returned.
        lse = torch.randn(160, heads, device=DEVICE)[first_voter:] + 3
        scores = voting_scores_with_triton(q, k[:num_keys], lse)
        assert scores.dtype == torch.float32
        assert error(scores, voting_scores_reference(q, k[:num_keys], lse)) < 1e-5


@runs_triton
def test_rows_beyond_those_given_are_not_read():
    fused = torch.full((90, 3, 16), torch.nan, device=DEVICE)
    fused[:50] = torch.randn(50, 3, 16)
    q, k, lse = fused[30:50, :2], fused[:30, 2:], torch.zeros(20, 2, device=DEVICE)
    assert error(voting_scores_with_triton(q, k, lse), voting_scores_reference(q, k, lse)) < 1e-5


@runs_triton
def test_what_nobody_votes_on_or_for():
    q, k, lse = (torch.ones(5, *shape, device=DEVICE) for shape in ((4, 16), (2, 16), (4,)))
    assert voting_scores_with_triton(q[:0], k, lse[:0]).tolist() == [[0.0] * 5] * 2
    assert voting_scores_with_triton(q, k[:0], lse).shape == (2, 0)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 32, 128), (14, 2, 96), (28, 4, 256)])
def test_launches_compile_for_a_gpu(monkeypatch, heads, kv_heads, dim, dtype):
    (kernel,) = compile_launches(monkeypatch, voting)
    k = torch.zeros(50, kv_heads, dim, dtype=dtype)
    voting_scores_with_triton(k.new_zeros(32, heads, dim), k, torch.zeros(32, heads))
    assert len(kernel.shared_memory) == 1
    assert kernel.shared_memory[0] <= 96 << 10  # what every GPU since 2020 lets a program have
