"""The rule for equal scores."""

import torch

from dllm_engine.kernels.eviction import top_indices


class OnGpu(torch.Tensor):
    is_cuda = True


def test_equal_scores_on_a_gpu_are_ordered_by_position():
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0, 5.0]])
    assert top_indices(scores.as_subclass(OnGpu), 3).tolist() == [[1, 2, 4], [4, 0, 1]]


def test_equal_scores_on_a_cpu_are_ordered_by_topk():
    scores = torch.randint(0, 4, (5, 300), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(top_indices(scores, 40), scores.topk(40).indices)
    assert torch.equal(top_indices(scores[0], 40), scores[0].topk(40).indices)
