"""Checkpoints of a released model's shape, with random bfloat16 weights in the released layout."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from dllm_engine.checkpoints import load_config, named_shape
from dllm_engine.families import family_of
from dllm_engine.model_executor.models.checkpoint import INDEX, MODEL_CLASSES, shapes_in_layer


def make(folder: Path, shape: str, layers: int | None, num_shards: int) -> None:
    """Write a checkpoint of a named shape, its tensors in the order of the layers."""
    folder.mkdir(parents=True, exist_ok=True)
    config = named_shape(shape)
    layers_key = next(key for key in ("n_layers", "num_hidden_layers") if key in config)
    config[layers_key] = layers or config[layers_key]
    (folder / "config.json").write_text(json.dumps(config))
    shapes = released_tensors(load_config(str(folder)))
    of_shard = 2 * sum(map(math.prod, shapes.values())) / num_shards
    shards: dict[int, list[str]] = {}
    written = 0
    for name, size in shapes.items():
        number = int((written + math.prod(size)) / of_shard) + 1  # where the tensor's middle lies
        shards.setdefault(number, []).append(name)
        written += 2 * math.prod(size)
    weight_map: dict[str, str] = {}
    for number, names in shards.items():
        file = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        save_file(
            {name: torch.empty(shapes[name], dtype=torch.bfloat16).normal_(std=0.02) for name in names}, folder / file
        )
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def released_tensors(config: PretrainedConfig) -> dict[str, list[int]]:
    """Names and shapes of the tensors of a checkpoint with this config, layer by layer."""
    model = MODEL_CLASSES[family_of(config).architecture]
    shape = model.decoder_shape(config)
    outside = {ours: name for name, ours in model.modules_outside_layers.items()}
    table = [shape.vocab_size, shape.hidden_size]
    tensors = {f"{outside['embedding']}.weight": table}
    for layer in range(shape.num_layers):
        experts = shape.experts_of(layer)
        modules = [*model.modules_in_layer, "mlp.gate"]
        for number in range(experts.num_experts if experts else 0):
            modules += [f"mlp.experts.{number}.{part}_proj" for part in ("gate", "up", "down")]
        names = [f"{model.layer_prefix}.{layer}.{module}.{kind}" for module in modules for kind in ("weight", "bias")]
        places = {model.locate(name): name for name in names}
        for (parameter, part), size in shapes_in_layer(shape, experts).items():
            tensors[places[f"layers.{layer}.{parameter}", part]] = size
    tensors[f"{outside['final_norm']}.weight"] = [shape.hidden_size]
    return tensors if shape.tied_embeddings else tensors | {f"{outside['lm_head']}.weight": table}
