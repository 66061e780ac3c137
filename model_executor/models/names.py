"""Names of a checkpoint's modules and of ours, which fuse some of them.

vLLM's quantization methods know a linear layer by the name that the checkpoint has for it: a fused one by its own name
beside those of the modules that fill it, which ``packed_modules_mapping`` lists. So lists of modules in a quantization
config (what to ignore, regular expressions, settings by module) apply as they were written for the released names.
"""

from collections.abc import Callable, Sequence

from dllm_engine.families import NamedModules, Shard
from dllm_engine.model_executor.models.config_keys import ExpertShape
from dllm_engine.model_executor.models.mlp import expert_shards

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


def shards_of(parameter_name: str, modules: NamedModules, experts: ExpertShape | None) -> Sequence[Shard]:
    """The shards a fused parameter is filled by; ``(None,)`` for a plain one."""
    if experts and (of_experts := expert_shards(parameter_name, experts.num_experts)):
        return of_experts
    # layers.NUMBER.MODULE.weight
    module = parameter_name.rpartition(".")[0].partition(".")[2].partition(".")[2]
    return [shard for ours, shard in modules.values() if ours == module and shard is not None] or (None,)
