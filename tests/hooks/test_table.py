"""The table names everything of vLLM that this package imports."""

import ast
from pathlib import Path

import pytest

from dllm_engine.vllm_hooks import patch, table
from dllm_engine.vllm_hooks.patch import Private

CHECKOUT = Path(__file__).parents[2]
RAY_SERVE = (
    Private("vllm.entrypoints.cli.serve", "make_arg_parser validate_parsed_serve_args", "for Ray Serve"),
    Private("vllm.entrypoints.launchers.api_server.app_state", "init_app_state", "for Ray Serve"),
    Private("vllm.entrypoints.launchers.api_server.entry", "build_async_engine_client", "for Ray Serve"),
    Private("vllm.entrypoints.launchers.app", "build_app", "for Ray Serve"),
    Private("vllm.utils.argparse_utils", "FlexibleArgumentParser", "for Ray Serve"),
)
"""What ``examples/ray_serve_app.py`` alone uses; an engine starts without it."""
PUBLIC = (
    "vllm vllm.config vllm.distributed vllm.engine.arg_utils vllm.exceptions vllm.logger vllm.outputs vllm.platforms "
    "vllm.model_executor.layers.layernorm vllm.model_executor.layers.linear vllm.model_executor.layers.quantization "
    "vllm.model_executor.layers.vocab_parallel_embedding vllm.sampling_params "
    "vllm.model_executor.model_loader.weight_utils.default_weight_loader"
).split()
"""Modules, and one function, that vLLM's documentation offers to users and to models outside its tree."""
PACKAGE = ("dllm_engine", "kernels", "model_executor", "scheduler")


def imported(folder: str) -> dict[str, set[str]]:
    """``module:name`` of all that a folder's files import from vLLM, and the files."""
    found: dict[str, set[str]] = {}
    for path in sorted((CHECKOUT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith("vllm."):
                names = [f"{node.module}:{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [f"{alias.name}:" for alias in node.names if f"{alias.name}.".startswith("vllm.")]
            else:
                continue
            for name in names:
                found.setdefault(name, set()).add(str(path.relative_to(CHECKOUT)))
    return found


def named(uses) -> set[str]:
    return {f"{use.module}:{name.partition('.')[0]}" for use in uses for name in use.names.split()}


def is_public(name: str) -> bool:
    module, _, attribute = name.partition(":")
    return module in PUBLIC or f"{module}.{attribute}" in PUBLIC


@pytest.mark.parametrize(
    ("folder", "uses"),
    [*((folder, table.PRIVATE) for folder in PACKAGE), ("examples", RAY_SERVE)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_imported_is_public_or_in_the_table(folder, uses):
    # A module of which only attributes are used: what it is imported for is in the table.
    modules = {f"{module}:{name}" for module, _, name in (use.module.rpartition(".") for use in uses)}
    private = {name: files for name, files in imported(folder).items() if not is_public(name)}
    missing = {name: files for name, files in private.items() if name not in named(uses) | modules}
    assert not missing, (
        "list these in dllm_engine/vllm_hooks/table.py, with each release that release.py names looked at"
    )


def test_what_is_in_the_table_is_imported_or_an_attribute_of_ours():
    """Entries without a dot are imported; those with one are of classes that vLLM hands us."""
    everywhere = set().union(*(imported(folder) for folder in PACKAGE))
    uses = table.PRIVATE
    plain = {f"{use.module}:{name}" for use in uses for name in use.names.split() if "." not in name}
    assert plain <= everywhere
    assert named(RAY_SERVE) <= imported("examples").keys()


def test_what_is_in_the_table_is_in_the_sources():
    patch.check((*table.PRIVATE, *RAY_SERVE))
