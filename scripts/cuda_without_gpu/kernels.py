"""Compiles every Triton kernel for one GPU, at the sizes of released models and by the launches of `dllm check`."""

import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from unittest.mock import patch

import torch
import triton

import dllm_engine.kernels
from dllm_engine.check.checks import Check, run_checks
from dllm_engine.check.operators import Draw, Sizes, triton_cases
from dllm_engine.check.paged_case import paged_case
from dllm_engine.checkpoints import load_config
from dllm_engine.kernels._operator import Operator
from dllm_engine.kernels.triton import paged_attention
from dllm_engine.kernels.triton.tiles import Tiles, choose_tiles, tiles_by_rule
from dllm_engine.options import EngineOptions
from dllm_engine.speed.gpus import COMPILED_TILES, TILE_HEAD_DIM

from .compiling_driver import CompilingDriver

LLADA, DREAM = "GSAI-ML/LLaDA-8B-Instruct", "Dream-org/Dream-v0-Instruct-7B"
TYPES = (torch.bfloat16, torch.float32)
SPILLED = 32
"""Bytes of registers that a thread may spill. Tiles are chosen so that none are (docs/gpu.md); in variants for other
sizes the compiler leaves up to four registers of sm_80 too many."""
STATED = {16: [(LLADA, 16)], 32: [(LLADA, 32)], 64: [(DREAM, 32)], 128: [(LLADA, 1024), (DREAM, 512)]}
"""Of which requests (model, rows) ``COMPILED_TILES`` states the figures, by tile."""


def checks(driver: CompilingDriver) -> Iterator[Check]:
    """Each operator in each type, at the sizes of both models; then the figures that the project states."""
    operators = dict.fromkeys(name.partition(",")[0] for name in triton_cases([False]))
    for operator in operators:
        for dtype in TYPES:
            yield Check(operator, str(dtype).removeprefix("torch."), partial(_compile, driver, operator, dtype))
    for tile, compiled in COMPILED_TILES.items():
        if f"sm_{driver.capability}" in compiled.registers:
            yield Check("figures of plan --speed", f"{tile} pairs", partial(_compare_stated, driver, tile))


def _compile(driver: CompilingDriver, operator: str, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes that are spilled, and how many may be."""
    before = len(driver.compiled)
    for model in (LLADA, DREAM):
        # A guide attends causally; those for Dream have its heads.
        limited = [False, True] if model == DREAM and dtype == torch.bfloat16 else [False]
        for name, launch in triton_cases(limited).items():
            if name.partition(",")[0] == operator:
                launch(Draw(dtype, dtype, torch.device("cpu")), Sizes.of_model(load_config(model)))
    return max((each.spilled for each in driver.compiled[before:]), default=0), SPILLED


def _compare_stated(driver: CompilingDriver, tile: int) -> tuple[float, float]:
    gpu, stated = f"sm_{driver.capability}", COMPILED_TILES[tile]
    # What was launched before is read again from Triton's cache.
    paged_attention._launches.cache_clear()
    paged_attention._attention_kernel.device_caches.clear()
    before = len(driver.compiled)
    for model, rows in STATED[tile]:
        sizes = Sizes.of_model(load_config(model))
        assert sizes.head_dim == TILE_HEAD_DIM
        case = paged_case(
            [rows], [[100] * sizes.num_kv_heads], sizes.num_heads, sizes.head_dim, EngineOptions().page_size,
            dtype=torch.bfloat16,
        )  # fmt: skip
        with patch.multiple(paged_attention, choose_tiles=_by_rule, choose_splits=lambda *of_call: 4):
            paged_attention.paged_attention(*case.arguments(True, False, False))
    compiled = [each for each in driver.compiled[before:] if each.kernel == "_attention_kernel"]
    registers, shared = max((each.registers, each.shared_memory) for each in compiled)
    found = f"{registers} registers and {shared / 1024:g} KiB"
    wanted = f"{stated.registers[gpu]} registers and {stated.shared_memory[gpu]} KiB"
    if found != wanted:
        files = "docs/gpu.md and dllm_engine/speed/gpus.py"
        raise ValueError(f"{found} with Triton {triton.__version__}, and {files} state {wanted}")
    return 0.0, 0.0


def _by_rule(pairs: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    return tiles_by_rule(pairs, head_dim, dtype)


def _of_this_gpu(pairs: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Also those that were measured on one of this capability."""
    return choose_tiles(pairs, head_dim, dtype, torch.device("cuda", 0))


def main(results: int, capability: int) -> None:
    """Writes a line of JSON for each check to the file descriptor ``results``."""
    driver = CompilingDriver(capability)
    driver.install()
    for module in pkgutil.iter_modules(dllm_engine.kernels.__path__):
        for value in vars(importlib.import_module(f"dllm_engine.kernels.{module.name}")).values():
            if isinstance(value, Operator) and value.triton_kernel:
                value.kernel = value.triton_kernel
    patch.object(paged_attention, "choose_tiles", _of_this_gpu).start()
    with os.fdopen(results, "w", buffering=1) as lines:
        before = 0
        for outcome in run_checks(checks(driver)):
            compiled, before = driver.compiled[before:], len(driver.compiled)
            kernels = {"kernels": [asdict(each) for each in compiled]}
            print(json.dumps(asdict(outcome) | kernels), file=lines)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
