"""A LoRA adapter that becomes part of a checkpoint's weights while they are loaded: W +
scale · B A.

The folder is as PEFT saves it (``adapter_config.json``, ``adapter_model.safetensors``),
with the module names of the released checkpoints. vLLM's own LoRA layers add an adapter
per row of a batch, by a table made for the rows of the whole step; layer passes change
the rows between layers, so one adapter serves all requests of an engine here.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.config import VllmConfig

from dllm_engine.model_executor.loading.files import (
    FLOAT_TYPES,
    check_content,
    check_number,
    check_safetensors,
    read_object,
)
from dllm_engine.model_executor.loading.module_patterns import ModulePatterns
from dllm_engine.text import shortened

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_REFUSED = (
    *(
        "alora_invocation_tokens",
        "fan_in_fan_out",
        "layer_replication",
        "lora_bias",
        "megatron_config",
    ),
    *(
        "modules_to_save",
        "target_parameters",
        "trainable_token_indices",
        "use_dora",
        "use_qalora",
    ),
)
"""Keys of PEFT's config that mean more than W + scale · B A."""
_INITIAL_WEIGHTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` with which the checkpoint's own weights stay as they
are.
"""
_DEFAULT_RANK = 8
"""PEFT's own, of a config without ``r``."""
_LOAD_FORMATS = ("auto", "hf", "safetensors")
"""Formats that an adapter can be merged into."""
MERGE = "merge the adapter into the checkpoint with PEFT's merge_and_unload()"


class LoraAdapter:
    """The adapter in a folder. Its tensors are read when they are needed."""

    def __init__(self, folder: str) -> None:
        """Raises ``ValueError`` naming the file, and the key or tensor, that is
        missing, damaged or not supported.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(
                f"lora_path={folder!r} is no folder; download the adapter and name its "
                f"folder"
            )
        for name in (CONFIG, WEIGHTS):
            check_content(self.folder / name)
        self.scales = self._read_scales(_read_config(self.folder / CONFIG))
        """By the name of the weight's tensor in the checkpoint."""

    def check(self, names: Collection[str]) -> None:
        """Raise ``ValueError`` naming a weight that the adapter changes and that is not
        among a model's ``names``.
        """
        for name in self.scales:
            if name not in names:
                raise ValueError(
                    f"{self.folder / WEIGHTS}: the model has no {shortened(name)}; is "
                    f"the adapter for another one?"
                )

    def merged(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, whole: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """A checkpoint's tensors with what the adapter adds. The sum is rounded once,
        to the tensor's type. ``whole``: ``weights`` are all of the model's, so that
        each update must find its own."""
        names = set()
        with safe_open(self.folder / WEIGHTS, framework="pt") as file:
            for name, tensor in weights:
                names.add(name)
                if name not in self.scales:
                    yield name, tensor
                    continue
                module = f"base_model.model.{name.removesuffix('.weight')}"
                a, b = (
                    file.get_tensor(f"{module}.lora_{part}.weight")
                    .to(tensor.device)
                    .float()
                    for part in "AB"
                )
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

    def _read_scales(self, config: dict[str, Any]) -> dict[str, float]:
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
        scales = _Scales(self.folder / CONFIG, config)
        return {
            f"{module}.weight": scales.scale(module, rank)
            for module, rank in ranks["A"].items()
        }


class _Scales:
    """PEFT's factors of updates, as a config states them."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.rank = config.get("r", _DEFAULT_RANK)
        self.alpha = config["lora_alpha"]
        self.uses_root = config.get("use_rslora", False)
        """True for alpha / √r (rsLoRA) instead of alpha / r."""
        self.ranks, self.alphas = (
            ModulePatterns(path, name, config.get(name))
            for name in ("rank_pattern", "alpha_pattern")
        )

    def scale(self, module: str, rank: int) -> float:
        """The factor of the update of a module, whose tensors have this rank."""
        stated = self.ranks.value_for(module, self.rank)
        if rank != stated:
            raise ValueError(
                f"{self.path} states the rank {stated} for {shortened(module)}, whose "
                f"tensors in {WEIGHTS} have the rank {rank}; copy both files of one "
                f"adapter"
            )
        alpha: float = self.alphas.value_for(module, self.alpha)
        scale = alpha / (math.sqrt(rank) if self.uses_root else rank)
        if abs(scale) > torch.finfo(torch.float32).max:
            raise ValueError(
                f"{self.path}: lora_alpha={shortened(alpha)} of {shortened(module)} is "
                f"more than a float32 holds"
            )
        return scale


def check_adapter(folder: str, vllm_config: VllmConfig) -> None:
    """Raise ``ValueError`` where the LoRA adapter in ``folder`` cannot become part of
    an engine's weights.
    """
    adapter, where = LoraAdapter(folder), f"lora_path={folder!r}"
    load_format, model_config = (
        vllm_config.load_config.load_format,
        vllm_config.model_config,
    )
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
    # Those of a model that has to be downloaded are checked when they are loaded.
    if names := check_safetensors(model_config.model):
        adapter.check(names)


def _read_config(path: Path) -> dict[str, Any]:
    """Content of PEFT's config; raises ``ValueError`` naming a key that means more than
    W + scale · B A.
    """
    config = read_object(path)
    if config.get("peft_type") != "LORA":
        raise ValueError(
            f"{path}: peft_type={shortened(config.get('peft_type'))} is not supported; "
            f"only 'LORA' is"
        )
    if type(alpha := config.get("lora_alpha")) not in (int, float):
        raise ValueError(f"{path}: lora_alpha={shortened(alpha)} must be a number")
    check_number(path, "lora_alpha", alpha)
    _check_rank(path, "r", config.get("r", _DEFAULT_RANK))
    for pattern in ("alpha_pattern", "rank_pattern"):
        _check_pattern(path, pattern, config.get(pattern))
    if not isinstance(config.get("use_rslora", False), bool):
        raise ValueError(
            f"{path}: use_rslora={shortened(config['use_rslora'])} must be true or "
            f"false"
        )
    for name in _REFUSED:
        if config.get(name):
            raise ValueError(
                f"{path}: {name}={shortened(config[name])} is not supported; {MERGE}"
            )
    if config.get("bias", "none") != "none":
        raise ValueError(
            f"{path}: bias={shortened(config['bias'])} is not supported; {MERGE}"
        )
    if (initial := config.get("init_lora_weights")) not in _INITIAL_WEIGHTS:
        raise ValueError(
            f"{path}: init_lora_weights={shortened(initial)} changes the checkpoint's "
            f"own weights; {MERGE}"
        )
    return config


def _check_rank(path: Path, name: str, rank: object) -> None:
    if type(rank) is not int or rank < 1:
        raise ValueError(
            f"{path}: {name}={shortened(rank)} must be an integer of at least 1"
        )


def _check_pattern(path: Path, name: str, patterns: object) -> None:
    """Raise ``ValueError`` unless ``patterns`` are numbers by the ends of module names,
    or null.
    """
    if patterns is None:
        return
    if not isinstance(patterns, dict):
        raise ValueError(f"{path}: {name}={shortened(patterns)} must be an object")
    for key, value in patterns.items():
        where = f"{name}[{shortened(key)}]"
        if name == "rank_pattern":
            _check_rank(path, where, value)
        elif value is None:
            raise ValueError(f"{path}: {where}=null must be a number")
        check_number(path, where, value)
