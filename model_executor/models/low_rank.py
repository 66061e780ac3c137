"""Low-rank updates of a module for some of the rows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.utils import set_weight_attrs


class LowRankUpdate(nn.Module):
    """``B (A x)``, added to a module whose input is split between tensor-parallel
    ranks.
    """

    def __init__(self, input_size: int, output_size: int, rank: int) -> None:
        """``input_size``: size over all ranks."""
        super().__init__()
        columns = input_size // get_tensor_model_parallel_world_size()
        self.a = nn.Parameter(torch.empty(rank, columns), requires_grad=False)
        self.b = nn.Parameter(torch.empty(output_size, rank), requires_grad=False)
        set_weight_attrs(self.a, {"weight_loader": _load_columns})

    def forward(self, inputs: Tensor) -> Tensor:
        """``[num_rows, output_size]`` from this rank's ``[num_rows, columns]``."""
        reduced = tensor_model_parallel_all_reduce(F.linear(inputs, self.a))
        return F.linear(reduced, self.b)


def _load_columns(param: nn.Parameter, tensor: Tensor) -> None:
    """Load the columns of this rank. When vLLM reloads weights into other memory, it
    replaces the argument named ``param``."""
    columns = param.shape[1]
    first = get_tensor_model_parallel_rank() * columns
    if tensor.shape[1] != columns * get_tensor_model_parallel_world_size():
        raise RuntimeError(f"{tensor.shape[1]} columns")
    param.data.copy_(tensor[:, first : first + columns])
