r"""Rotary position embedding in the half-split layout, in float32 whatever the type of
the rows.

For the first d numbers x of a head of a row at position p, with angles θ_j = p ·
base^(−2j/d), j < d/2:

    out_j         = x_j · cos θ_j − x_{j+d/2} · sin θ_j
    out_{j + d/2} = x_{j+d/2} · cos θ_j + x_j · sin θ_j

In bfloat16, phases would be off by whole radians at positions in the thousands, which
is why configs set ``rope_full_precision``.
"""

import torch
from torch import Tensor

from dllm_engine.kernels._operator import Operator


def rotary_table(
    num_positions: int, inverse_frequencies: Tensor, scale: float = 1.0
) -> Tensor:
    """float32 ``[num_positions, rotary_dim]``: a position's cosines, then its sines,
    times ``scale``.

    ``inverse_frequencies``: base^(−2j/d) above, with RoPE scaling if there is any,
    float32 ``[rotary_dim / 2]``.
    """
    positions = torch.arange(
        num_positions, device=inverse_frequencies.device, dtype=torch.float32
    )
    angles = positions[:, None] * inverse_frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scale


@Operator
def rotate_(
    x: Tensor, positions: Tensor, cos_sin: Tensor, rows: Tensor | None = None
) -> None:
    """Rotate every head of every row, in place, as far as the table is wide; the rest
    of a head stays as it is.

    Args:
        x: ``[num_rows, num_heads, head_dim]``, each head contiguous.
        positions: positions of the rows, int64 ``[num_rows]``, contiguous. All must be
            within ``cos_sin``; this is not checked.
        cos_sin: ``rotary_table``, contiguous.
        rows: index of each row's position in ``positions``, int64 ``[num_rows]``,
            contiguous; None: in order.
    """
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin[positions if rows is None else positions[rows], None].chunk(
        2, dim=-1
    )
    first, second = x[..., :rotary_dim].to(torch.float32).chunk(2, dim=-1)
    rotated = torch.cat(
        (first * cos - second * sin, second * cos + first * sin), dim=-1
    )
    x[..., :rotary_dim] = rotated
