"""Parameters of a model, filled from a checkpoint's tensors."""

from collections.abc import Callable, Collection, Iterable

import torch
from torch import nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from dllm_engine.families import NamedModules, Shard
from dllm_engine.model_executor.models.config_keys import ExpertShape
from dllm_engine.model_executor.models.names import shards_of


def fill_parameters(
    model: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    locate: Callable[[str], tuple[str, Shard]],
    *,
    modules: NamedModules,
    experts: ExpertShape | None,
    hidden_size: int,
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
    missing or of a wrong shape; vLLM looks for missing norms alone.
    """
    parameters, model_name = dict(model.named_parameters()), type(model).__name__
    filled: set[tuple[str, Shard]] = set()
    for tensor_name, tensor in weights:
        name, shard = locate(tensor_name)
        if name in ignored:
            continue
        if (name, shard) in filled:
            raise ValueError(f"checkpoint tensor {tensor_name!r} comes twice; is a file there under two names?")
        if name not in parameters and _is_group_index(name):
            _check_group_index(tensor_name, tensor)
            continue
        if name not in parameters:
            raise ValueError(f"checkpoint tensor {tensor_name!r} has no place in {model_name}")
        parameter = parameters[name]
        loader = getattr(parameter, "weight_loader", default_weight_loader)
        if experts is not None and isinstance(shard, tuple):
            _check_expert(tensor_name, tensor, str(shard[0]), experts.intermediate_size, hidden_size)
        part = () if shard is None else (name, *shard) if isinstance(shard, tuple) else (shard,)
        try:
            loader(parameter, tensor, *part)
        except (AssertionError, RuntimeError) as error:
            raise ValueError(
                f"checkpoint tensor {tensor_name!r} of shape {list(tensor.shape)} does not fit {name}: {error}"
            ) from error
        filled.add((name, shard))
    wanted = {(name, shard) for name in parameters for shard in shards_of(name, modules, experts)}
    missing = sorted(
        name if shard is None else f"{name}[{shard}]" for name, shard in wanted - filled if not _may_be_missing(name)
    )
    if missing and whole:
        raise ValueError(
            f"the checkpoint lacks {len(missing)} tensors of {model_name}, the first for {missing[0]}; is a "
            f"safetensors shard missing?"
        )
    return {name for name, _ in filled}


def _check_expert(tensor_name: str, tensor: torch.Tensor, part: str, width: int, hidden_size: int) -> None:
    """Raise ``ValueError`` for a projection of a wrong shape, which vLLM's loader of experts would take in part."""
    expected = [hidden_size, width] if part == "w2" else [width, hidden_size]
    is_projection = tensor.dim() == 2 and tensor.is_floating_point() and tensor_name.endswith(".weight")
    if is_projection and list(tensor.shape) != expected:
        raise ValueError(f"checkpoint tensor {tensor_name!r} has the shape {list(tensor.shape)}, not {expected}")


def _is_group_index(parameter_name: str) -> bool:
    """Return True if a parameter maps input features to groups of weights (GPTQ)."""
    return "g_idx" in parameter_name.rpartition(".")[2]


def _may_be_missing(parameter_name: str) -> bool:
    """Return True if a checkpoint may lack a parameter: GPTQ's consecutive groups, and the zero biases that vLLM gives
    experts in GPTQ's format."""
    return _is_group_index(parameter_name) or parameter_name.endswith((".w13_bias", ".w2_bias"))


def _check_group_index(tensor_name: str, tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` unless groups follow each other, as vLLM's kernels have them."""
    if (tensor.diff() < 0).any():
        raise ValueError(
            f"checkpoint tensor {tensor_name!r}: vLLM does not support groups that are out of order (desc_act=true); "
            f"quantize again with desc_act=false"
        )
