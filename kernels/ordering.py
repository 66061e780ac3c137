"""The largest of scores, with one rule for equal ones."""

import torch


def top_indices(scores: torch.Tensor, count: int, *, in_order: bool = True) -> torch.Tensor:
    """Indices of the ``count`` largest scores of each row, largest first unless a CPU may give them in any order.

    Equal scores: on a GPU the first come first, because what ``torch.topk`` takes there depends on the sizes. On a CPU
    ``torch.topk`` decides: the outputs of the authors' code, which the tests compare with, come from CPUs.

    Args:
        scores: ``[..., num_scores]``.

    Returns:
        int64 ``[..., count]``.
    """
    if scores.is_cuda:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return scores.topk(count, sorted=in_order).indices
