"""Scoring, voting for and choosing retained tokens, on the CPU,
against the formulas.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from dllm_engine.kernels.attention_scores import (
    mean_query_scores,
    select_retained,
    top_indices,
    voting_scores,
)
from tests.kernels.checks import NUMBERS, attention, error


def mean_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return torch.einsum("hd,jhd->j", q.double().mean(dim=0), keys)


@given(
    block_rows=st.integers(1, 40),
    candidates=st.one_of(st.integers(0, 3), st.integers(0, 2000)),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (14, 2)]),
    dim=st.sampled_from([8, 64, 96]),
    numbers=NUMBERS,
)
def test_scores_equal_the_formula(block_rows, candidates, heads, dim, numbers):
    fused = numbers.normal(candidates + block_rows, sum(heads), dim)
    block = fused[candidates:, : heads[0]]
    keys = fused[:candidates, heads[0] :]
    scores = mean_query_scores(block, keys)
    assert scores.dtype == torch.float32
    # The products are exact in float32 whatever the type of the inputs. The error is
    # relative to the sum of a score's terms without their signs, because a few
    # candidates' terms may cancel to almost nothing.
    expected = mean_scores(block, keys)
    unsigned = mean_scores(block.abs(), keys.abs())
    assert ((scores.double() - expected).abs() <= 1e-6 * unsigned).all()


@given(
    scores=st.lists(st.integers(-20, 20), min_size=1, max_size=200),
    pool_kernel_size=st.sampled_from([1, 3, 5, 9]),
    fraction=st.floats(0, 1),
)
def test_selection_takes_the_highest_pooled_scores_in_ascending_order(
    scores, pool_kernel_size, fraction
):
    count = int(len(scores) * fraction)
    retained = select_retained(
        torch.tensor(scores, dtype=torch.float32), count, pool_kernel_size
    ).tolist()
    half = pool_kernel_size // 2
    windows = [scores[max(0, i - half) : i + half + 1] for i in range(len(scores))]
    pooled = [max(window) for window in windows]
    assert retained == sorted(set(retained))
    assert sorted(pooled[i] for i in retained) == sorted(pooled)[len(scores) - count :]


class OnGpu(torch.Tensor):
    is_cuda = True


def test_equal_scores_on_a_gpu_are_ordered_by_position():
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0, 5.0]])
    assert top_indices(scores.as_subclass(OnGpu), 3).tolist() == [[1, 2, 4], [4, 0, 1]]


@given(
    voters=st.one_of(st.integers(0, 3), st.integers(0, 100)),
    keys=st.one_of(st.integers(0, 3), st.integers(0, 300)),
    others=st.integers(1, 50),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (14, 2)]),
    dim=st.sampled_from([8, 64, 96]),
    numbers=NUMBERS,
)
def test_votes_equal_the_formula_for_views_of_one_projection(
    voters, keys, others, heads, dim, numbers
):
    """The last rows of a sequence vote on its first, with ``others`` between them; what
    lies behind is not read.
    """
    num_heads, kv_heads = heads
    fused = numbers.normal(keys + others + voters, sum(heads), dim)
    fused = torch.cat(
        (fused, torch.full_like(fused[:1], torch.nan).expand(99, -1, -1))
    )[: len(fused)]
    q = fused[keys + others :, :num_heads]
    k = fused[:, num_heads:]
    lse = F.pad(attention(q, k, k)[1].float(), (0, 0, 3, 0), value=torch.nan)[3:]
    per_head = k[:keys].double().repeat_interleave(num_heads // kv_heads, dim=1)
    logits = torch.einsum("ihd,jhd->hij", q.double(), per_head) * dim**-0.5
    probabilities = (logits - lse.double().T[:, :, None]).exp()
    scores = voting_scores(q, k[:keys], lse)
    assert scores.dtype == torch.float32
    # The products are exact in float32 whatever the type of the inputs.
    assert (
        error(scores, probabilities.sum(dim=1).unflatten(0, (kv_heads, -1)).mean(dim=1))
        < 1e-5
    )


@pytest.mark.parametrize("scale", [1e3, -1e3])
def test_large_votes_do_not_overflow(scale):
    q, k = torch.full((3, 1, 4), scale), torch.ones(5, 1, 4)
    lse = attention(q, k, k)[1].float()
    torch.testing.assert_close(
        voting_scores(q, k, lse), torch.full((1, 5), 0.6), rtol=1e-3, atol=0
    )
