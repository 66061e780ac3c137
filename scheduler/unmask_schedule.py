"""How many tokens a denoising step unmasks: pure functions of the shape of a block and the step within it."""

from collections.abc import Sequence
from functools import lru_cache

import torch

TIMESTEP_EPS = 1e-3


def split_steps(steps: int, masks: Sequence[int]) -> tuple[int, ...]:
    """Denoising steps of each block, when ``steps`` are spread over blocks of so many masks each.

    Every block gets one, and the rest by the masks it has beyond its first, rounded to the largest remainders, earlier
    blocks first. So a step per mask over the whole response is a step per mask in every block, and blocks of equal
    size get equally many.
    """
    others = [count - 1 for count in masks]
    extra, total = steps - len(masks), max(sum(others), 1)
    shares = [divmod(extra * count, total) for count in others]
    left_over = extra - sum(share for share, _ in shares)
    rounded_up = set(sorted(range(len(masks)), key=lambda block: -shares[block][1])[:left_over])
    return tuple(1 + share + (block in rounded_up) for block, (share, _) in enumerate(shares))


def uniform_count(block_size: int, steps: int, step: int) -> int:
    """Tokens unmasked at ``step`` of a block of ``block_size`` masked tokens (LLaDA's ``get_num_transfer_tokens``)."""
    return block_size // steps + (step < block_size % steps)


@lru_cache(maxsize=64)
def _unmask_ratios(steps: int) -> tuple[float, ...]:
    # float32 throughout, as Dream computes it: a float64 grid rounds some counts differently.
    times = torch.linspace(1.0, TIMESTEP_EPS, steps + 1, dtype=torch.float32)
    return tuple((1 - times[1:] / times[:-1]).tolist())


def timestep_ratio(steps: int, step: int) -> float:
    """Share of the remaining masked tokens that ``step`` unmasks on Dream's time grid; 1 at the last step."""
    return 1.0 if step >= steps - 1 else _unmask_ratios(steps)[step]


def timestep_count(num_masked: int, steps: int, step: int) -> int:
    """Tokens unmasked at ``step`` when ``num_masked`` are left (Dream's sampler); often 0 in the first steps."""
    product = torch.tensor(num_masked, dtype=torch.float32) * torch.tensor(timestep_ratio(steps, step))
    return int(product)
