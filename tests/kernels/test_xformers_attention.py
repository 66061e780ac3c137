"""Dense attention by xformers: what is handed to it, and when it is refused.

xformers computes on CUDA alone. On a CPU, where it is installed, its call is stood in for by the formula over the mask
it would have used, so that shapes, groups and lengths are checked.
"""

import itertools

import pytest
import torch

from dllm_engine.kernels.attention import bidirectional_attention, use_dense_backend
from dllm_engine.kernels.xformers_attention import attend_with_xformers, check_xformers
from tests.kernels import formulas
from tests.support.engines import start_engine
from tests.support.paged_cases import error

CASES = [([5], 4, 4), ([3, 0, 7, 7], 4, 2), ([1, 9], 6, 1)]


def inputs(lengths, heads, kv_heads, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    draw = (torch.randn(sum(lengths), n, 16, generator=generator) for n in (heads, kv_heads, kv_heads))
    return *(x.to(device, dtype) for x in draw), [0, *itertools.accumulate(lengths)]


@pytest.mark.parametrize(("lengths", "heads", "kv_heads"), CASES)
def test_what_xformers_is_given_means_the_same(monkeypatch, lengths, heads, kv_heads):
    ops = pytest.importorskip("xformers.ops")

    def formula(q, k, v, attn_bias):
        scores = torch.einsum("bqghd,bkghd->bghqk", q, k) / q.shape[-1] ** 0.5
        weights = (scores + attn_bias.materialize(scores.shape[-2:])).softmax(dim=-1)
        return torch.einsum("bghqk,bkghd->bqghd", weights, v)

    monkeypatch.setattr(ops, "memory_efficient_attention", formula)
    q, k, v, bounds = inputs(lengths, heads, kv_heads)
    expected = formulas.bidirectional_attention(q, k, v, bounds)
    torch.testing.assert_close(attend_with_xformers(q, k, v, bounds).double(), expected, rtol=1e-5, atol=1e-5)
    use_dense_backend("xformers")
    try:
        torch.testing.assert_close(bidirectional_attention(q, k, v, bounds).double(), expected, rtol=1e-5, atol=1e-5)
    finally:
        use_dense_backend("sdpa")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("lengths", "heads", "kv_heads"), CASES)
def test_on_a_gpu(lengths, heads, kv_heads):
    pytest.importorskip("xformers.ops")
    q, k, v, bounds = inputs(lengths, heads, kv_heads, "cuda", torch.float16)
    expected = formulas.bidirectional_attention(q, k, v, bounds)
    assert error(attend_with_xformers(q, k, v, bounds), expected) < 2e-3


def test_a_device_it_cannot_serve_is_named(tiny_llada):
    with pytest.raises(ValueError, match=r"needs a CUDA device and float16 or bfloat16, here cpu and torch\.float32"):
        check_xformers(torch.device("cpu"), torch.float32)
    with pytest.raises(Exception, match="dense_attention='xformers' needs a CUDA device"):
        start_engine(tiny_llada, dense_attention="xformers")
