"""Dense attention by each library that can be had, against PyTorch's on the CPU in float64."""

from collections.abc import Iterator
from functools import partial

import torch

from dllm_engine.check.checks import CannotRunError, Check, compare
from dllm_engine.check.operators import TYPES, Draw, Sizes
from dllm_engine.kernels.dense_backends import BACKENDS, DenseAttention, attend_with_sdpa

BOUNDS = [0, 40, 80, 113, 300]
"""First rows of four sequences, and the number of rows."""


def dense_checks(device: torch.device, sizes: Sizes) -> Iterator[Check]:
    """Every backend in every type."""
    for name in BACKENDS:
        for dtype in TYPES:
            yield dense_check(device, name, sizes, dtype)


def dense_check(device: torch.device, name: str, sizes: Sizes, dtype: torch.dtype) -> Check:
    """The backend ``name`` in one type."""
    case = f"{str(dtype).removeprefix('torch.')}, {sizes.heads}"
    return Check(f"dense attention, {name}", case, partial(_compare, device, name, sizes, dtype))


def _compare(device: torch.device, name: str, sizes: Sizes, dtype: torch.dtype) -> tuple[float, float]:
    try:
        attend = BACKENDS[name](device, dtype, sizes.head_dim)
    except ValueError as error:
        raise CannotRunError(str(error)) from error

    def attended(draw: Draw, attend: DenseAttention) -> torch.Tensor:
        heads = sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads
        q, k, v = draw.normal(BOUNDS[-1], sum(heads), sizes.head_dim).split(heads, dim=1)
        return attend(q, k, v, BOUNDS, torch.tensor(BOUNDS, dtype=torch.int32, device=draw.device))

    expected = attended(Draw(dtype, torch.float64, torch.device("cpu")), attend_with_sdpa)
    return compare([attended(Draw(dtype, dtype, device), attend)], [expected])
