"""Scores and choices that ``dllm check`` does not compare between devices."""

import pytest
import torch

from dllm_engine.kernels.attention_scores import mean_query_scores, top_indices


class OnGpu(torch.Tensor):
    is_cuda = True


def test_equal_scores_on_a_gpu_are_ordered_by_position():
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0, 5.0]])
    assert top_indices(scores.as_subclass(OnGpu), 3).tolist() == [[1, 2, 4], [4, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_of_short_numbers_are_sums_in_float32(dtype):
    q, k = torch.randn(9, 4, 64).to(dtype), torch.randn(50, 2, 64).to(dtype)
    scores = mean_query_scores(q, k)
    torch.testing.assert_close(scores, mean_query_scores(q.float(), k.float()))
