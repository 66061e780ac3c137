"""Filling of a model's parameters from a checkpoint's tensors."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import fused_moe_make_expert_params_mapping
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from dllm_engine.families import ExpertShape, NamedModules, Shard, TensorNames
from dllm_engine.model_executor.loading.files import StoredTensor
from dllm_engine.text import cut, shortened


class TensorError(ValueError):
    """Error about a tensor that does not fit the model."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"checkpoint tensor {shortened(name)} {reason}")
        self.name = name


@contextmanager
def files_named(tensors: Mapping[str, StoredTensor]) -> Iterator[None]:
    """Add the file of a tensor to the error about it."""
    try:
        yield
    except TensorError as error:
        if (stored := tensors.get(error.name)) is None:
            raise
        raise ValueError(f"{stored.path}: {error}") from error


class FillableModel(Protocol):
    """Protocol of models whose parameters can be filled."""

    names: ClassVar[TensorNames]
    config: Any
    experts: ExpertShape | None
    has_tied_head: bool
    takes_parts: bool
    """True while tensors arrive in parts, so that no tensor counts as missing."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...


_TIED = ("embedding.weight", "lm_head.weight")


def fill_parameters(
    model: FillableModel, weights: Iterable[tuple[str, Tensor]]
) -> set[str]:
    """Fill the parameters of a model with tensors by their names in the checkpoint: all
    parameters, unless the model takes parts. Returns the names of the filled
    parameters. Raises ``ValueError`` naming a tensor that is unknown, missing (vLLM
    checks only norms) or of a wrong shape."""
    parameters = dict(model.named_parameters())
    in_layer = _modules_in_layer(model)
    filled: set[tuple[str, Shard]] = set()
    tied: list[Tensor] = []
    """Embedding and head of a model that ties them."""
    for tensor_name, tensor in weights:
        name, shard = _locate(tensor_name, model, in_layer)
        if model.has_tied_head and name in _TIED:
            tied.append(tensor)
            if len(tied) == len(_TIED) and not torch.equal(*tied):
                raise ValueError(
                    f"{model.names.head}.weight differs from {model.names.embedding}"
                    f".weight, which the config ties to it; set "
                    f'hf_overrides={{"tie_word_embeddings": false}}'
                )
            if name == "lm_head.weight":
                continue
        if (name, shard) in filled:
            raise TensorError(
                tensor_name, "comes twice; is a file there under two names?"
            )
        if name not in parameters and _is_group_index(name):
            if (tensor.diff() < 0).any():
                raise TensorError(
                    tensor_name,
                    "has groups that are out of order (desc_act=true), which vLLM does "
                    "not support; quantize again with desc_act=false",
                )
            continue
        if name not in parameters:
            raise TensorError(tensor_name, f"has no place in {type(model).__name__}")
        parameter = parameters[name]
        if model.experts is not None and isinstance(shard, tuple):
            sizes = model.experts.intermediate_size, model.config.hidden_size
            _check_expert(tensor_name, tensor, str(shard[0]), *sizes)
        try:
            _load(parameter, name, shard, tensor)
        except (AssertionError, RuntimeError) as error:
            shape = list(tensor.shape)
            reason = " ".join(str(error).split())
            raise TensorError(
                tensor_name, f"of shape {shape} does not fit {name}: {cut(reason)}"
            ) from error
        filled.add((name, shard))
    if not model.takes_parts:
        _check_complete(model, in_layer, parameters, filled)
    return {name for name, _ in filled}


def _check_complete(
    model: FillableModel,
    in_layer: NamedModules,
    parameters: Iterable[str],
    filled: set[tuple[str, Shard]],
) -> None:
    """Raise ``ValueError`` naming a parameter, or a shard, that no tensor has filled."""
    # No tensor fills the others: GPTQ's consecutive groups, the zero biases that vLLM
    # gives experts in GPTQ's format, and a tied head, which vLLM makes a separate
    # parameter while it reloads weights.
    others: tuple[str, ...] = (".w13_bias", ".w2_bias")
    if model.has_tied_head:
        others = (*others, "lm_head.weight")
    needed = [
        name
        for name in parameters
        if not _is_group_index(name) and not name.endswith(others)
    ]
    wanted = {(name, shard) for name in needed for shard in _shards_of(name, in_layer)}
    missing = sorted(
        name if shard is None else f"{name}[{shard}]" for name, shard in wanted - filled
    )
    if missing:
        raise ValueError(
            f"the checkpoint lacks {len(missing)} tensors of {type(model).__name__}, "
            f"the first for {missing[0]}; is a safetensors shard missing?"
        )


def _load(parameter: Tensor, name: str, shard: Shard, tensor: Tensor) -> None:
    """Write a tensor to a parameter, or to a shard of it."""
    loader = getattr(parameter, "weight_loader", default_weight_loader)
    if shard is None:
        loader(parameter, tensor)
    elif isinstance(shard, tuple):
        loader(parameter, tensor, name, *shard)
    else:
        loader(parameter, tensor, shard)


def _modules_in_layer(model: FillableModel) -> NamedModules:
    """The checkpoint's modules in a layer, with the modules of each expert, which are
    parts of vLLM's parameters for all experts.
    """
    if model.experts is None:
        return model.names.in_layer
    projections = "gate_proj", "down_proj", "up_proj"
    experts = fused_moe_make_expert_params_mapping(
        model, *projections, model.experts.num_experts
    )
    shards = {
        f"mlp.{name[:-1]}": (f"mlp.{ours}", (part, number))
        for ours, name, number, part in experts
    }
    return {**model.names.in_layer, **shards}


def _locate(
    tensor_name: str, model: FillableModel, in_layer: NamedModules
) -> tuple[str, Shard]:
    """The parameter, and the shard of it, that a checkpoint's tensor fills."""
    names, (module, _, kind) = model.names, tensor_name.rpartition(".")
    match = re.fullmatch(rf"{re.escape(names.layers)}\.(\d+)\.(.+)", module)
    if match is None:
        ours = {
            names.embedding: "embedding",
            names.final_norm: "final_norm",
            names.head: "lm_head",
        }
        return f"{ours.get(module, module)}.{kind}", None
    layer, inner = match.groups()
    if kind == "expert_bias":  # a parameter of the MLP, or of its router
        return f"layers.{layer}.mlp.expert_bias", None
    part, shard = in_layer.get(inner, (inner, None))
    # vLLM's parameters for all experts have names such as w13_weight.
    dot = "" if part.endswith("_") else "."
    return f"layers.{layer}.{part}{dot}{kind}", shard


