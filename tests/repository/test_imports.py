"""Rooms import downward: kernels, scheduler, model_executor, then the rest of dllm_engine."""

import ast
import os
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SHARED = ("dllm_engine.options", "dllm_engine.families", "dllm_engine.quiet", "dllm_engine.text")
ENGINE = ("dllm_engine.kernels", "dllm_engine.scheduler", "dllm_engine.model_executor")
ALLOWED = {ENGINE[0]: ENGINE[:1], ENGINE[1]: (ENGINE[1], *SHARED), ENGINE[2]: (*ENGINE, *SHARED)}
"""What the modules of a room may import of this package. Shared modules need no vLLM."""


def module_files() -> dict[str, Path]:
    """Every module of the package, by its import name."""
    found = {}
    for folder, _, names in os.walk(CHECKOUT / "dllm_engine", followlinks=True):
        for name in names:
            path = Path(folder, name).relative_to(CHECKOUT)
            if path.suffix == ".py":
                found[".".join(path.with_suffix("").parts).removesuffix(".__init__")] = CHECKOUT / path
    return found


MODULES = module_files()


def imports_of(name: str) -> list[tuple[int, str]]:
    """(line, module of ours) for each import in a module, but those for type checkers alone."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(node.lineno, full if full in MODULES else node.module) for full in names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
    return [(line, module) for line, module in found if module in MODULES and module != name]


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_lies_below_it(room):
    broken = [
        f"{MODULES[name].relative_to(CHECKOUT)}:{line} imports {module}"
        for name in MODULES
        if name.startswith(f"{room}.")
        for line, module in imports_of(name)
        if not any(module == part or module.startswith(f"{part}.") for part in ALLOWED[room])
    ]
    assert not broken, "\n".join(broken)
