"""LoRA adapters, merged into a checkpoint's weights while these are loaded: W + scale ·
B A.

PEFT saves the folder (``adapter_config.json``, ``adapter_model.safetensors``), with the
module names of the released checkpoints. vLLM's LoRA layers add an adapter per row, by
a table for the rows of the whole step. Layer passes change the rows between layers, so
here one adapter serves all requests of an engine.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from vllm.config import VllmConfig

from dllm_engine.model_executor.loading.files import (
    ADAPTER_CONFIG,
    FLOAT_TYPES,
    check_content,
    check_safetensors,
    read_object,
)
from dllm_engine.model_executor.loading.module_patterns import ModulePatterns
from dllm_engine.text import explain, shortened

WEIGHTS = "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_REFUSED = (
    "alora_invocation_tokens",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "use_qalora",
)
"""Keys of PEFT's config that mean more than W + scale · B A."""
_LOAD_FORMATS = ("auto", "hf", "safetensors")
"""Formats that an adapter can be merged into."""
MERGE = "merge the adapter into the checkpoint with PEFT's merge_and_unload()"


class _AdapterConfig(BaseModel):
    """PEFT's config, as far as W + scale · B A needs it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    peft_type: Literal["LORA"]
    r: PositiveInt = 8
    lora_alpha: float
    rank_pattern: dict[str, PositiveInt] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    """Scale by alpha / √r (rsLoRA) instead of alpha / r."""
    bias: Literal["none"] = "none"
    init_lora_weights: Literal[True, False, "gaussian", "orthogonal", "eva"] | None = (
        None
    )
    """Values with which the weights of the checkpoint itself stay as they are."""


class LoraAdapter:
    """Adapter in a folder. Its tensors are read when they are needed."""

    def __init__(self, folder: str, option: str = "lora_path") -> None:
        """``option``: the option that names the folder. Raises ``ValueError`` naming
        the file, and the key or tensor that is missing, damaged or not supported.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(
                f"{option}={folder!r} is not a folder; download the adapter and name its "
                f"folder"
            )
        for name in (ADAPTER_CONFIG, WEIGHTS):
            check_content(self.folder / name)
        self.ranks: dict[str, int] = {}
        self.scales = self._read_scales(_read_config(self.folder / ADAPTER_CONFIG))
        """Scale and parts of each update, by the name of the weight's tensor in the
        checkpoint.
        """

    def check(self, names: Collection[str]) -> None:
        """Raise ``ValueError`` naming a weight that the adapter changes but the model's
        ``names`` do not contain.
        """
        for name in self.scales:
            if name not in names:
                raise ValueError(
                    f"{self.folder / WEIGHTS}: the model has no {shortened(name)}; is "
                    f"the adapter for another one?"
                )

    def merged(
        self, weights: Iterable[tuple[str, Tensor]], *, whole: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """A checkpoint's tensors with the adapter added. The sum is rounded once, to
        the tensor's type. ``whole``: ``weights`` are all weights of the model, so that
        each update must have its weight among them."""
        names = set()
        with safe_open(self.folder / WEIGHTS, framework="pt") as file:
            for name, tensor in weights:
                names.add(name)
                if name not in self.scales:
                    yield name, tensor
                    continue
                a, b = (part.to(tensor.device).float() for part in _parts(file, name))
                if tensor.shape != (b.shape[0], a.shape[1]):
                    raise ValueError(
                        f"{self.folder / WEIGHTS}: {shortened(name)} and its update "
                        f"differ in shape"
                    )
                merged = torch.addmm(tensor.float(), b, a, alpha=self.scales[name]).to(
                    tensor.dtype
                )
                if not merged.isfinite().all():
                    raise ValueError(
                        f"{self.folder / WEIGHTS}: {shortened(name)} with its update "
                        f"holds NaN or infinity as {tensor.dtype}"
                    )
                yield name, merged
        if whole:
            self.check(names)

    def updates(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name of each changed weight, and A and scale · B of its update, in float32."""
        with safe_open(self.folder / WEIGHTS, framework="pt") as file:
            for name, scale in self.scales.items():
                a, b = _parts(file, name)
                yield name, a.float(), scale * b.float()

    def _read_scales(self, config: _AdapterConfig) -> dict[str, float]:
        path = self.folder / WEIGHTS
        ranks: dict[str, dict[str, int]] = {"A": {}, "B": {}}
        try:
            with safe_open(path, framework="pt") as file:
                for name in sorted(file.keys()):
                    match = _TENSOR.fullmatch(name)
                    if match is None:
                        raise ValueError(
                            f"{path}: tensor {shortened(name)} is not of the kind "
                            f"'….lora_A.weight'; {MERGE}"
                        )
                    tensor = file.get_slice(name)
                    if (dtype := tensor.get_dtype()) not in FLOAT_TYPES:
                        raise ValueError(
                            f"{path}: {shortened(name)} is of type {dtype}, not "
                            f"{', '.join(FLOAT_TYPES)}"
                        )
                    shape = tensor.get_shape()
                    if len(shape) != 2 or 0 in shape:
                        raise ValueError(
                            f"{path}: {shortened(name)} has the shape {shape}, not "
                            f"that of a matrix"
                        )
                    ranks[match["part"]][match["module"]] = (
                        shape[0] if match["part"] == "A" else shape[1]
                    )
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} is missing or damaged ({error}); save it with PEFT's "
                f"save_pretrained"
            ) from error
        for module, _ in ranks["A"].items() ^ ranks["B"].items():
            raise ValueError(
                f"{path}: lora_A and lora_B of {shortened(module)} are not both there, "
                f"of one rank; save it again"
            )
        if not ranks["A"]:
            raise ValueError(
                f"{path} holds no tensors of the kind '….lora_A.weight'; save it again"
            )
        scales = _Scales(self.folder / ADAPTER_CONFIG, config)
        self.ranks = {f"{module}.weight": rank for module, rank in ranks["A"].items()}
        return {
            f"{module}.weight": scales.scale(module, rank)
            for module, rank in ranks["A"].items()
        }


def _parts(file: safe_open, name: str) -> tuple[Tensor, Tensor]:
    """A and B of the update of a weight's tensor."""
    module = f"base_model.model.{name.removesuffix('.weight')}"
    a, b = (file.get_tensor(f"{module}.lora_{part}.weight") for part in "AB")
    return a, b


class DraftAdapter(LoraAdapter):
    """Adapter for the drafts of self-speculation, in a folder of the checkpoint. It
    updates the output projection of attention in every layer.
    """

    def __init__(self, vllm_config: VllmConfig, folder: str) -> None:
        config = vllm_config.model_config.hf_config
        super().__init__(
            str(Path(vllm_config.model_config.model) / folder), "draft_lora"
        )
        family = config.family
        if family.draft_rank is None:
            raise ValueError(
                f"draft_lora={folder!r}: {family.name} drafts nothing; leave it unset"
            )
        names = family.names
        released = next(
            released
            for released, (ours, _) in names.in_layer.items()
            if ours == "out_proj"
        )
        self.prefix = names.layers
        self.weights = [
            f"{self.prefix}.{number}.{released}.weight"
            for number in range(config.num_hidden_layers)
        ]
        """Name of each layer's weight."""
        for name in {*self.weights} ^ self.scales.keys():
            raise ValueError(
                f"{self.folder / WEIGHTS} must change {released} of every layer, and "
                f"nothing else; {shortened(name)} is missing or extra"
            )

    def rank(self, layer: int) -> int:
        """The rank of the update in a layer."""
        return self.ranks[self.weights[layer]]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters of ``LowRankUpdate`` in each layer, under names like those of the
        checkpoint.
        """
        for name, a, b in self.updates():
            module = f"{self.prefix}.{self.weights.index(name)}.draft_update"
            yield f"{module}.a", a
            yield f"{module}.b", b


class _Scales:
    """PEFT's factors of updates, from a config."""

    def __init__(self, path: Path, config: _AdapterConfig) -> None:
        self.path = path
        self.config = config
        self.ranks = ModulePatterns(path, "rank_pattern", config.rank_pattern)
        self.alphas = ModulePatterns(path, "alpha_pattern", config.alpha_pattern)

    def scale(self, module: str, rank: int) -> float:
        """Factor of a module's update, whose tensors have this rank."""
        stated = self.ranks.value_for(module, self.config.r)
        if rank != stated:
            raise ValueError(
                f"{self.path} states the rank {stated} for {shortened(module)}, whose "
                f"tensors in {WEIGHTS} have the rank {rank}; copy both files of one "
                f"adapter"
            )
        alpha: float = self.alphas.value_for(module, self.config.lora_alpha)
        scale = alpha / (math.sqrt(rank) if self.config.use_rslora else rank)
        if abs(scale) > torch.finfo(torch.float32).max:
            raise ValueError(
                f"{self.path}: lora_alpha={shortened(alpha)} of {shortened(module)} is "
                f"more than a float32 holds"
            )
        return scale


def check_adapter(folder: str, vllm_config: VllmConfig) -> None:
    """Raise ``ValueError`` if the LoRA adapter in ``folder`` cannot be merged into an
    engine's weights.
    """
    adapter = LoraAdapter(folder)
    where = f"lora_path={folder!r}"
    load_format = vllm_config.load_config.load_format
    model_config = vllm_config.model_config
    if load_format not in _LOAD_FORMATS:
        raise ValueError(
            f"{where}: load_format={load_format!r} adds no adapter; use "
            f"{', '.join(_LOAD_FORMATS)}"
        )
    config = model_config.hf_config
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{where}: the checkpoint {model_config.model} is quantized; {MERGE} "
            f"before quantizing it"
        )
    head = f"{config.family.names.head}.weight"
    if config.tie_word_embeddings and head in adapter.scales:
        raise ValueError(
            f"{where}: the model's head is its embedding, so {head!r} cannot change; "
            f"{MERGE}"
        )
    # Weights that have to be downloaded are checked when they are loaded.
    if names := check_safetensors(model_config.model):
        adapter.check(names)


def _read_config(path: Path) -> _AdapterConfig:
    """PEFT's config. Raises ``ValueError`` naming a key that means more than W + scale
    · B A.
    """
    stated = read_object(path)
    for name in _REFUSED:
        if stated.get(name):
            raise ValueError(
                f"{path}: {name}={shortened(stated[name])} is not supported; {MERGE}"
            )
    try:
        return _AdapterConfig.model_validate(stated)
    except ValidationError as error:
        raise ValueError(
            f"{path}: {explain(error, '')}; save the adapter again, or {MERGE}"
        ) from None
