"""The Triton kernels of unmasking, on a GPU or interpreted, and compiled for a GPU where there is none."""

import pytest
import torch

pytest.importorskip("triton")

from dllm_engine.kernels import unmask
from dllm_engine.kernels.unmask import token_statistics_reference, token_statistics_with_triton
from tests.support.paged_cases import DEVICE, INTERPRETED, compile_launches, runs_triton

DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


@runs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("vocab_size", [5, 150, 5000])
def test_equals_the_formulas(vocab_size, splits, dtype):
    logits = torch.randn(6, vocab_size + 2, device=DEVICE).to(dtype)[:, :vocab_size] * 8
    logits[1] = logits[1].round()  # many ties
    logits[2] = 0
    logits[3, : vocab_size // 2] = torch.finfo(dtype).min
    logits[4, vocab_size // 2 :] = -torch.inf
    for forbidden in (-1, int(logits[0].argmax()), vocab_size - 1):
        token, *statistics = token_statistics_with_triton(logits, forbidden, True, True, splits)
        expected_token, *expected = token_statistics_reference(logits, forbidden)
        assert torch.equal(token, expected_token)
        torch.testing.assert_close([x.double() for x in statistics], expected, rtol=1e-5, atol=1e-5)


@runs_triton
@pytest.mark.parametrize("splits", [1, 3])
def test_logits_that_are_not_finite_make_no_probability(splits):
    """Also where all of a block or of a split is NaN, which a maximum would pass over."""
    logits = torch.randn(6, 5000, device=DEVICE)
    logits[0, 17] = torch.nan
    logits[1, 4999] = torch.inf
    logits[2, :2048] = torch.nan
    logits[3, 2048:] = torch.nan
    logits[4, :4000] = -torch.inf
    _, token_logit, log_total, *_ = token_statistics_with_triton(logits, 7, False, False, splits)
    probability = (token_logit - log_total).exp()
    assert (probability < torch.inf).tolist() == [False, False, False, False, True, True]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("num_rows", [1, 32, 1000])
def test_splits_are_chosen_for_a_gpu(num_rows):
    logits = torch.randn(num_rows, 126464, device=DEVICE).bfloat16()
    token, *statistics = token_statistics_with_triton(logits, 126336, True, True)
    expected_token, *expected = token_statistics_reference(logits, 126336)
    assert torch.equal(token, expected_token)
    torch.testing.assert_close([x.double() for x in statistics], expected, rtol=1e-5, atol=2e-5)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
@pytest.mark.parametrize("wanted", [(True, True), (False, False)])
def test_launches_compile_for_a_gpu(monkeypatch, wanted):
    kernels = compile_launches(monkeypatch, unmask)
    token_statistics_with_triton(torch.zeros(2, 126464, dtype=torch.bfloat16), 126336, *wanted, 16)
    assert all(len(kernel.shared_memory) == 1 for kernel in kernels)
