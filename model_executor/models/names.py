"""Names of a checkpoint's modules and of ours, which fuse some of them.

vLLM's quantization methods know a linear layer by the name that the checkpoint has for it: a fused one by its own name
beside those of the modules that fill it, which ``packed_modules_mapping`` lists. So lists of modules in a quantization
config (what to ignore, regular expressions, settings by module) apply as they were written for the released names.
"""

import re
from collections.abc import Callable

from dllm_engine.families import NamedModules

PrefixOf = Callable[[str], str]
"""The name that quantization methods know a module of a layer by, from ours (``mlp.down_proj``)."""


def prefixes(modules: NamedModules, layer: str) -> PrefixOf:
    """Names in a checkpoint for our modules of a layer: ``self_attn.qkv_proj`` beside its ``self_attn.q_proj``."""

    def prefix_of(module: str) -> str:
        for released, (ours, shard) in modules.items():
            if ours == module:
                last = (released if shard is None else module).rpartition(".")[2]
                return f"{layer}.{released}".rpartition(".")[0] + f".{last}"
        return f"{layer}.{module}"

    return prefix_of


def packed_modules(modules: NamedModules) -> dict[str, list[str]]:
    """vLLM's ``packed_modules_mapping``: last names of fused modules, and of those that fill them in their order."""
    packed: dict[str, list[str]] = {}
    for released, (ours, shard) in modules.items():
        parts = packed.setdefault(ours.rpartition(".")[2], [])
        if shard is not None and (last := released.rpartition(".")[2]) not in parts:
            parts.append(last)
    return {fused: parts for fused, parts in packed.items() if parts}


_ROUTED_EXPERTS = "routed_experts"
"""vLLM's module that holds the weights of all experts."""
_SHARDS = {"gate_proj": ("w13", "w1"), "up_proj": ("w13", "w3"), "down_proj": ("w2", "w2")}
"""Projections of an expert: vLLM's parameter for those of all experts, and the part of it."""


def expert_shard(module: str, kind: str) -> tuple[str, tuple[str, int]] | None:
    """The parameter of a layer, and the shard of it, that a tensor ``kind`` of an expert fills; None for what is not an
    expert's. ``module`` is the checkpoint's name within the layer: ``mlp.experts.N.gate_proj``."""
    found = re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)", module)
    if found is None or found[2] not in _SHARDS:
        return None
    fused, part = _SHARDS[found[2]]
    return f"mlp.experts.{_ROUTED_EXPERTS}.{fused}_{kind}", (part, int(found[1]))


def expert_shards(parameter_name: str, num_experts: int) -> list[tuple[str, int]]:
    """The shards that a parameter of vLLM's module is filled by; none for other parameters."""
    module, kind = parameter_name.split(".")[-2:]
    parts = [part for fused, part in _SHARDS.values() if module == _ROUTED_EXPERTS and kind.startswith(f"{fused}_")]
    return [(part, number) for part in parts for number in range(num_experts)]