def _shards_of(parameter_name: str, in_layer: NamedModules) -> Sequence[Shard]:
    """The shards of a fused parameter; ``(None,)`` for a plain one."""
    # layers.NUMBER.MODULE.weight, or
    # layers.NUMBER.mlp.experts.routed_experts.w13_weight
    name = parameter_name.partition(".")[2].partition(".")[2]
    return [
        shard
        for ours, shard in in_layer.values()
        if shard is not None and name.startswith(ours)
    ] or (None,)


def _check_expert(
    tensor_name: str, tensor: Tensor, part: str, width: int, hidden_size: int
) -> None:
    """Raise ``ValueError`` for a projection of a wrong shape. vLLM's loader of experts
    would load a part of it.
    """
    expected = [hidden_size, width] if part == "w2" else [width, hidden_size]
    is_projection = (
        tensor.dim() == 2
        and tensor.is_floating_point()
        and tensor_name.endswith(".weight")
    )
    if is_projection and list(tensor.shape) != expected:
        raise TensorError(
            tensor_name, f"has the shape {list(tensor.shape)}, not {expected}"
        )


def _is_group_index(parameter_name: str) -> bool:
    """Return True if a parameter maps input features to groups of weights (GPTQ)."""
    return "g_idx" in parameter_name.rpartition(".")[2]
