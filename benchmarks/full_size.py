"""Loads a checkpoint of a released model's size: the memory at its peak and at rest, and the time beside reading alone.

`make` writes random bfloat16 weights in the released layout; values change neither memory nor time. `load` reads the
files alone and loads them into an engine in this process, each with the files out of the system's cache first, and
answers a prompt.

    python benchmarks/full_size.py make FOLDER [--shape llada-8b] [--layers N] [--shards 6]
    python benchmarks/full_size.py load FOLDER [--output FILE.json]

LLaDA-8B takes 16 GB of disk. With `--cache kept`, files may come from memory; time then says what loading computes.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from program import add_common_arguments, parse, report
from safetensors.torch import save_file
from transformers import PretrainedConfig

from dllm_engine import LLM, DiffusionParams
from dllm_engine.bench.machine import now
from dllm_engine.bench.memory import peak, resident, restart_peak
from dllm_engine.bench.random_model import NAMED_SHAPES, named_shape
from dllm_engine.checkpoints import load_config
from dllm_engine.families import family_of
from dllm_engine.model_executor.model_runner import DiffusionModelRunner
from dllm_engine.model_executor.models.checkpoint import INDEX, MODEL_CLASSES, shapes_in_layer
from dllm_engine.sizing import weight_bytes

READ_BYTES = 1 << 24
ALLOWED_SHARE, ALLOWED_BYTES, ALLOWED_TIME = 1.1, 1_500_000_000, 1.3
"""Peak and rest are to stay within 1.1 × the weights + 1.5 GB, loading within 1.3 × reading alone."""


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
    weight_map = {}
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


def files_of(folder: Path, *, cached: bool) -> Iterator[Path]:
    """The checkpoint's files, out of the system's cache unless they may be there."""
    os.sync()
    for path in sorted(folder.glob("*.safetensors")):
        if not cached:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield path


def seconds_to_read(paths: list[Path]) -> float:
    buffer, start = bytearray(READ_BYTES), now()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return now() - start


def load(options: argparse.Namespace) -> None:
    cached, gb, seconds = options.cache == "kept", 1e9, {}
    load_model = DiffusionModelRunner.load_model

    def timed(runner: DiffusionModelRunner, **arguments: bool) -> None:
        list(files_of(options.folder, cached=cached))
        seconds["before"] = restart_peak()
        start = now()
        load_model(runner, **arguments)
        seconds["load"] = now() - start

    reads = [seconds_to_read(list(files_of(options.folder, cached=cached)))]
    with mock.patch.object(DiffusionModelRunner, "load_model", timed):
        llm = LLM(
            str(options.folder),
            skip_tokenizer_init=True,
            max_model_len=512,
            max_num_seqs=4,
            cache_method="dual",
            kv_cache_memory_bytes=1 << 30,
            use_tqdm_on_load=True,
        )
    most, rest = peak(), resident()
    config = load_config(str(options.folder))
    params = DiffusionParams(gen_length=32, block_length=32, steps=options.steps, ignore_eos=True)
    start = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": list(range(100, 164))}], params, use_tqdm=False)
    answered = time.perf_counter() - start
    assert len(output.outputs[0].token_ids) == 32
    after = peak(), resident()
    reads.append(seconds_to_read(list(files_of(options.folder, cached=cached))))
    weights = weight_bytes(config, 1, 2)
    allowed = ALLOWED_SHARE * weights + ALLOWED_BYTES
    read = sum(reads) / len(reads)
    report(
        options,
        memory=[
            {"of": name, "GB": size / gb, "allowed": allowed / gb, "held": size <= allowed}
            for name, size in (("peak of loading", most), ("at rest", rest), ("after an answer", after[1]))
        ],
        weights_gb=weights / gb,
        before_gb=seconds["before"] / gb,
        peak_of_answer_gb=after[0] / gb,
        read_seconds=reads,
        load_seconds=seconds["load"],
        load_over_read=seconds["load"] / read,
        allowed_time=ALLOWED_TIME,
        answer_seconds=answered,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="write a checkpoint")
    making.add_argument("folder", type=Path)
    making.add_argument("--shape", default="llada-8b", help=f"{', '.join(NAMED_SHAPES)}, or one with /N")
    making.add_argument("--layers", type=int, help="default: the model's")
    making.add_argument("--shards", type=int, default=6)
    loading = commands.add_parser("load", help="load it and answer")
    loading.add_argument("folder", type=Path)
    loading.add_argument("--cache", choices=("dropped", "kept"), default="dropped")
    loading.add_argument("--steps", type=int, default=4, help="denoising steps of the answer")
    add_common_arguments(loading)
    making.set_defaults(clock="wall", output=None)
    options = parse(parser)
    if options.command == "make":
        make(options.folder, options.shape, options.layers, options.shards)
    else:
        load(options)


if __name__ == "__main__":
    main()
