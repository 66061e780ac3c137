"""The table names everything of vLLM that this package imports."""

import ast
from pathlib import Path

import pytest

from dllm_engine.vllm_hooks import table

CHECKOUT = Path(__file__).parents[2]
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
    return module in table.PUBLIC or f"{module}.{attribute}" in table.PUBLIC


@pytest.mark.parametrize(
    ("folder", "uses"),
    [*((folder, table.PRIVATE + table.CUDA) for folder in PACKAGE), ("examples", table.RAY_SERVE)],
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
    uses = table.PRIVATE + table.CUDA
    plain = {f"{use.module}:{name}" for use in uses for name in use.names.split() if "." not in name}
    assert plain <= everywhere
    assert named(table.RAY_SERVE) <= imported("examples").keys()
