"""Parameters of a model, filled from a checkpoint's tensors."""

from collections.abc import Callable, Collection, Iterable

import torch
from torch import nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from dllm_engine.families import NamedModules, Shard
from dllm_engine.model_executor.loading.quantization import check_group_index, is_group_index, may_be_missing
from dllm_engine.model_executor.models.config_keys import ExpertShape
from dllm_engine.model_executor.models.names import shards_of


def fill_parameters(
    model: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    locate: Callable[[str], tuple[str, Shard]],
    *,
    modules: NamedModules,
    experts: ExpertShape | None,
    ignored: Collection[str],
    whole: bool,
) -> set[str]:
    """Fill the parameters of a model.

    Args:
        weights: the tensors by their names in the checkpoint.
        locate: finds the parameter of a tensor, and the shard of it that it fills.
        modules: of a layer.
        ignored: parameters that the model takes from elsewhere.
        whole: whether these are all of the checkpoint's tensors.

    Returns the names of the parameters that were filled. Raises ``ValueError`` naming the tensor where one is unknown,
    missing, of a wrong shape, or not finite.
    """
    parameters, model_name = dict(model.named_parameters()), type(model).__name__
    wanted = {(name, shard) for name in parameters for shard in shards_of(name, modules, experts)}
    filled: set[tuple[str, Shard]] = set()
    for tensor_name, tensor in weights:
        name, shard = locate(tensor_name)
        if name in ignored:
            continue
        if (name, shard) in filled:
            raise ValueError(f"checkpoint tensor {tensor_name!r} comes twice; is a file there under two names?")
        if name not in parameters and is_group_index(name):
            check_group_index(tensor_name, tensor)
            continue
        if name not in parameters:
            raise ValueError(f"checkpoint tensor {tensor_name!r} has no place in {model_name}")
        if not is_finite(tensor):
            raise ValueError(f"checkpoint tensor {tensor_name!r} contains NaN or infinite values")
        parameter = parameters[name]
        loader = getattr(parameter, "weight_loader", default_weight_loader)
        part = () if shard is None else (name, *shard) if isinstance(shard, tuple) else (shard,)
        try:
            loader(parameter, tensor, *part)
        except (AssertionError, RuntimeError) as error:
            raise ValueError(
                f"checkpoint tensor {tensor_name!r} of shape {list(tensor.shape)} does not fit {name}: {error}"
            ) from error
        filled.add((name, shard))
    missing = sorted(
        name if shard is None else f"{name}[{shard}]" for name, shard in wanted - filled if not may_be_missing(name)
    )
    if missing and whole:
        raise ValueError(
            f"the checkpoint lacks {len(missing)} tensors of {model_name}, the first for {missing[0]}; is a "
            f"safetensors shard missing?"
        )
    return {name for name, _ in filled}


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has neither NaN nor infinite values."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # In one pass and without a copy: NaN is the least and the greatest of numbers with a NaN. PyTorch compares no
    # numbers of eight bits.
    ends = torch.stack(torch.aminmax(tensor.half() if tensor.itemsize == 1 else tensor))
    return bool(torch.isfinite(ends).all())
