"""Every name that is imported from vLLM is in the sources of the installed one, also where only a GPU imports it."""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from symtable import symtable

import pytest

CHECKOUT = Path(__file__).parents[2]
VLLM = Path(find_spec("vllm").origin).parent


def imported(folder: str) -> dict[str, set[str]]:
    """Names that a folder's files import, by module of vLLM."""
    names: dict[str, set[str]] = {}
    for path in (CHECKOUT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith("vllm."):
                names.setdefault(node.module, set()).update(alias.name for alias in node.names)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if f"{alias.name}.".startswith("vllm."):
                        names.setdefault(alias.name, set())
    return names


def bound(module: str) -> set[str]:
    """Names that a module's source binds, and its submodules. The module is not run: it may need a GPU."""
    place = VLLM.joinpath(*module.split(".")[1:])
    source = next(file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())
    symbols = symtable(source.read_text(), str(source), "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()} | {
        path.stem for path in place.glob("*")
    }


@pytest.mark.parametrize("folder", ["dllm_engine", "kernels", "model_executor", "scheduler", "examples"])
def test_what_is_imported_is_there(folder):
    modules = imported(folder)
    assert modules
    missing = {
        f"{module}:{name}"
        for module, names in modules.items()
        for name in names - bound(module)
        if not hasattr(import_module(module), name)  # by an import of all names, or on demand
    }
    assert not missing
