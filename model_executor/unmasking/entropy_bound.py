"""``entropy_bound`` (EB-Sampler, arXiv 2505.24857): positions whose entropies add up to little beside the largest."""

import torch

from dllm_engine.model_executor.unmasking.parallel import ParallelUnmasking


def within_bound(ordered: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """The largest set, least entropy first, whose sum of entropies less the largest is at most ``value``.

    ``ordered`` are negative entropies. That sum is 0 for one position, so there is always one.
    """
    entropy = -ordered.clamp(max=0)
    # In ascending order the largest of the first n is the n-th: what counts is the sum of those before it.
    before = torch.nn.functional.pad(entropy[..., :-1].cumsum(-1), (1, 0))
    return before <= value


ENTROPY_BOUND = ParallelUnmasking("entropy_bound", measures="entropy", passes=within_bound)
