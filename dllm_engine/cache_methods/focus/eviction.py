"""Choice of the masked rows that a pass of FOCUS keeps, because it expects to decode
them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_engine.cache_methods.focus.method import FocusOptions
from dllm_engine.model_executor.transfer import on_device

POOL_KERNEL_SIZE = 3
"""Width of the max-pooling of scores over neighbouring masked keys."""


@dataclass(frozen=True)
class OwnMasks:
    """Masked rows of a request that may drop some of them."""

    positions: np.ndarray
    """Canvas positions, ascending."""
    rows: np.ndarray
    """Indices in the batch."""
    keep: int
    """The fewest rows that go on."""
    processed: int
    """Position before which all positions of the block went through all layers."""


class MaskedRows:
    """Masked rows of all requests on the device: ``[num_requests, width]``, padded with
    row 0.
    """

    def __init__(
        self, requests: Sequence[OwnMasks | None], width: int, device: torch.device
    ) -> None:
        """``requests``: masked rows per request; None for a request that drops no rows."""
        shape = len(requests), width
        rows = np.zeros(shape, dtype=np.int64)
        keep = np.zeros((len(requests), 1), dtype=np.int64)
        exist, have_neighbours, unprocessed = flags = np.zeros((3, *shape), dtype=bool)
        for number, request_masks in enumerate(requests):
            if request_masks is None:
                continue
            size, keep[number] = request_masks.rows.size, request_masks.keep
            rows[number, :size] = request_masks.rows
            exist[number, :size] = True
            have_neighbours[number, : size - 1] = np.diff(request_masks.positions) == 1
            unprocessed[number, :size] = (
                request_masks.positions >= request_masks.processed
            )
        self.rows = on_device(rows, device)
        self.flags = on_device(flags, device, torch.bool)
        """Three flags per row: it is not padding; its right neighbour is the next
        masked row; no pass over the block has taken it through all layers yet.
        """
        self.keep = on_device(keep, device)
        """``OwnMasks.keep``, ``[num_requests, 1]``."""

    def graph_inputs(self) -> list[Tensor]:
        return [self.rows, self.flags, self.keep]

    def importance(self, q: Tensor, k: Tensor) -> Tensor:
        """Attention that each masked row gets from the masked rows of its request,
        summed over heads, float32 ``[num_requests, width]``; the paper's I.
        """
        exist = self.flags[0]
        queries = q[self.rows].float()
        keys = k[self.rows].float()
        # Query heads share KV heads in consecutive groups.
        queries = queries.unflatten(2, (keys.shape[2], -1))
        scores = torch.einsum("rihgd,rjhd->rhgij", queries, keys).flatten(1, 2)
        scores = scores / math.sqrt(q.shape[-1])
        is_key = exist[:, None, None, :]
        scores = scores.masked_fill(~is_key, -math.inf)
        highest = F.max_pool1d(
            scores.flatten(0, 2), POOL_KERNEL_SIZE, 1, POOL_KERNEL_SIZE // 2
        ).view_as(scores)
        attention = highest.masked_fill(~is_key, -math.inf).softmax(dim=-1)
        return (attention * exist[:, None, :, None]).sum(dim=(1, 2))

    def stay(self, rises: Tensor, num_rows: int, options: FocusOptions) -> Tensor:
        """Batch rows that go on, bool ``[num_rows]``. ``rises``: increase of each
        masked row's importance between the first two layers; the paper's ΔI.
        """
        leave = self.flags[0] & ~self.selected(rises, options)
        counts = torch.zeros(num_rows, dtype=torch.int64, device=rises.device)
        return counts.index_add_(0, self.rows.flatten(), leave.flatten().long()) == 0

    def selected(self, rises: Tensor, options: FocusOptions) -> Tensor:
        """Masked rows that go on, bool ``[num_requests, width]``.

        These are the rows that rise most, their left neighbours, and every row to the
        left that no pass over the block has processed yet, because later rows attend to
        it.
        """
        exist, have_neighbours, unprocessed = self.flags
        chosen = torch.zeros_like(exist)
        if options.select == "dynamic":
            wide = rises.double()
            counts = exist.sum(dim=1, keepdim=True)
            mean = _sum(wide, exist) / counts
            squares = _sum((wide - mean).square(), exist)
            deviation = (squares / (counts - int(options.deviation == "sample"))).sqrt()
            chosen = exist & (wide >= mean + deviation)
        # The leftmost of equal rises comes first.
        order = rises.masked_fill(~exist, -math.inf).argsort(
            dim=1, descending=True, stable=True
        )
        highest = order.argsort(dim=1) < self.keep
        too_few = chosen.sum(dim=1, keepdim=True) < self.keep
        chosen = torch.where(too_few, highest, chosen)
        chosen = chosen | (F.pad(chosen[:, 1:], (0, 1)) & have_neighbours)
        numbers = torch.arange(1, exist.shape[1] + 1, device=exist.device)
        rightmost = (chosen * numbers).amax(dim=1, keepdim=True)
        return chosen | (unprocessed & (numbers < rightmost))


def _sum(values: Tensor, exist: Tensor) -> Tensor:
    """Sum per request without padding, ``[num_requests, 1]``."""
    return values.masked_fill(~exist, 0).sum(dim=1, keepdim=True)
