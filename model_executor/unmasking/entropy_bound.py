"""``entropy_bound`` (EB-Sampler, arXiv 2505.24857): positions whose entropies add up to little beside the largest."""

import torch

from dllm_engine.model_executor.unmasking.parallel import ParallelUnmasking


def select_by_entropy(confidence: torch.Tensor, value: float) -> torch.Tensor:
    """The largest set, least entropy first, whose sum of entropies less the largest is at most ``value``.

    ``confidence`` is the negative entropy. That sum is 0 for one position, so there is always one.
    """
    ordered, order = confidence.sort(descending=True, stable=True)
    entropy = -ordered.clamp(max=0)
    # In ascending order the largest of the first n is the n-th: what counts is the sum of those before it.
    before = torch.nn.functional.pad(entropy[:-1].cumsum(0), (1, 0))
    return order[before <= value]


ENTROPY_BOUND = ParallelUnmasking("entropy_bound", measures="entropy", select=select_by_entropy)
